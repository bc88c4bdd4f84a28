"""Flags under other servers' names, and what ``--help`` shows first."""

import json

import pytest

from tests.cli.conftest import Stowage


def shown(call: Stowage, *flags: str) -> dict[str, object]:
    """Settings that the flags come to."""
    result = call("config", "show", *flags, "--json")
    assert result.exit_code == 0, result.stderr
    return {name: item["value"] for name, item in json.loads(result.stdout).items()}


def test_a_value_that_looks_like_a_flag_is_a_value(call: Stowage) -> None:
    flags = ("--host", "0.0.0.0", "--port", "81", "--host-memory", "1GiB", "-n", "5", "--stop", "--ctx-size")
    found = shown(call, *flags)
    assert (found["host"], found["port"], found["host_memory"]) == ("0.0.0.0", 81, "1GiB")
    assert (found["max_new_tokens"], found["stop"]) == (5, ["--ctx-size"])
    assert call("config", "show", *flags).stderr == ""


def test_an_address_where_nothing_listens(call: Stowage) -> None:
    result = call("run", "./nowhere", "--host", "0.0.0.0", "-p", "x")
    assert result.exit_code == 2 and "stowage serve" in result.stderr and "--host-memory SIZE" in result.stderr


@pytest.mark.parametrize(
    ("flags", "ours"),
    [
        ("--gpu-memory-utilization 0.9", "--device-memory"),
        ("--gpu-memory-utilization=0.9", "--device-memory"),
        ("--ctx-size 4096", "--max-model-len"),
        ("-c 4096", "--max-model-len"),
        ("--context-length 4096", "--max-model-len"),
        ("--context 4096", "--max-model-len"),
        ("-ngl 99", "--weights"),
        ("--n-gpu-layers 99", "--device-memory"),
        ("--tensor-parallel-size 2", "one device"),
        ("-tp 2", "one device"),
        ("--api-key secret", "--api-key-file"),
        ("--swap-space 4", "--host-memory"),
        ("--max-tokens 5", "--max-new-tokens"),
        ("--page-size 16", "--block-size"),
        ("--enable-prefix-caching", "always reused"),
        ("--chunked-prefill-size 512", "--max-num-batched-tokens"),
    ],
)
@pytest.mark.parametrize("command", ["run", "serve"])
def test_flags_of_other_servers_are_answered(call: Stowage, command: str, flags: str, ours: str) -> None:
    result = call(command, "./nowhere", *flags.split())
    assert result.exit_code == 2 and ours in result.stderr and "secret" not in result.stderr
    assert result.stderr.count("\n") == 1 and flags.split("=")[0].split()[0] in result.stderr


@pytest.mark.parametrize("flags", [("-m", "./nowhere"), ("--model", "./nowhere"), ("--model=./nowhere",)])
def test_the_model_as_a_flag(call: Stowage, flags: tuple[str, ...]) -> None:
    for command in (("run", *flags, "a text"), ("run", "-p", "a text", *flags), ("serve", "--port", "0", *flags)):
        result = call(*command)
        assert result.exit_code == 2 and "nowhere does not exist" in result.stderr


def test_unknown_flags_are_still_unknown(call: Stowage) -> None:
    result = call("run", "m", "--hots", "1GiB")
    assert result.exit_code == 2 and "--hots" in result.stderr


@pytest.mark.parametrize("command", ["run", "chat", "serve"])
def test_the_first_screen_shows_what_people_need(call: Stowage, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = call(command, "--help").stdout.splitlines()
    experts = next(number for number, line in enumerate(lines) if line.startswith("Expert settings"))
    first = "\n".join(lines[:24])
    assert experts >= 20 and all(len(line) <= 80 for line in lines)
    for flag in ("--device-memory", "--host-memory", "--disk", "--max-model-len", "--device NAME"):
        assert flag in first
    assert "--chunk-blocks" not in first and "--chunk-blocks" in "\n".join(lines[experts:])
