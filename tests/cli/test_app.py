"""What holds for every command: help answers at once, and errors are one paragraph."""

import errno
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

import stowage.cli
from stowage import __version__
from tests.cli.conftest import SOURCE, OwnProcess, Stowage

COMMANDS = [
    "run",
    "chat",
    "serve",
    "top",
    "verify",
    "stats",
    "scrub",
    "doctor",
    "pack",
    "plan",
    "probe",
    "simulate",
    "tiny",
    "config",
    "key",
]
LONG = "x" * 300
HEAVY = {"torch", "transformers", "tokenizers", "numpy", "safetensors", "blake3", "huggingface_hub"}


def test_help_names_every_command(call: Stowage) -> None:
    result = call("--help")
    assert result.exit_code == 0
    listed = [line.split()[0] for line in result.stdout.partition("Commands:")[2].splitlines() if line.strip()]
    assert sorted(listed) == sorted(COMMANDS)


@pytest.mark.parametrize("command", [*COMMANDS, "config show"])
def test_every_command_has_help(call: Stowage, command: str) -> None:
    result = call(*command.split(), "--help")
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage:")


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["config", "show"], ["doctor"], ["--version"]])
def test_light_commands_load_nothing_heavy(arguments: list[str]) -> None:
    program = (
        f"import sys; sys.argv = ['stowage', *{arguments}]\nfrom stowage.cli import main\n"
        "try:\n    main()\nexcept SystemExit: pass\nprint('MODULES', *{m.partition('.')[0] for m in sys.modules})"
    )
    environment = {"PYTHONPATH": str(SOURCE), "HOME": "/tmp"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert not set(done.stdout.partition("MODULES")[2].split()) & HEAVY


def test_version(call: Stowage) -> None:
    assert call("--version").stdout == f"stowage {__version__}\n"


@pytest.mark.parametrize("arguments", [["sail"], ["run"], ["run", "m", "--hots", "1GiB"], ["stats"], ["tiny", "llama"]])
def test_wrong_use_is_status_2(call: Stowage, arguments: list[str]) -> None:
    assert call(*arguments).exit_code == 2


def test_an_error_is_one_paragraph_without_a_traceback(call_process: OwnProcess) -> None:
    done = call_process("config", "show", "--host-memory", "lots")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("stowage: --host-memory cannot be used. The size 'lots' is not understood.")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("flags", "environment"), [(["--debug"], {}), ([], {"STOWAGE_DEBUG": "1"})])
def test_debug_shows_the_traceback(call_process: OwnProcess, flags: list[str], environment: dict[str, str]) -> None:
    done = call_process("config", "show", "--host-memory", "lots", *flags, **environment)
    assert done.returncode != 0
    assert "Traceback" in done.stderr and "ConfigError" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [("stats", LONG), ("scrub", LONG), ("doctor", "--disk", f"{LONG}:1GiB"), ("plan", f"./{LONG}")],
    ids=lambda arguments: arguments[0],
)
def test_a_name_that_no_file_system_takes(arguments: tuple[str, ...], call: Stowage) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert result.stderr.endswith("no file system takes names of this length. Give a shorter one.\n")


def test_an_interrupt_while_commands_are_imported_is_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "stowage.cli.app", Interrupted("stowage.cli.app"))
    with pytest.raises(SystemExit) as ended:
        stowage.cli.main()
    assert ended.value.code == 130


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            PermissionError(errno.EACCES, "Permission denied", "/m/config.json"),
            "/m/config.json: Permission denied. Give",
        ),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), "The current directory does not exist any more"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "x" * 300), "Give a shorter one"),
        (RuntimeError("can't start new thread"), "The system starts no more threads"),
    ],
)
def test_what_the_system_refuses_is_told(
    error: Exception, told: str, call: Stowage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_given: object) -> None:
        raise error

    monkeypatch.setattr("stowage.cli.stats.quota", refused)
    result = call("stats", tmp_path)
    assert result.exit_code == 2 and told in result.stderr and "Traceback" not in result.stderr, result.stderr
    assert call("stats", tmp_path, "--debug").exception is error


def test_a_disk_tier_that_gets_no_threads_is_told(
    call: Stowage, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under `ulimit -u`, which root is not held to."""
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("stowage-disk"):
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    where = ("--host-memory", "16MiB", "--disk", f"{tmp_path / 'kv'}:64MiB")
    result = call("run", tiny_llama, "--raw", "--prompt", "x", *where)
    assert result.exit_code == 2 and "raise the limit: ulimit -u" in result.stderr, result.output


def test_a_current_directory_that_is_gone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for command in (("config", "show"), ("stats", "kv")):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "stowage", *command],
            env={"PYTHONPATH": str(SOURCE), "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        assert "The current directory does not exist any more: change to another one." in done.stderr
