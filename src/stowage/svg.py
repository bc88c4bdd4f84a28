"""The parts of SVG pictures that all of ours have: the page, bars, labels and legends. Lengths are in pixels."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1d2b33}.title{font-size:18px;font-weight:600}"
    ".small{font-size:11px;fill:#5b6b73}.axis{stroke:#9fb0b8}"
    "@media(prefers-color-scheme:dark){.page{fill:#141b20}text{fill:#e8eef1}.small{fill:#9fb0b8}}"
)


def page(width: int, height: int, about: str, title: str, body: str) -> str:
    """A whole picture. ``about`` describes it to screen readers, ``title`` stands at its top; ``body``: its parts."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img"><title>{escape(about)}</title><style>{_STYLE}</style>'
        f'<rect class="page" width="{width}" height="{height}" fill="#fbfaf7"/>'
        f'<text class="title" x="24" y="36">{escape(title)}</text>{body}</svg>\n'
    )


def bar(x: float, y: float, width: float, height: float, color: str, about: str = "") -> str:
    """A filled rectangle; ``about`` is shown under the pointer."""
    shape = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}"'
    return f"{shape}><title>{escape(about)}</title></rect>" if about else f"{shape}/>"


def label(x: float, y: float, text: str, *, middle: bool = False, color: str = "") -> str:
    """Small text that begins at ``x``, or has its middle there."""
    more = (' text-anchor="middle"' if middle else "") + (f' style="fill:{color}"' if color else "")
    return f'<text class="small" x="{x:.1f}" y="{y:.1f}"{more}>{escape(text)}</text>'


def legend(x: float, y: float, colors: Mapping[str, str], step: int = 96) -> str:
    """A square and a name for each color, ``step`` apart."""
    at = [x + step * number for number in range(len(colors))]
    entries = zip(at, colors.items(), strict=True)
    return "".join(bar(left, y - 10, 12, 12, color) + label(left + 18, y, name) for left, (name, color) in entries)
