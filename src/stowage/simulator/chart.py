"""Simulated scenarios as an SVG picture: hits by tier, and waits of prompts. Needs no library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from stowage.simulator.results import Figures

__all__ = ["draw"]

COLORS = {"host": "#588b8b", "disk": "#e0a458", "object": "#8a6fb0"}
_WAITS = {"p50": "#2f6f4f", "p95": "#c8553d", "p99": "#7d2e20"}
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1d2b33}.title{font-size:18px;font-weight:600}"
    ".small{font-size:11px;fill:#5b6b73}.axis{stroke:#9fb0b8}"
    "@media(prefers-color-scheme:dark){.page{fill:#141b20}text{fill:#e8eef1}.small{fill:#9fb0b8}}"
)
_LEFT, _GAP, _TOP, _HEIGHT = 60, 90, 110, 240
_SLOT_MIN, _PANEL_MIN = 104, 320


def draw(title: str, points: Sequence[tuple[str, Figures]]) -> str:
    """An SVG of (label, figures) pairs, in their order: shares of input tokens on the left, seconds on the right."""
    panel = max(_PANEL_MIN, _SLOT_MIN * len(points))
    width, base = _LEFT + 2 * panel + _GAP + 30, _TOP + _HEIGHT
    right = _LEFT + panel + _GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{base + 90}" '
        f'viewBox="0 0 {width} {base + 90}" role="img"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f'<rect class="page" width="{width}" height="{base + 90}" fill="#fbfaf7"/>'
        f'<text class="title" x="24" y="36">{escape(title)}</text>'
        f'<text class="small" x="{_LEFT}" y="72">input tokens that were found, %</text>'
        f'<text class="small" x="{right}" y="72">time to first token, s</text>'
        f'<path class="axis" d="M{_LEFT} {base}h{panel}M{right} {base}h{panel}" fill="none"/>'
    ]
    found_max = max((figures.hit_rate["all"] for _, figures in points), default=0.0) or 1.0
    wait_max = max((figures.ttft_s.p99 for _, figures in points), default=0.0) or 1.0
    slot = panel / max(1, len(points))
    for number, (label, figures) in enumerate(points):
        middle = slot * (number + 0.5)
        parts += _hits(_LEFT + middle, base, slot, figures, found_max)
        parts += _waits(right + middle, base, slot, figures, wait_max)
        for x in (_LEFT + middle, right + middle):
            parts.append(f'<text class="small" x="{x:.1f}" y="{base + 18}" text-anchor="middle">{escape(label)}</text>')
    tiers = {name: color for name, color in COLORS.items() if any(name in figures.hit_rate for _, figures in points)}
    parts += [_legend(_LEFT, base + 60, tiers), _legend(right, base + 60, _WAITS), "</svg>\n"]
    return "".join(parts)


def _hits(x: float, base: int, slot: float, figures: Figures, most: float) -> list[str]:
    """One bar, a piece for each tier, the fastest at the bottom."""
    parts, y, width = [], float(base), min(48.0, slot * 0.6)
    for name, color in COLORS.items():
        height = _HEIGHT * figures.hit_rate.get(name, 0.0) / most
        y -= height
        if height:
            parts.append(_bar(x - width / 2, y, width, height, color))
    parts.append(_number(x, y - 6, f"{100 * figures.hit_rate['all']:.1f}"))
    return parts


def _waits(x: float, base: int, slot: float, figures: Figures, most: float) -> list[str]:
    """A bar for each percentile."""
    parts, width = [], min(28.0, slot * 0.27)
    for index, (name, color) in enumerate(_WAITS.items()):
        seconds = getattr(figures.ttft_s, name)
        height = _HEIGHT * seconds / most
        middle = x + (index - 1) * (width + 2)
        parts.append(_bar(middle - width / 2, base - height, width, height, color))
        parts.append(_number(middle, base - height - 6, f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.2f}"))
    return parts


def _bar(x: float, y: float, width: float, height: float, color: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}"/>'


def _number(x: float, y: float, text: str) -> str:
    return f'<text class="small" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{text}</text>'


def _legend(x: float, y: float, colors: dict[str, str]) -> str:
    parts = []
    for index, (name, color) in enumerate(colors.items()):
        left = x + 84 * index
        parts.append(_bar(left, y - 10, 12, 12, color))
        parts.append(f'<text class="small" x="{left + 18:.1f}" y="{y}">{name}</text>')
    return "".join(parts)
