"""``stowage chat MODEL``: a conversation, whose earlier turns are reused rather than computed again."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from stowage.cli.options import GRAPHS, LOG, MEMORY, SAMPLING, Adapter, ChatTemplate, Json, Model, with_settings
from stowage.cli.output import completion_json, note, print_json
from stowage.cli.run import opened, stream_answer
from stowage.config.settings import Settings

if TYPE_CHECKING:
    from stowage.engine.engine import Engine
    from stowage.engine.sampling import SamplingParams

Messages = list[dict[str, str]]


@with_settings(*SAMPLING, *MEMORY, *GRAPHS, *LOG)
def chat(
    model: Model,
    *,
    settings: Settings,
    system: Annotated[str, typer.Option("--system", metavar="TEXT", help="What the model is told first.")] = "",
    chat_template: ChatTemplate = None,
    adapter: Adapter = "",
    json: Json = False,
) -> None:
    """Talk with a model that has a chat template. /reset forgets the conversation, /quit or Ctrl-D ends it."""
    from stowage.engine.sampling import SamplingParams

    params = SamplingParams(**settings.sampling())
    with opened(model, settings, adapter, chat_template) as engine:
        if sys.stdin.isatty():
            note("Write a message. /reset forgets the conversation, /quit ends it.")
        _converse(engine, params, _beginning(system), json=json)


def _beginning(system: str) -> Messages:
    return [{"role": "system", "content": system}] if system else []


def _converse(engine: "Engine", params: "SamplingParams", beginning: Messages, *, json: bool) -> None:
    messages = list(beginning)
    for line in _lines():
        if line == "/quit":
            return
        if line == "/reset":
            messages = list(beginning)
            continue
        messages.append({"role": "user", "content": line})
        messages.append({"role": "assistant", "content": _answer(engine, messages, params, json=json)})


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
