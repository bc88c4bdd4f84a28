"""How results look: JSON for machines on stdout, text for people on stdout, everything else on stderr."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stowage.engine.request import Completion

WIDTH_PIPED = 160
_KEPT_CONTROLS = {"\n", "\t"}


def print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    """One JSON document on one line, ASCII only, so that it survives any terminal and locale."""
    print(json.dumps(value), flush=True)


def print_text(text: str) -> None:
    """Part of an answer. On a terminal, control characters are left out: a model must not drive the terminal."""
    if sys.stdout.isatty():
        text = "".join(c for c in text if c in _KEPT_CONTROLS or c.isprintable())
    print(text, end="", flush=True)


def stdout_refuses() -> bool:
    """Whether stdout takes nothing, after an error that may be its own. If so nothing is written there any more."""
    try:
        print(flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # until the process ends
        return True
    return False


def note(text: str) -> None:
    """One line about what happened, for people, on stderr. What stderr does not take, on a full disk, is lost."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def complain(text: str) -> None:
    """An error's paragraph, on stderr."""
    note(f"stowage: {text}")


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table for people on stdout."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(*columns, title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*map(escape, row))
    Console(width=None if sys.stdout.isatty() else WIDTH_PIPED).print(table)


@contextmanager
def progress_bars(wanted: bool = True) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr for each thing that is told (what, how much is done, of how much), for people who watch."""
    if not (wanted and sys.stderr.isatty()):
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def told(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=None)
            bars.update(tasks[what], completed=done, total=total)

        yield told


def summary_line(completion: "Completion") -> str:
    """What one completion cost, on one line."""
    reused = by_tier(completion.reused_tokens)
    tiers = ", ".join(f"{name} {count}" for name, count in reused.items())
    return (
        f"[{completion.prompt_tokens} prompt tokens; reused {sum(reused.values())} ({tiers}); "
        f"first token after {format_seconds(completion.ttft_s)}; {len(completion.token_ids)} tokens at "
        f"{completion.decode_tokens_per_s:.1f}/s; {completion.finish_reason}]"
    )


def by_tier(reused_tokens: Mapping[str, int]) -> dict[str, int]:
    """Reused tokens of every tier, zero for one that is off."""
    return {"device": 0, "host": 0, "disk": 0} | {name: int(count) for name, count in reused_tokens.items()}


def quiet_libraries() -> None:
    """Keep Transformers' progress bars for people who watch, and its remarks for those who debug."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()


def format_seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def completion_json(completion: "Completion") -> dict[str, Any]:
    """A completion as ``stowage run --json`` prints it. docs/reference/cli.md lists the keys."""
    value: dict[str, Any] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "reused_tokens": by_tier(completion.reused_tokens),
        "ttft_s": completion.ttft_s,
        "decode_tokens_per_s": completion.decode_tokens_per_s,
    }
    if completion.logprobs is not None:
        value["logprobs"] = [
            {"token_id": item.token_id, "logprob": item.logprob, "top": [list(pair) for pair in item.top]}
            for item in completion.logprobs
        ]
    return value
