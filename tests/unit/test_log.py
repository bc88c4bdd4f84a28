"""Lines of the log: one per kind and second, readable by machines, and nothing is configured unless asked for."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import stowage
from stowage.errors import ConfigError
from stowage.log import JsonFormatter, TextFormatter, Trouble, configure
from tests.threads import together


class Lines(logging.Handler):
    """Keeps what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def json(self) -> list[dict[str, object]]:
        return [json.loads(JsonFormatter().format(record)) for record in self.records]


@pytest.fixture
def lines() -> Iterator[Lines]:
    logger = logging.getLogger("stowage.test")
    handler = Lines()
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def test_one_line_per_kind_and_second_and_the_next_tells_how_many_were_left_out(lines: Lines) -> None:
    now = [100.0]
    trouble = Trouble("stowage.test", clock=lambda: now[0])
    for _ in range(1000):
        trouble.report(logging.WARNING, "corrupt", "a chunk did not verify", count=1)
        trouble.report(logging.WARNING, "enospc", "the disk is full")
        now[0] += 0.01
    told = lines.json()
    assert [line["event"] for line in told].count("corrupt") == 10
    assert [line["event"] for line in told].count("enospc") == 10
    assert sum(1 + int(str(line.get("suppressed", 0))) for line in told if line["event"] == "corrupt") == 901
    assert "suppressed" not in told[0]


def test_tiers_do_not_silence_one_another(lines: Lines) -> None:
    trouble = Trouble("stowage.test", clock=lambda: 0.0)
    for name in ("disk", "dict", "disk"):
        trouble.report(logging.WARNING, "breaker_opened", "left alone", tier=name)
    assert [line["tier"] for line in lines.json()] == ["disk", "dict"]


def test_no_event_is_lost_between_threads(lines: Lines) -> None:
    now = [0.0]
    trouble = Trouble("stowage.test", clock=lambda: now[0])

    def report() -> None:
        for _ in range(500):
            trouble.report(logging.WARNING, "corrupt", "x")

    together([report] * 8)
    now[0] = 5.0
    trouble.report(logging.WARNING, "corrupt", "x")
    assert sum(1 + int(str(line.get("suppressed", 0))) for line in lines.json()) == 4001


def test_json_has_one_object_per_line_with_the_fields_of_the_event(lines: Lines) -> None:
    Trouble("stowage.test").report(logging.WARNING, "enospc", "the disk is full", error='No "space"\nleft', count=3)
    text = JsonFormatter().format(lines.records[0])
    assert "\n" not in text
    line = json.loads(text)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning",
        "logger": "stowage.test",
        "event": "enospc",
        "message": "the disk is full",
        "error": 'No "space"\nleft',
        "count": 3,
    }


def test_a_fault_brings_its_traceback(lines: Lines) -> None:
    try:
        raise RuntimeError("a bug")
    except RuntimeError:
        Trouble("stowage.test").fault("a reader failed")
    (line,) = lines.json()
    assert line["level"] == "error" and line["event"] == "fault"
    assert "RuntimeError: a bug" in str(line["exception"])
    assert "RuntimeError: a bug" in TextFormatter().format(lines.records[0])


def test_a_line_names_the_place_that_reported_it(lines: Lines) -> None:
    Trouble("stowage.test").report(logging.WARNING, "x", "y")
    try:
        raise RuntimeError
    except RuntimeError:
        Trouble("stowage.test").fault("z")
    assert {record.filename for record in lines.records} == {Path(__file__).name}


def test_a_name_cannot_forge_a_line(lines: Lines) -> None:
    Trouble("stowage.test").report(logging.WARNING, "x", "y", path="a\n2026-01-01 error stowage: forged \x1b[2J")
    text = TextFormatter().format(lines.records[0])
    assert "\n" not in text and "\x1b" not in text and "path=a?2026-01-01" in text


def test_a_message_of_another_kind_is_formatted_too(lines: Lines) -> None:
    logging.getLogger("stowage.test").warning("a step outlasted %d s", 3)
    (line,) = lines.json()
    assert (line["event"], line["message"]) == ("message", "a step outlasted 3 s")


def test_what_nobody_listens_to_costs_nothing() -> None:
    logging.getLogger("stowage.test").setLevel(logging.ERROR)
    asked = []
    trouble = Trouble("stowage.test", clock=lambda: asked.append(1) or 0.0)  # type: ignore[func-returns-value]
    trouble.report(logging.WARNING, "x", "y")
    logging.getLogger("stowage.test").setLevel(logging.NOTSET)
    assert not asked


@pytest.mark.parametrize(
    "module", ["stowage", "stowage.log", "stowage.storage.disk", "stowage.cache.store", "stowage.metrics"]
)
def test_importing_configures_nothing(module: str) -> None:
    program = (
        f"import logging, {module}\n"
        "names = [name for name in logging.Logger.manager.loggerDict if name.startswith('stowage')]\n"
        "assert not any(logger.handlers or logger.level for logger in map(logging.getLogger, names))\n"
        "assert not logging.getLogger().handlers"
    )
    source = str(Path(stowage.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": source}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def restored() -> Iterator[None]:
    logger = logging.getLogger("stowage")
    before = list(logger.handlers), logger.level
    yield
    logger.handlers[:], logger.level = before[0], before[1]
    logger.setLevel(before[1])


@pytest.mark.usefixtures("restored")
def test_configure_sends_lines_to_stderr_once(capsys: pytest.CaptureFixture[str]) -> None:
    configure("text", "debug")
    configure("json", "info")
    trouble = Trouble("stowage.test")
    trouble.report(logging.INFO, "repaired_segments", "finished")
    trouble.report(logging.DEBUG, "vanished", "gone")
    out, err = capsys.readouterr()
    assert out == "" and [json.loads(line)["event"] for line in err.splitlines()] == ["repaired_segments"]


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize(("style", "level", "words"), [("xml", "info", "log_format"), ("json", "loud", "log_level")])
def test_configure_refuses(style: str, level: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        configure(style, level)
