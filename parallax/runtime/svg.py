"""Pictures in SVG, drawn by matplotlib."""

import io
import re
from collections.abc import Callable
from typing import Any

INK, PAPER = "#222222", "#ffffff"
# Text stays text, a name may have a dollar in it, and equal pictures are equal files.
LOOK = {"svg.fonttype": "none", "svg.hashsalt": "parallax", "text.parse_math": False, "text.color": INK}
LOOK |= {"font.size": 8, "font.family": "sans-serif", "hatch.linewidth": 0.6}
TIP = "tip "  # how the gid of an artist begins that is named while the mouse is on it


def svg(draw: Callable[[Any], None], width: float, height: float) -> str:
    """What `draw` puts on matplotlib's axes of so many points, and what it puts around them."""
    import matplotlib  # here: most commands draw nothing
    from matplotlib.figure import Figure

    text = io.StringIO()
    with matplotlib.rc_context(LOOK):
        axes = Figure((width / 72, height / 72)).add_axes((0, 0, 1, 1))
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        axes.figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
    picture = text.getvalue()
    return re.sub(f'<g id="{TIP}([^"]*)">', r"<g><title>\1</title>", picture[picture.index("<svg") :])
