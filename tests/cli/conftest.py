"""Calling the command: inside this process (fast), or in one of its own (exit status, loaded modules)."""

import contextlib
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import stowage
from stowage.cli.app import app
from stowage.testing import tiny_models

SOURCE = Path(stowage.__file__).parents[1]
Stowage = Callable[..., Result]
OwnProcess = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No stowage.toml from wherever the tests are started, and no cache of whoever starts them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@contextlib.contextmanager
def own_log() -> Iterator[None]:
    """Commands configure the log of the whole process."""
    logger = logging.getLogger("stowage")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    with own_log():
        yield


def invoke(*arguments: str | Path, stdin: str = "") -> Result:
    return CliRunner().invoke(app, [str(item) for item in arguments], input=stdin)


@pytest.fixture
def call() -> Stowage:
    return invoke


@pytest.fixture
def call_process(tmp_path: Path) -> OwnProcess:
    def run(*arguments: str | Path, **environment: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "stowage", *map(str, arguments)],
            env={"PYTHONPATH": str(SOURCE), "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", **environment},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )

    return run


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write("llama", tmp_path_factory.mktemp("models") / "llama")
