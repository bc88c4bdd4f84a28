"""Simulated scenarios as an SVG picture: hits by tier, and waits of prompts."""

from __future__ import annotations

from collections.abc import Sequence

from stowage import svg
from stowage.simulator.results import Figures

COLORS = {"host": "#588b8b", "disk": "#e0a458", "object": "#8a6fb0"}
_WAITS = {"p50": "#2f6f4f", "p95": "#c8553d", "p99": "#7d2e20"}
_LEFT, _GAP, _TOP, _HEIGHT = 60, 90, 110, 240
_SLOT_MIN, _PANEL_MIN = 104, 320


def draw(title: str, points: Sequence[tuple[str, Figures]]) -> str:
    """An SVG of (label, figures) pairs, in their order: shares of input tokens on the left, seconds on the right."""
    panel = max(_PANEL_MIN, _SLOT_MIN * len(points))
    width, base = _LEFT + 2 * panel + _GAP + 30, _TOP + _HEIGHT
    right = _LEFT + panel + _GAP
    parts = [
        svg.label(_LEFT, 72, "input tokens that were found, %"),
        svg.label(right, 72, "time to first token, s"),
        f'<path class="axis" d="M{_LEFT} {base}h{panel}M{right} {base}h{panel}" fill="none"/>',
    ]
    found_max = max((figures.hit_rate["all"] for _, figures in points), default=0.0) or 1.0
    wait_max = max((figures.ttft_s.p99 for _, figures in points), default=0.0) or 1.0
    slot = panel / max(1, len(points))
    for number, (label, figures) in enumerate(points):
        middle = slot * (number + 0.5)
        parts += _hits(_LEFT + middle, base, slot, figures, found_max)
        parts += _waits(right + middle, base, slot, figures, wait_max)
        parts += [svg.label(x, base + 18, label, middle=True) for x in (_LEFT + middle, right + middle)]
    tiers = {name: color for name, color in COLORS.items() if any(name in figures.hit_rate for _, figures in points)}
    parts += [svg.legend(_LEFT, base + 60, tiers, 84), svg.legend(right, base + 60, _WAITS, 84)]
    return svg.page(width, base + 90, title, title, "".join(parts))


def _hits(x: float, base: int, slot: float, figures: Figures, most: float) -> list[str]:
    """One bar, a piece for each tier, the fastest at the bottom."""
    parts, y, width = [], float(base), min(48.0, slot * 0.6)
    for name, color in COLORS.items():
        height = _HEIGHT * figures.hit_rate.get(name, 0.0) / most
        y -= height
        if height:
            parts.append(svg.bar(x - width / 2, y, width, height, color))
    parts.append(svg.label(x, y - 6, f"{100 * figures.hit_rate['all']:.1f}", middle=True))
    return parts


def _waits(x: float, base: int, slot: float, figures: Figures, most: float) -> list[str]:
    """A bar for each percentile."""
    parts, width = [], min(28.0, slot * 0.27)
    for index, (name, color) in enumerate(_WAITS.items()):
        seconds = getattr(figures.ttft_s, name)
        height = _HEIGHT * seconds / most
        middle = x + (index - 1) * (width + 2)
        parts.append(svg.bar(middle - width / 2, base - height, width, height, color))
        text = f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.2f}"
        parts.append(svg.label(middle, base - height - 6, text, middle=True))
    return parts
