"""The demo as a picture: time to first token of every question in both processes, and where its prompt came from. SVG,
no library needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

WIDTH = 860
_ROW = 34
_LEFT = 290
_BAR = WIDTH - _LEFT - 110
_TOP = 86
COLORS = {"computed": "#c8553d", "device": "#2f6f4f", "host": "#588b8b", "disk": "#e0a458"}
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1d2b33}.title{font-size:18px;font-weight:600}"
    ".small{font-size:11px;fill:#5b6b73}"
    "@media(prefers-color-scheme:dark){.page{fill:#141b20}text{fill:#e8eef1}.small{fill:#9fb0b8}}"
)


def draw(runs: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> str:
    """An SVG of ``runs``: (title, answers as ``ask`` gives them). A bar's length is the time to first token, its
    colours the prompt's origins.
    """
    slowest_s = max(answer["ttft_s"] for _, answers in runs for answer in answers)
    parts, y = [], _TOP
    for title, answers in runs:
        parts.append(f'<text x="24" y="{y}" font-weight="600">{escape(title)}</text>')
        y += 12
        for answer in answers:
            parts.append(_row(answer, y, slowest_s))
            y += _ROW
        y += 30
    height = y + 40
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img">'
        f"<title>Time to first token, and where the prompt came from</title><style>{_STYLE}</style>"
        f'<rect class="page" width="{WIDTH}" height="{height}" fill="#fbfaf7"/>'
        '<text class="title" x="24" y="36">The same document, asked about before and after a restart</text>'
        '<text class="small" x="24" y="56">length: time to first token; colour: where the tokens came from</text>'
        f"{''.join(parts)}{_legend(height - 24)}</svg>\n"
    )


def shares(answer: Mapping[str, Any]) -> dict[str, int]:
    """Prompt tokens by origin: computed, device, host, disk."""
    reused = {name: int(answer["reused_tokens"].get(name, 0)) for name in ("device", "host", "disk")}
    return {"computed": answer["prompt_tokens"] - sum(reused.values())} | reused


def _row(answer: Mapping[str, Any], y: int, slowest_s: float) -> str:
    length = max(6.0, _BAR * answer["ttft_s"] / slowest_s)
    x, bars = float(_LEFT), []
    for name, tokens in shares(answer).items():
        width = length * tokens / answer["prompt_tokens"]
        if tokens:
            bars.append(f'<rect x="{x:.1f}" y="{y + 4}" width="{width:.1f}" height="20" fill="{COLORS[name]}"/>')
        x += width
    question = answer["question"] if len(answer["question"]) <= 42 else answer["question"][:40] + "…"
    return (
        f'<text class="small" x="40" y="{y + 19}">{escape(question)}</text>{"".join(bars)}'
        f'<text x="{_LEFT + length + 8:.1f}" y="{y + 19}">{answer["ttft_s"] * 1000:.0f} ms</text>'
    )


def _legend(y: int) -> str:
    parts, x = [], 24
    for name, color in COLORS.items():
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text class="small" x="{x + 18}" y="{y}">{name}</text>')
        x += 96
    return "".join(parts)
