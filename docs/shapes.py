"""Texts, boxes and lines of the pictures that are drawn as SVG by hand, here and in benchmarks/timeline_picture.py."""

from collections.abc import Iterable
from html import escape

INK, SOFT, PAPER = "#1d2126", "#5c6670", "#ffffff"
EMPTY = "#f1f3f4"  # where nothing happens


def page(width: float, height: float, parts: Iterable[str], *, font: int, title: str = "", words: str = "") -> str:
    """A picture of this size. Readers of a screen are read its title, and what it shows in `words`."""
    size = f"width='{width:.0f}' height='{height:.0f}' viewBox='0 0 {width:.0f} {height:.0f}'"
    role = "role='img' aria-labelledby='title words' " if title else ""
    head = f"<svg xmlns='http://www.w3.org/2000/svg' {size} {role}"
    head += f"font-family='Helvetica, Arial, sans-serif' font-size='{font}'>"
    spoken = [f"<title id='title'>{escape(title)}</title>", f"<desc id='words'>{escape(words)}</desc>"] if title else []
    return "\n".join([head, *spoken, f"<rect width='100%' height='100%' fill='{PAPER}'/>", *parts, "</svg>\n"])


def text(x: float, y: float, what: str, *, size: int = 12, fill: str = INK, anchor: str = "start", more="") -> str:
    place = f"x='{x:.1f}' y='{y:.1f}' font-size='{size}' text-anchor='{anchor}'"
    return f"<text {place} fill='{fill}' {more}>{escape(what)}</text>"


def box(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    return f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}' fill='{fill}' {more}/>"


def line(x1: float, y1: float, x2: float, y2: float, stroke: str, width: float = 1.5) -> str:
    return f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{stroke}' stroke-width='{width}'/>"
