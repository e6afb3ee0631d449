"""SVG pictures with matplotlib."""

import io
import re
from collections.abc import Callable
from typing import Any

INK, PAPER = "#222222", "#ffffff"
# Text stays text, with two fonts to name, names may contain a dollar sign, and equal pictures give equal files.
LOOK = {"svg.fonttype": "none", "svg.hashsalt": "parallax", "text.parse_math": False, "text.color": INK}
LOOK |= {"font.size": 8, "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"]}
LOOK |= {"hatch.linewidth": 0.6}
TIP = "tip "  # prefix of the gid of an artist with a tooltip


def svg(draw: Callable[[Any], None], width: float, height: float) -> str:
    """The SVG of what `draw` draws on and around matplotlib axes of this size in points."""
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
