"""Streams that take nothing: a full disk is told of, a log on one costs nothing, closed ones are left alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import SOURCE, OwnProcess

WORDS = ("run", "--raw", "-p", "hello", "-n", "4", "--device-memory", "0")


def shell(line: str, home: Path, *arguments: object, **environment: str) -> "subprocess.CompletedProcess[str]":
    """``line`` is a shell's, in which ``"$@"`` is the command."""
    return subprocess.run(
        ["sh", "-c", line, "sh", sys.executable, "-m", "stowage", *map(str, arguments)],
        env={"PYTHONPATH": str(SOURCE), "HOME": str(home), "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has a file that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [("config", "show"), ("--version",)])
def test_a_full_disk_is_told(arguments: tuple[str, ...], unbuffered: str, tmp_path: Path) -> None:
    done = shell('exec "$@" >/dev/full', tmp_path, *arguments, PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 2
    assert done.stderr == "stowage: stdout takes no more: No space left on device. Write the output somewhere else.\n"


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has a file that is always full")
def test_notes_that_a_full_disk_does_not_take_are_lost(
    tiny_llama: Path, tmp_path: Path, call_process: OwnProcess
) -> None:
    done = shell('exec "$@" 2>/dev/full', tmp_path, WORDS[0], tiny_llama, *WORDS[1:])
    assert done.returncode == 0
    assert done.stdout == call_process(WORDS[0], tiny_llama, *WORDS[1:]).stdout


def test_a_pipe_that_nobody_reads_ends_in_silence(tmp_path: Path) -> None:
    done = shell('"$@" | true', tmp_path, "config", "show")
    assert done.stderr == ""


@pytest.mark.slow
def test_closed_streams_get_nothing_and_no_file_gets_their_numbers(tiny_llama: Path, tmp_path: Path) -> None:
    disk = f"{tmp_path / 'cache'}:64MiB"
    done = shell('exec "$@" <&- >&-', tmp_path, WORDS[0], tiny_llama, *WORDS[1:], "--disk", disk)
    assert done.returncode == 0, done.stderr
    assert "prompt tokens" in done.stderr
    look = "import os; print([os.path.realpath(f'/proc/self/fd/{n}') for n in range(3)])"
    program = f"from stowage.cli import _replace_closed_streams as replace; replace(); {look}"
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- 2>&-', "sh", sys.executable, "-c", program],
        env={"PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout.count("/dev/null") == 2


@pytest.mark.parametrize(("encoding", "expected"), [("latin-1", b"\\u2603 caf\xe9"), ("ascii", b"\\u2603 caf\\xe9")])
def test_an_answer_in_characters_that_stdout_lacks(encoding: str, expected: bytes) -> None:
    """As in a locale that is not UTF-8: it ended in a traceback."""
    program = (
        "from stowage import cli; from stowage.cli.output import print_text; cli.main = lambda: print_text({!r}); "
    )
    done = subprocess.run(
        [sys.executable, "-c", program.format("\u2603 caf\xe9") + "cli.run_and_exit()"],
        env={"PYTHONPATH": str(SOURCE), "PYTHONIOENCODING": encoding},
        capture_output=True,
        check=True,
    )
    assert done.stdout == expected
