"""One frame of ``stowage top``: a server's state as rich shows it. Draws what it is given, asks nobody.

Texts come from a server, and must not drive the terminal: they are made printable, and never read as markup.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from stowage.cli.output import format_seconds
from stowage.config.memory import format_size

State = Mapping[str, Any]
_COLORS = {
    "device": "blue",
    "host": "cyan",
    "disk": "yellow",
    "valkey": "magenta",
    "object": "bright_magenta",
    "computed": "bright_black",
}
_MOODS = {"failed": "red", "left": "red", "done": "dim", "waiting": "yellow", "preempted": "yellow"}
_KINDS = {
    "full": "full attention",
    "sliding": "sliding window",
    "chunked": "chunked-local",
    "recurrent": "recurrent state",
}
_SPARKS, _PLAIN_SPARKS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"
_FULL, _FAINT, _FREE = "█▓░"
_PLAIN_FULL, _PLAIN_FAINT, _PLAIN_FREE = "#=."
_ONCE_ROWS = 12
_LINES_FOR_ALL = 34
_NUMBER = 7
_ORIGIN_BAR = 16
_NONE = "-"


@dataclass(frozen=True, slots=True)
class Terminal:
    """How much room there is. ``plain``: bars are made of ASCII."""

    width: int
    plain: bool

    @property
    def wide(self) -> bool:
        return self.width >= 110

    @property
    def bar(self) -> int:
        return 24 if self.wide else 12

    @property
    def spark(self) -> int:
        return max(8, min(60, self.width - 48))

    @property
    def id(self) -> int:
        """Of a request; a part of it tells it from others."""
        return 28 if self.width >= 140 else 12


def frame(
    state: State,
    before: State | None = None,
    *,
    width: int,
    height: int | None = None,
    plain: bool = False,
    trouble: str = "",
) -> RenderableType:
    """The picture. ``before``: an earlier state, for speeds. ``height``: lines of the terminal; ``None``: no limit."""
    look = Terminal(width, plain)
    parts: list[RenderableType] = [_head(state["server"], trouble), _gain(state["totals"], look), Text()]
    parts += [_memory(state["memory"], look), Text()]
    if height is None or height >= _LINES_FOR_ALL:
        parts += [_transfers(state, before), _moved(state["transfers"]), Text()]
        parts += [_history(state["history"], look), Text()]
    rows = _ONCE_ROWS
    if height is not None:
        console = Console(width=width, height=height)
        rows = max(1, height - 2 - sum(len(console.render_lines(part)) for part in parts))
    return Group(*parts, _requests(state["requests"], state["server"]["now_s"], rows, look))


def _head(server: State, trouble: str) -> Text:
    head = Text.assemble(("Stowage", "bold"), "  ", (printable(server["model"]), "bold cyan"))
    head.append(f"  up {_span(server['now_s'])}, {server['choices_open']} of {server['choices_limit']} answers open")
    if trouble:
        head.append(f"\nCONNECTION LOST  {printable(trouble)}", "bold red")
    elif not server["alive"]:
        head.append("  THE ENGINE HAS STOPPED", "bold red")
    elif server["stopping"]:
        head.append("  stopping", "bold yellow")
    elif server["age_s"] > 3:
        head.append(f"  busy: as of {server['age_s']:.0f} s ago", "yellow")
    return head


def _gain(totals: State, look: Terminal) -> Table:
    table = Table(box=box.ROUNDED, show_header=True, header_style="dim", expand=False)
    corrupt = totals["corrupt_chunks"]
    shown = [
        ("tokens not recomputed", Text(f"{totals['tokens_reused']:,}", "bold green")),
        ("time saved", Text(_time(totals["seconds_saved"]), "bold")),
        ("hit rate", Text(_percent(totals["hit_rate"]), "bold")),
        ("corrupt chunks", Text(f"{corrupt:,}", "bold red" if corrupt else "bold")),
        ("requests", Text(f"{int(totals['requests']):,}", "bold")),
        ("prefill", Text(f"{totals['prefill_tokens_per_s']:,.0f} tokens/s", "bold")),
    ]
    shown = shown if look.wide else shown[:4]
    for name, _ in shown:
        table.add_column(name)
    table.add_row(*(text for _, text in shown))
    return table


def _memory(memory: State, look: Terminal) -> Table:
    table = _table("Memory", "", "", "")
    table.columns[1].min_width, table.columns[2].min_width = len("KV, sliding window"), look.bar
    device, host = memory["device"], memory["host"]
    table.add_row("device", "weights", _bar([(1.0, "device", False)], look), format_size(device["weights_bytes"]))
    for group in device["groups"]:
        parts = [
            (group["used"] / group["blocks"], "device", False),
            (group["cached"] / group["blocks"], "device", True),
        ]
        used, kept, whole = (format_size(group[name]) for name in ("used_bytes", "cached_bytes", "bytes"))
        text = f"{used} in use, {kept} cached, of {whole}"
        table.add_row("", f"KV, {_kind(group['kind'])}", _bar(parts, look), text)
    for number, slab in enumerate(host["slabs"] if host else ()):
        name = " and ".join(map(_kind, slab["kinds"]))
        text = f"{format_size(slab['bytes_used'])} of {format_size(slab['bytes'])}"
        bar = _bar([(slab["bytes_used"] / slab["bytes"], "host", False)], look)
        table.add_row("" if number else "host", name, bar, text)
    for tier in memory["tiers"]:
        table.add_row(*_tier(tier, look))
    return table


def _tier(tier: State, look: Terminal) -> Sequence[RenderableType]:
    name, chunks = printable(tier["name"]), tier["chunks"]
    known = "chunks" if chunks is None else f"{chunks:,} {'known ' if tier['shared'] else ''}chunks"
    bar, text = Text(), "shared" if tier["shared"] else ""
    if tier["bytes_limit"] and tier["bytes_used"] is not None:
        bar = _bar([(tier["bytes_used"] / tier["bytes_limit"], name, False)], look)
        text = f"{format_size(tier['bytes_used'])} of {format_size(tier['bytes_limit'])}"
    said = Text(text)
    if tier["breaker"] != "closed":
        said.append("  left alone for a while" if tier["breaker"] == "open" else "  being tried again", "bold red")
    return name, known, bar, said


def _transfers(state: State, before: State | None) -> Table:
    table = _table("Transfers", "loading now", "storing now", "read", "written", numbers=True)
    moved = state["transfers"]
    for tier in state["memory"]["tiers"]:
        speeds = [_speed(state, before, tier["name"], name) for name in ("read_bytes", "write_bytes")]
        under_way = [_count(tier[name]) for name in ("loads_under_way", "stores_under_way")]
        table.add_row(printable(tier["name"]), *under_way, *speeds)
    if not table.row_count:
        table.add_row("no tier below the host" if moved is not None else "no host memory", "", "", "", "")
    return table


def _moved(transfers: State | None) -> Text:
    """What all tiers have moved together."""
    if transfers is None:
        return Text()
    loaded, written = (format_size(transfers[name]) for name in ("promoted_bytes", "spilled_bytes"))
    text = f"{transfers['transfers_under_way']:,} under way, {transfers['spills_waiting']:,} chunks to be written, "
    return Text(f"{text}{loaded} loaded, {written} written", "dim")


def _speed(state: State, before: State | None, tier: str, name: str) -> str:
    """Bytes per second since ``before``; without it, or while nothing moves, all bytes so far."""

    def of(which: State) -> Any:
        return next((one[name] for one in which["memory"]["tiers"] if one["name"] == tier), None)

    total = of(state)
    if total is None:
        return _NONE
    if before is not None and before["server"]["started_at"] == state["server"]["started_at"]:
        seconds = state["server"]["now_s"] - before["server"]["now_s"]
        moved = total - (of(before) or 0)
        if moved > 0 and seconds > 0:
            return f"{format_size(int(moved / seconds))}/s"
    return format_size(total)


def _history(history: State, look: Terminal) -> Table:
    table = _table("History", "", "now", "most")
    table.columns[1].min_width, table.columns[2].min_width = look.spark, _NUMBER
    samples = history["samples"][-look.spark - 1 :]
    at = {name: number for number, name in enumerate(history["names"])}

    def grown(name: str) -> list[float]:
        column = at[name]
        return [max(0.0, (b[column] - a[column]) / max(b[0] - a[0], 1e-9)) for a, b in pairwise(samples)]

    lines = [("tokens/s not recomputed", "tokens_reused"), ("tokens/s computed", "prompt_tokens_computed")]
    for title, name in [*lines, ("answer tokens/s", "answer_tokens")]:
        values = grown(name)
        table.add_row(title, _spark(values, look), *(f"{v:,.0f}" for v in (_last(values), max(values, default=0.0))))
    return table


def _requests(requests: State, now_s: float, rows: int, look: Terminal) -> Table:
    widths = {
        "Requests": look.id,
        "state": 9,
        "prompt": _NUMBER,
        "prefix from": 0,
        "answer": _NUMBER,
        "first token": 11,
    }
    widths |= {"took": 9} if look.wide else {}
    widths["prefix from"] = max(8, look.width - sum(widths.values()) - 2 * len(widths))
    table = _table(*widths)
    for column, (name, width) in zip(table.columns, widths.items(), strict=True):
        column.width = width
        column.justify = "right" if name in ("prompt", "answer", "first token", "took") else "left"
    for request in [*requests["open"], *requests["ended"]][:rows]:
        ended_s, first_s = (request["times"][name] for name in ("ended_s", "first_token_s"))
        took_s = ended_s if ended_s is not None else max(0.0, now_s - request["arrived_s"])
        cells: list[RenderableType] = [
            printable(request["id"])[: look.id],
            Text(printable(request["state"]), _MOODS.get(request["state"], "green")),
            _count(request["prompt_tokens"]),
            _origins(request, look),
            _count(request["answer_tokens"]),
            _NONE if first_s is None else _time(first_s),
            _time(took_s),
        ]
        table.add_row(*cells[: len(widths)])
    if not table.row_count:
        table.add_row("none yet")
    return table


def _origins(request: State, look: Terminal) -> Text:
    tiers = [(tier, tokens) for tier, tokens in request["reused_tokens"].items() if tokens]
    if request["computed_tokens"]:
        tiers.append(("computed", request["computed_tokens"]))
    text = Text()
    if look.wide:
        shares = [(tokens / request["prompt_tokens"], tier, False) for tier, tokens in tiers]
        text = _bar(shares, look, _ORIGIN_BAR).append(" ")
    named = (Text(f"{printable(tier)} {tokens:,}", _color(tier)) for tier, tokens in tiers)
    return text.append_text(Text(" ").join(named))


def _table(title: str, *heads: str, numbers: bool = False) -> Table:
    table = Table(box=None, show_header=True, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(Text(title, "bold"), no_wrap=True)
    for head in heads:
        table.add_column(head, no_wrap=True, justify="right" if numbers else "left")
    return table


def _bar(parts: Iterable[tuple[float, str, bool]], look: Terminal, length: int = 0) -> Text:
    """Parts of (share, tier, faint); what holds anything at all has a character."""
    full, faint, free = (_PLAIN_FULL, _PLAIN_FAINT, _PLAIN_FREE) if look.plain else (_FULL, _FAINT, _FREE)
    length = length or look.bar
    bar, left = Text(), length
    for share, tier, is_faint in parts:
        cells = min(left, max(round(share * length), 1 if share > 0 else 0))
        bar.append((faint if is_faint else full) * cells, _color(tier))
        left -= cells
    return bar.append(free * left, "bright_black")


def _spark(values: Sequence[float], look: Terminal) -> Text:
    sparks, most = _PLAIN_SPARKS if look.plain else _SPARKS, max(values, default=0.0)
    steps = [0 if most <= 0 else math.ceil(value / most * (len(sparks) - 1)) for value in values]
    return Text("".join(sparks[step] for step in steps).rjust(look.spark), "green")


def printable(text: object) -> str:
    """A text of the server's without characters that a terminal obeys."""
    return "".join(character if character.isprintable() else "?" for character in str(text))


def _color(tier: str) -> str:
    return _COLORS.get(tier, "green")


def _kind(kind: str) -> str:
    return _KINDS.get(kind, printable(kind))


def _count(number: float | None) -> str:
    return _NONE if number is None else f"{int(number):,}"


def _last(values: Sequence[float]) -> float:
    return values[-1] if values else 0.0


def _percent(share: float | None) -> str:
    return _NONE if share is None else f"{100 * share:.1f} %"


def _time(seconds: float) -> str:
    return format_seconds(seconds) if seconds < 60 else _span(seconds)


def _span(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
