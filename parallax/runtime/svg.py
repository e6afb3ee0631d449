"""Pictures in SVG: a whole one on white, a line of text, and round numbers for axes."""

import math
from collections.abc import Iterable
from html import escape

INK, PAPER = "#222222", "#ffffff"


def svg(body: Iterable[str], width: float, height: float) -> str:
    """A whole picture on white."""
    size = f"width='{width:.0f}' height='{height:.0f}' viewBox='0 0 {width:.0f} {height:.0f}'"
    style = "font-family='Helvetica, Arial, sans-serif' font-size='11'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' {size} {style}>"
    return "\n".join([head, f"<rect width='100%' height='100%' fill='{PAPER}'/>", *body, "</svg>\n"])


def svg_text(x: float, y: float, text: str, more: str = "", fill: str = INK) -> str:
    """A line of text; `more` are attributes."""
    return f"<text x='{x:.2f}' y='{y:.2f}' fill='{fill}' {more}>{escape(text)}</text>"


def nice_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... (and 0.1, 0.2, 0.5, ...) that is `least` or more.

    >>> nice_step(3), nice_step(0.15)
    (5.0, 0.2)
    """
    power = 10.0 ** math.floor(math.log10(least))
    return next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= least * (1 - 1e-9))
