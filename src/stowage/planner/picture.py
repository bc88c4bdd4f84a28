"""A placement as an SVG picture: how full each tier is, and the tier of each layer."""

from __future__ import annotations

from collections.abc import Mapping

from stowage import svg
from stowage.config.memory import format_size
from stowage.planner.report import layer_tiers, segments
from stowage.planner.solve import DEVICE, DISK, HOST, TIERS, Solution

COLORS: Mapping[str, str] = {
    "weights": "#2f6f4f",
    "KV": "#c8553d",
    "ring": "#e0a458",
    "cache": "#7fa650",
    "working": "#8d6a9f",
    "free": "#d9d4c7",
}
TIER_COLORS: Mapping[str, str] = {DEVICE: "#2f6f4f", HOST: "#588b8b", DISK: "#e0a458"}
_WHERE = {"in device": TIER_COLORS[DEVICE], "in host": TIER_COLORS[HOST], "on disk": TIER_COLORS[DISK]}
WIDTH = 860
_LEFT, _BAR, _ROW, _TOP = 110, 560, 44, 92
_STRIP = 64


def draw(solution: Solution) -> str:
    """The SVG. A bar's length is a tier's budget, with its parts inside; below, one column for each layer."""
    model, prediction = solution.model, solution.prediction
    title = f"{model.family}, {model.total_parameters / 1e9:.3g} B parameters in {model.dtype}"
    speeds = f"predicted: {prediction.tokens_per_s:.3g} tokens/s for a batch of {solution.workload.batch}, "
    speeds += f"first token of a prompt of {solution.workload.prompt:,} tokens after {prediction.ttft_s:.3g} s"
    parts, y = [svg.label(24, 58, speeds)], _TOP
    for tier in TIERS:
        parts.append(_bar(solution, tier, y))
        y += _ROW
    y += 12
    parts += [svg.label(24, y, "where each layer lies, first to last"), _strip(solution, y + 10)]
    y += _STRIP + 36
    parts.append(svg.legend(24, y, {**COLORS, **_WHERE}))
    return svg.page(WIDTH, y + 24, "Where a model's weights and KV lie", title, "".join(parts))


def _bar(solution: Solution, tier: str, y: int) -> str:
    found = segments(solution, tier)
    whole = sum(nbytes for _, nbytes in found)
    drawn, x = [], float(_LEFT)
    for kind, nbytes in found:
        width = _BAR * nbytes / whole
        drawn.append(svg.bar(x, y, width, 24, COLORS[kind], f"{kind}: {format_size(nbytes)}"))
        x += width
    text = f"{format_size(solution.used_bytes(tier))} of {format_size(whole)}" if whole else "none given"
    label = f'<text x="24" y="{y + 17}">{tier}</text>'
    return f'{label}{"".join(drawn)}<text x="{_LEFT + _BAR + 12}" y="{y + 17}">{text}</text>'


def _strip(solution: Solution, y: int) -> str:
    tiers = layer_tiers(solution)
    width = (WIDTH - 48) / max(1, len(tiers))
    return "".join(
        svg.bar(24 + at * width, y, max(0.5, width - 1), _STRIP, TIER_COLORS[tier]) for at, tier in enumerate(tiers)
    )
