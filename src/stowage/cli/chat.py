"""``stowage chat MODEL``: a conversation, whose earlier turns are reused rather than computed again."""

from typing import Annotated

import typer

from stowage.cli.options import GRAPHS, LOG, MEMORY, SAMPLING, Adapter, ChatTemplate, Json, Model, with_settings
from stowage.cli.run import opened, sampling_of
from stowage.cli.talk import converse
from stowage.config.settings import Settings


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
    params = sampling_of(settings)
    with opened(model, settings, adapter, chat_template) as engine:
        converse(engine, params, [{"role": "system", "content": system}] if system else [], json=json)
