"""A figure as an ``<svg>`` element of a page: in the page's colours, with ids of its own, and no larger than need be.

Notable: labels are text, in the font that the layout was made with or one of its width. matplotlib names every group,
styles every mark and writes six decimals; here ids that nothing refers to go, the others become short, marks that look
the same are styled once, and places are rounded to a hundredth of a point: a fifth of the size.
"""

from __future__ import annotations

import io
import re

from matplotlib import rc_context
from matplotlib.figure import Figure

from driftgate.reports.drawing import COLOURS, GRID, INK, MUTED, PAPER

__all__ = ["to_svg"]

_VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    GRID: "var(--grid)",
    PAPER: "var(--paper)",
    COLOURS[0]: "var(--blue)",
}
"""Colours that a dark page replaces."""
_SHADES = "QuadMesh"
"""Group of the cells of a heat map, which keeps its name."""
_STYLED = re.compile(r'<use ([^>]*) style="([^"]*)"/>(?:<use [^>]* style="\2"/>)+')
_LONG = re.compile(r"(?<![\w#])(-?\d+\.\d{3,})(?!\w)")


def to_svg(figure: Figure, *, key: str, description: str) -> str:
    """A figure as an ``<svg>`` element in the colours of its page, the same each time.

    Args:
        figure: what to draw.
        key: prefix of every id, short; a letter first.
        description: read to people who do not see the picture; must hold no markup.
    """
    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": key, "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Type": None, "Format": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg ") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = svg.replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "").replace("xlink:href=", "href=")
    svg = _shorten_ids(svg, key)
    svg = re.sub(r"<[^>]+>", lambda tag: _LONG.sub(_round, tag[0]), svg)  # no number that is read is in a tag
    svg = re.sub(r">\s+<", "><", svg)
    svg = re.sub(r"\s*\n\s*", " ", svg)
    svg = svg.replace(" font-family: 'DejaVu Sans';", "").replace("; font-family: 'DejaVu Sans'", "")
    svg = _unwrap(svg)
    svg = _STYLED.sub(_style_once, svg)
    svg = re.sub(r"(?<= d=\")[^\"]*", lambda path: re.sub(r"(?<=[A-Za-z]) | (?=[A-Za-z]|-|$)", "", path[0]), svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg.strip().replace("<svg ", f'<svg role="img" aria-label="{description}" ', 1)


def _shorten_ids(svg: str, key: str) -> str:
    """Number the ids that something refers to, and drop the others."""
    used = dict.fromkeys(re.findall(r"(?:href=\"#|url\(#)([^\")]+)", svg))
    short = {name: f"{key}-{number}" for number, name in enumerate(used)}

    def rename(found: re.Match[str]) -> str:
        name = found[1]
        kept = f"{key}-{name}" if _SHADES in name else None
        new = short.get(name, kept)
        return "" if new is None else f' id="{new}"'

    svg = re.sub(r'\sid="([^"]*)"', rename, svg)
    return re.sub(r"(href=\"#|url\(#)([^\")]+)", lambda found: found[1] + short[found[2]], svg)


def _unwrap(svg: str) -> str:
    """Drop groups without attributes."""
    kept, plain = [], []
    for part in re.split(r"(</?g\b[^>]*>)", svg):
        if part.startswith("<g"):
            plain.append(part == "<g>")
        if (part == "</g>" and plain.pop()) or part == "<g>":
            continue
        kept.append(part)
    return "".join(kept)


def _style_once(marks: re.Match[str]) -> str:
    plain = marks[0].replace(f' style="{marks[2]}"', "")
    return f'<g style="{marks[2]}">{plain}</g>'


def _round(number: re.Match[str]) -> str:
    return f"{float(number[1]) + 0.0:.2f}".rstrip("0").rstrip(".")
