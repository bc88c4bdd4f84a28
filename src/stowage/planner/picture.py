"""A placement as an SVG picture: how full each tier is, and the tier of each layer. Needs no library."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

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
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1d2b33}.title{font-size:18px;font-weight:600}"
    ".small{font-size:11px;fill:#5b6b73}"
    "@media(prefers-color-scheme:dark){.page{fill:#141b20}text{fill:#e8eef1}.small{fill:#9fb0b8}}"
)


def draw(solution: Solution) -> str:
    """The SVG. A bar's length is a tier's budget, with its parts inside; below, one column for each layer."""
    model, prediction = solution.model, solution.prediction
    title = f"{model.family}, {model.total_parameters / 1e9:.3g} B parameters in {model.dtype}"
    speeds = f"predicted: {prediction.tokens_per_s:.3g} tokens/s for a batch of {solution.workload.batch}, "
    speeds += f"first token of a prompt of {solution.workload.prompt:,} tokens after {prediction.ttft_s:.3g} s"
    parts, y = [], _TOP
    for tier in TIERS:
        parts.append(_bar(solution, tier, y))
        y += _ROW
    y += 12
    parts.append(f'<text class="small" x="24" y="{y}">where each layer lies, first to last</text>')
    parts.append(_strip(solution, y + 10))
    y += _STRIP + 36
    parts.append(_legend(y, {**COLORS, **_WHERE}))
    height = y + 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'role="img"><title>Where a model\'s weights and KV lie</title><style>{_STYLE}</style>'
        f'<rect class="page" width="{WIDTH}" height="{height}" fill="#fbfaf7"/>'
        f'<text class="title" x="24" y="36">{escape(title)}</text>'
        f'<text class="small" x="24" y="58">{escape(speeds)}</text>{"".join(parts)}</svg>\n'
    )


def _bar(solution: Solution, tier: str, y: int) -> str:
    found = segments(solution, tier)
    whole = sum(nbytes for _, nbytes in found)
    drawn, x = [], float(_LEFT)
    for kind, nbytes in found:
        width = _BAR * nbytes / whole
        drawn.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="24" fill="{COLORS[kind]}">'
            f"<title>{kind}: {format_size(nbytes)}</title></rect>"
        )
        x += width
    text = f"{format_size(solution.used_bytes(tier))} of {format_size(whole)}" if whole else "none given"
    label = f'<text x="24" y="{y + 17}">{tier}</text>'
    return f'{label}{"".join(drawn)}<text x="{_LEFT + _BAR + 12}" y="{y + 17}">{text}</text>'


def _strip(solution: Solution, y: int) -> str:
    tiers = layer_tiers(solution)
    width = (WIDTH - 48) / max(1, len(tiers))
    return "".join(
        f'<rect x="{24 + at * width:.2f}" y="{y}" width="{max(0.5, width - 1):.2f}" height="{_STRIP}" '
        f'fill="{TIER_COLORS[tier]}"/>'
        for at, tier in enumerate(tiers)
    )


def _legend(y: int, colors: Mapping[str, str]) -> str:
    drawn, x = [], 24
    for name, color in colors.items():
        drawn.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{color}"/>')
        drawn.append(f'<text class="small" x="{x + 18}" y="{y}">{name}</text>')
        x += 96
    return "".join(drawn)
