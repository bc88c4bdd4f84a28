"""A command that answers other programs' flags, and shows few flags first in its help.

Owns how ``config.names`` is applied to what was typed; the names themselves stand there.
"""

from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand

from stowage.config.names import advice_for
from stowage.errors import ConfigError

_LAST = ("json", "config", "debug", "help")
"""Flags of every command, which stand below its own."""
_MODEL_FLAGS = ("-m", "--model")


class Command(TyperCommand):
    """Refuses other programs' flags with its own; ``-m MODEL`` is the argument MODEL."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _read(args, self.get_params(ctx)))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments, the flags that most people need, then the other groups."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in sorted(self.get_params(ctx), key=lambda param: param.name in _LAST):
            record = param.get_help_record(ctx)
            if record is not None:
                title = (
                    "Arguments"
                    if param.param_type_name == "argument"
                    else getattr(param, "rich_help_panel", None) or "Options"
                )
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _read(args: Sequence[str], params: Sequence[Any]) -> list[str]:
    """``args`` with the model in front. Raises ConfigError for other programs' flags."""
    flags = {text: param for param in params for text in (*param.opts, *param.secondary_opts) if text.startswith("-")}
    takes_model = any(param.param_type_name == "argument" and param.name == "model" for param in params)
    model: list[str] = []
    done: list[str] = []
    at = 0
    while at < len(args) and args[at] != "--":
        flag, equals, value = args[at].partition("=")
        behind = "" if equals else "".join(args[at + 1 : at + 2])
        if not flag.startswith("-") or flag == "-":
            done.append(args[at])
        elif flag in flags:
            takes = not equals and not getattr(flags[flag], "is_flag", False)
            done += args[at : at + 1 + takes]
            at += takes
        elif flag in _MODEL_FLAGS and takes_model and flag not in flags and (value or behind):
            model = [value or behind]
            at += not equals
        else:
            if answer := advice_for(flag.lstrip("-").replace("-", "_")):
                raise ConfigError(f"There is no {flag} here. {answer}.")
            done.append(args[at])
        at += 1
    return [*model, *done, *args[at:]]
