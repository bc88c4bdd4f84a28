"""Flags that several commands share. They are made from the table in ``config.settings``,
so that a flag, its variable and its key in ``stowage.toml`` cannot drift apart."""

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from stowage.config.settings import (
    MEMORY_SETTINGS,
    SAMPLING_SETTINGS,
    SERVER_SETTINGS,
    SETTINGS,
    Setting,
    find_config,
    load_settings,
)
from stowage.config.spelling import flag_of
from stowage.errors import ConfigError, StowageError
from stowage.log import configure

COMPUTE = ("device", "dtype", "deterministic", "batch_dependent", "int8_activations")
MEMORY = (*(setting.name for setting in MEMORY_SETTINGS), *COMPUTE)
GRAPHS = ("cuda_graphs",)
SAMPLING = tuple(setting.name for setting in SAMPLING_SETTINGS)
SERVER = tuple(setting.name for setting in SERVER_SETTINGS)
LOG = ("log_format", "log_level")
Value = TypeVar("Value")
_DEBUG_KEY = "stowage.debug"


def wants_traceback(ctx: Any) -> bool:
    """Whether ``--debug`` was given, or STOWAGE_DEBUG is set."""
    return bool(ctx.meta.get(_DEBUG_KEY)) or os.environ.get("STOWAGE_DEBUG", "") not in ("", "0")


def _note_debug(ctx: typer.Context, wanted: bool) -> bool:
    ctx.meta[_DEBUG_KEY] = wanted
    return wanted


Debug = Annotated[
    bool, typer.Option("--debug", callback=_note_debug, is_eager=True, help="Show the traceback of an error.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Adapter = Annotated[
    str, typer.Option("--adapter", metavar="DIR", help="A LoRA adapter, as PEFT saves it, for all answers.")
]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="A directory, or a Hugging Face id (or -m MODEL).")]
CHAT_GROUP = "Chat templates"
ChatTemplate = Annotated[
    Path | None,
    typer.Option(
        "--chat-template",
        metavar="FILE",
        help="A Jinja template to use instead of the model's own.",
        rich_help_panel=CHAT_GROUP,
    ),
]


def read_as(flag: str, read: Callable[..., Value], *given: Any) -> Value:
    """``read(*given)``, whose refusal names ``flag``: for flags that are no settings. Raises ConfigError."""
    try:
        return read(*given)
    except ConfigError as error:
        raise ConfigError(f"{flag} cannot be used. {error}") from error


def with_settings(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of the settings ``names``, ``--config`` and ``--debug``.

    The command is called with ``settings``, merged from flags, environment, file and defaults, in their place. With the
    settings of ``LOG`` among them, the log is configured first. An error of the command names settings as they were
    given.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters

        @functools.wraps(command)
        def wrapper(**given: Any) -> None:
            flags = {name: _once(given.pop(name)) for name in names}
            path = given.pop("config")
            del given["debug"]
            settings = load_settings(flags, os.environ, path or find_config(os.environ))
            if "log_level" in names:
                configure(settings["log_format"], settings["log_level"])
            try:
                command(settings=settings, **given)
            except StowageError as error:
                error.args = (settings.spelled(str(error), besides=own),)
                raise

        added = [_flag(SETTINGS[name]) for name in names] + [_CONFIG, _DEBUG]
        parameters = [p for name, p in own.items() if name != "settings"] + added
        signature = inspect.Signature(parameters, return_annotation=None)
        wrapper.__signature__ = signature  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


def _once(given: Any) -> Any:
    """What a flag was given, for all that may be repeated a list: what came once is read as from the environment."""
    if not isinstance(given, list):
        return given
    return None if not given else given[0] if len(given) == 1 else given


def _flag(setting: Setting) -> inspect.Parameter:
    kind: Any = list[str] | None if setting.default == () else str | None
    default = "" if setting.default in (None, "", (), {}, False, 0) else f" [default: {setting.default}]"
    name = flag_of(setting.name)
    if isinstance(setting.default, bool):
        kind, name = bool | None, f"{name}/--no-{name[2:]}"
    option = typer.Option(
        *([f"-{setting.letter}"] if setting.letter else []),
        name,
        metavar=setting.metavar or None,
        help=setting.about[0].upper() + setting.about[1:] + "." + default,
        rich_help_panel=setting.group or None,
        show_default=False,
    )
    return _keyword(setting.name, Annotated[kind, option], None)


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


_CONFIG = _keyword(
    "config",
    Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Settings, instead of ./stowage.toml.")],
    None,
)
_DEBUG = _keyword("debug", Debug, False)
