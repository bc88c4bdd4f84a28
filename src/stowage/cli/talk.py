"""An interactive conversation in the terminal: reads lines, and prints answers while they are generated."""

import re
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from stowage.cli.output import completion_json, note, print_json, print_text, summary_line

if TYPE_CHECKING:
    from stowage.engine.engine import Engine, Prompt
    from stowage.engine.sampling_params import SamplingParams

Messages = list[dict[str, str]]
_COMMAND = re.compile(r"/[a-z?]+")
_COMMANDS = "/reset forgets the conversation, /quit or Ctrl-D ends it."
_HELP = ("/help", "/?")


def converse(
    engine: "Engine", params: "SamplingParams", beginning: Iterable[dict[str, str]] = (), *, json: bool
) -> None:
    """Answer lines from stdin until its end. ``beginning``: messages before the first."""
    if sys.stdin.isatty():
        note(f"Write a message. {_COMMANDS}")
    messages = list(beginning)
    for line in _lines():
        if line == "/quit":
            return
        if line == "/reset":
            messages = list(beginning)
            continue
        if _COMMAND.fullmatch(line):
            note(_COMMANDS if line in _HELP else f"{line} is no command, and was not sent. {_COMMANDS}")
            continue
        messages.append({"role": "user", "content": line})
        messages.append({"role": "assistant", "content": _answer(engine, messages, params, json=json)})


def stream_answer(engine: "Engine", prompt: "Prompt", params: "SamplingParams") -> str:
    """Print the answer as it comes, then what it cost. Returns its text."""
    completion = None
    for delta in engine.iterate(prompt, params):
        print_text(delta.text)
        completion = delta.completion or completion
    assert completion is not None, "a stream ends with its completion"
    print_text("\n")
    note(summary_line(completion))
    return completion.text


def _answer(engine: "Engine", messages: Messages, params: "SamplingParams", *, json: bool) -> str:
    if not json:
        return stream_answer(engine, messages, params)
    completion = engine.generate([messages], params)[0]
    print_json(completion_json(completion))
    return completion.text


def _lines() -> Iterator[str]:
    """Messages that the user writes, without empty ones, until the end of input."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if line:
            yield line
