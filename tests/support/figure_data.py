"""What a figure shows, as data: an extension of IPython that stores it beside the picture.

A picture's pixels depend on fonts and on versions of matplotlib. What was plotted does not.
"""

import json
from collections.abc import Iterator
from typing import Any

import matplotlib.colors
import numpy as np
from IPython.core.formatters import BaseFormatter
from matplotlib.figure import Figure

FORM = "text/vnd.parallax.plotted"  # a JSON object in each line
COLOURBAR = "<colorbar>"  # matplotlib's label of such axes


class Plotted(BaseFormatter):
    """Figures in FORM."""

    format_type = FORM

    def __call__(self, shown):  # matplotlib takes figures out of the formatters' own tables
        if isinstance(shown, Figure):
            return "\n".join(json.dumps(one, ensure_ascii=False) for one in plotted(shown))


def load_ipython_extension(shell):
    """Every figure that is displayed has FORM as one of its forms."""
    shell.display_formatter.formatters[FORM] = Plotted(parent=shell.display_formatter)


def plotted(figure) -> Iterator[dict[str, Any]]:
    """The texts of a figure, then each of its axes, followed by what is drawn there."""
    yield {"figure": [text.get_text() for text in figure.texts]}
    for ax in figure.axes:
        yield {
            "axes": [ax.get_title(loc) for loc in ("left", "center", "right")],
            "labels": [ax.get_xlabel(), ax.get_ylabel()],
            "scales": [ax.get_xscale(), ax.get_yscale()],
            **points(ax.get_xlim(), ax.get_ylim()),
        }
        if ax.get_label() != COLOURBAR:
            yield from drawn(ax)


def drawn(ax) -> Iterator[dict[str, Any]]:
    """Ticks, the legend and each artist, in the units of the axes."""
    yield {"ticks": [[text.get_text() for text in axis.get_ticklabels()] for axis in (ax.xaxis, ax.yaxis)]}
    if ax.get_legend():
        yield {"legend": [text.get_text() for text in ax.get_legend().get_texts()]}
    for line in ax.lines:
        yield {"line": colour(line.get_color()), **points(*line.get_data())}
    for patch in ax.patches:
        corners = patch.get_patch_transform().transform_path(patch.get_path()).vertices
        yield {"patch": colour(patch.get_facecolor()), **points(*corners.T)}
    for marks in ax.collections:
        colours = dict.fromkeys(map(colour, marks.get_facecolors()))
        yield {"marks": [*colours], **points(*np.ma.asarray(marks.get_offsets()).T)}
    for image in ax.images:
        yield {"image": list(image.get_array().shape), "shades": rounded(image.norm(image.get_array()))}
    for text in ax.texts:
        yield {"text": text.get_text(), **points(*np.transpose([text.get_position()]))}


def points(x, y) -> dict[str, str]:
    return {"x": rounded(x), "y": rounded(y)}


def rounded(array) -> str:
    """Numbers to five digits."""
    return " ".join(f"{x:.5g}" for x in np.ma.filled(np.ma.asarray(array, float), np.nan).ravel())


def colour(value) -> str:
    return matplotlib.colors.to_hex(value, keep_alpha=True)
