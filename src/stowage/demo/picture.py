"""The demo as an SVG picture: time to first token of each question in both processes, and its prompt's origin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from stowage import svg

WIDTH = 860
_ROW = 34
_LEFT = 290
_BAR = WIDTH - _LEFT - 110
_TOP = 86
COLORS = {"computed": "#c8553d", "device": "#2f6f4f", "host": "#588b8b", "disk": "#e0a458"}


def draw(runs: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> str:
    """An SVG of ``runs``: (title, answers as ``ask`` gives them). A bar's length is the time to first token, its
    colours the prompt's origins.
    """
    slowest_s = max(answer["ttft_s"] for _, answers in runs for answer in answers)
    parts = [svg.label(24, 56, "length: time to first token; colour: where the tokens came from")]
    y = _TOP
    for title, answers in runs:
        parts.append(f'<text x="24" y="{y}" font-weight="600">{escape(title)}</text>')
        y += 12
        for answer in answers:
            parts.append(_row(answer, y, slowest_s))
            y += _ROW
        y += 30
    parts.append(svg.legend(24, y + 16, COLORS))
    about = "Time to first token, and where the prompt came from"
    return svg.page(WIDTH, y + 40, about, "The same document, asked about before and after a restart", "".join(parts))


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
            bars.append(svg.bar(x, y + 4, width, 20, COLORS[name]))
        x += width
    question = answer["question"] if len(answer["question"]) <= 42 else answer["question"][:40] + "…"
    return (
        f"{svg.label(40, y + 19, question)}{''.join(bars)}"
        f'<text x="{_LEFT + length + 8:.1f}" y="{y + 19}">{answer["ttft_s"] * 1000:.0f} ms</text>'
    )
