"""Log lines for what goes wrong, through the standard `logging` module under the loggers `stowage.*`.

Nothing is configured on import. `configure` is for the command line; a program of your own adds handlers as it likes,
and may use `JsonFormatter`. The loggers: `stowage.engine`, `stowage.cache.store`, `stowage.disk`.

A line says what happened (`event`), where, and how often. It never holds a prompt, a token, a chunk's key, a salt or a
secret: whoever reports an event passes numbers, names of tiers and segments, and texts of the operating system.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TextIO

from stowage.errors import ConfigError

FORMATS: Final = ("text", "json")
LEVELS: Final = ("debug", "info", "warning", "error")
LINES_PER_S: Final = 1.0
"""Of each kind of event: a broken disk must not fill another one with its log."""
RESERVED: Final = frozenset({"time", "level", "logger", "event", "message", "exception"})
_MARK: Final = "stowage-log"


class Trouble:
    """Reports what goes wrong in one part. Any thread. At most one line per kind of event (and tier) and second.

    What is left out is counted in the next line of that kind, as `suppressed`.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logging.getLogger(name)
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: dict[tuple[str, object], tuple[float, int]] = {}
        """When the next line of a kind may come, and how many did not."""

    def report(self, level: int, event: str, text: str, **fields: int | float | str) -> None:
        """One event, described by a fixed text and by numbers and names that change."""
        self._log(level, event, text, fields)

    def fault(self, text: str, **fields: int | float | str) -> None:
        """A bug, with the traceback of the exception that is being handled."""
        self._log(logging.ERROR, "fault", text, fields, with_traceback=True)

    def _log(
        self, level: int, event: str, text: str, fields: dict[str, int | float | str], with_traceback: bool = False
    ) -> None:
        assert not fields.keys() & RESERVED
        if not self._logger.isEnabledFor(level):
            return
        kind = event, fields.get("tier")
        with self._lock:
            now_s = self._clock()
            allowed_s, suppressed = self._kinds.get(kind, (now_s, 0))
            if now_s < allowed_s:
                self._kinds[kind] = allowed_s, suppressed + 1
                return
            self._kinds[kind] = now_s + 1 / LINES_PER_S, 0
        if suppressed:
            fields = fields | {"suppressed": suppressed}
        told = " ".join(f"{name}={value}" for name, value in fields.items())
        extra = {"stowage_event": event, "stowage_text": text, "stowage_fields": fields}
        self._logger.log(
            level, "%s", f"{text} ({told})" if told else text, exc_info=with_traceback, extra=extra, stacklevel=3
        )


class JsonFormatter(logging.Formatter):
    """One JSON object per line: `time` (UTC), `level`, `logger`, `event`, `message`, the event's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        value: dict[str, Any] = {
            "time": _utc(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": getattr(record, "stowage_event", "message"),
            "message": getattr(record, "stowage_text", None) or record.getMessage(),
            **getattr(record, "stowage_fields", {}),
        }
        if record.exc_info:
            value["exception"] = self.formatException(record.exc_info)
        return json.dumps(value)


class TextFormatter(logging.Formatter):
    """One line for people; a traceback follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        text = "".join(c if c.isprintable() else "?" for c in record.getMessage())  # a name must not forge a line
        line = f"{_utc(record)} {record.levelname.lower():<7} {record.name}: {text}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _utc(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is at that moment."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def configure(style: str, level: str) -> None:
    """Sends what `stowage.*` reports from that level up to stderr. Replaces what it did before. Raises ConfigError."""
    for what, value, valid in (("log_format", style, FORMATS), ("log_level", level, LEVELS)):
        if value not in valid:
            raise ConfigError(f"{what} is {value!r}: it must be one of {', '.join(valid)}.")
    handler = _StderrHandler()
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    handler.set_name(_MARK)
    logger = logging.getLogger("stowage")
    for old in [old for old in logger.handlers if old.get_name() == _MARK]:
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(level.upper())
