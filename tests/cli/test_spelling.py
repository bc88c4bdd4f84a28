"""What a message calls a value: the flag, the variable, or the file's key that it came from, for every command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from stowage.cli.app import app
from stowage.config.settings import SETTINGS, load_settings
from tests.cli.conftest import Stowage

BAD = "5furlongs"
ARGUMENTS = {
    "run": ("DIR", "-p", "x"),
    "chat": ("DIR",),
    "serve": ("DIR", "--port", "0"),
    "verify": ("DIR",),
    "plan": ("DIR",),
    "pack": ("DIR", "NEW"),
    "simulate": ("DIR/config.json",),
    "scrub": ("DIR",),
    "doctor": (),
    "config show": (),
}


def options(kinds: tuple[str, ...]) -> list[tuple[str, str]]:
    """Every command with each of its flags that take one of these kinds of values."""
    found = []

    def visit(path: str, command: Any) -> None:
        for name, below in getattr(command, "commands", {}).items():
            visit(f"{path} {name}".strip(), below)
        for param in command.params:
            if param.param_type_name == "option" and param.metavar in kinds:
                found.append((path, param.opts[-1]))

    visit("", typer.main.get_command(app))
    return found


SIZES = options(("SIZE", "DIR:SIZE", "TOKENS"))


def arguments(command: str, model: Path, tmp_path: Path) -> list[str]:
    given = [*command.split(), *ARGUMENTS[command]]
    return [text.replace("DIR", str(model)).replace("NEW", str(tmp_path / "new")) for text in given]


def test_all_commands_with_sizes_are_tried() -> None:
    assert {command for command, _ in SIZES} == ARGUMENTS.keys() and len(SIZES) > 30


@pytest.mark.parametrize(("command", "flag"), SIZES)
def test_a_flag_is_named_as_a_flag(command: str, flag: str, call: Stowage, tiny_llama: Path, tmp_path: Path) -> None:
    result = call(*arguments(command, tiny_llama, tmp_path), flag, BAD)
    said = result.stdout if command == "doctor" else result.stderr
    assert result.exit_code == (1 if command == "doctor" else 2), result.output
    name = flag.lstrip("-").replace("-", "_")
    assert f"{flag} " in said and BAD in said and ("_" not in name or name not in said), said


@pytest.mark.parametrize("command", ["run", "chat", "serve", "verify", "pack", "config show"])
@pytest.mark.parametrize("flag", ["--host-memory", "--kv-cache-memory", "--disk"])
def test_a_variable_and_a_key_are_named_as_such(
    command: str, flag: str, call: Stowage, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = flag.lstrip("-").replace("-", "_")
    given = arguments(command, tiny_llama, tmp_path)
    with monkeypatch.context() as environment:
        environment.setenv(variable := f"STOWAGE_{name.upper()}", BAD)
        assert f"stowage: {variable} " in (said := call(*given).stderr) and flag not in said, said
    file = tmp_path / "budgets.toml"
    file.write_text(f"{name} = {BAD!r}\n")
    said = call(*given, "--config", file).stderr
    assert f"stowage: {name} in {file} " in said and flag not in said, said


def test_each_setting_of_a_message_is_named_as_it_was_given(
    call: Stowage, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOWAGE_HOST_MEMORY", "0")
    result = call("run", tiny_llama, "-p", "x", "--disk", f"{tmp_path}/kv:1GiB")
    assert "--disk is set but STOWAGE_HOST_MEMORY is 0." in result.stderr
    result = call("run", tiny_llama, "-p", "x", "--host-memory", "8MiB", "--device-memory", "1MiB")
    for flag in ("Of --device-memory", "less to --kv-cache-memory or --max-num-batched-tokens"):
        assert flag in result.stderr, result.stderr
    assert load_settings({"disk": None}, {}).spelled("is full: give disk a larger size") == (
        "is full: give --disk a larger size"
    )
    monkeypatch.setenv("STOWAGE_WEIGHTS", "*=resident")
    result = call("pack", tiny_llama, tmp_path / "new", "--weights", "int3", "--host-memory", "8MiB")
    assert "--weights int3 is unknown" in result.stderr, "pack has a flag of its own that is called so"


@pytest.mark.parametrize(
    "text",
    [
        "The prompt file /data/host_memory/x cannot be read: No such file. Set it with `stowage key new --disk`.",
        "Engine(host_memory=0) takes kv_cache_memory_bytes; the disk is full, and the object is gone.",
        "'host_memory' and host_memory.txt stay; the seed of this model is none of ours",
    ],
)
def test_what_only_looks_like_a_setting_stays(text: str) -> None:
    assert load_settings(dict.fromkeys(SETTINGS), {}).spelled(text) == text
