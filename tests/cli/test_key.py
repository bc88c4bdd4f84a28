"""``stowage key``: a key file from the command line, and no secret on any stream."""

import json
import stat
from pathlib import Path

from stowage.storage import key_file
from stowage.storage.format.protection import Method, Protection, SecretKey
from tests.cli.conftest import Stowage
from tests.disk_client import Client
from tests.tier_client import keys_of


def test_the_life_of_a_key_file(call: Stowage, tmp_path: Path) -> None:
    file = tmp_path / "a file"
    shown = []

    def run(*arguments: str | Path) -> str:
        result = call("key", *arguments)
        shown.append(result.stdout + result.stderr)
        assert result.exit_code == 0, result.stderr
        return result.stdout

    made = json.loads(run("new", file, "--json"))
    assert made == {"file": str(file), "key": key_file.read(file)[0].id.hex()}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    rotated = json.loads(run("rotate", file, "--json"))["key"]
    secrets = [key.reveal() for key in key_file.read(file)]
    assert json.loads(run("show", file, "--json"))["keys"] == [rotated, made["key"]]
    assert run("show", file).splitlines() == [f"{rotated}  writes and reads", f"{made['key']}  reads"]
    assert json.loads(run("drop", file, made["key"], "--json"))["dropped"] == made["key"]
    assert json.loads(run("show", file, "--json"))["keys"] == [rotated]
    run("rotate", file)
    run("drop", file, rotated)
    secrets += [key.reveal() for key in key_file.read(file)]
    assert len(set(secrets)) == 3 and not any(secret in text for secret in secrets for text in shown)


def test_a_relative_name_is_taken_from_here(call: Stowage, tmp_path: Path) -> None:
    result = call("key", "new", "mine")
    assert result.exit_code == 0 and "--disk-protection aes-256-gcm" in result.stderr
    assert str(tmp_path / "mine") in result.stderr and (tmp_path / "mine").exists()


def test_what_cannot_be_done_says_the_way_out(call: Stowage, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    for command in (["rotate", file], ["show", file], ["drop", file, "00"]):
        result = call("key", *command)
        assert result.exit_code == 2 and "stowage key new" in result.stderr
    call("key", "new", file)
    assert "key rotate" in call("key", "new", file).stderr
    file.chmod(0o644)
    for command in (["rotate", file], ["show", file], ["drop", file, "00"]):
        result = call("key", *command)
        assert result.exit_code == 2 and f"chmod 600 {file}" in result.stderr and not result.stdout


def test_doctor_looks_at_the_key_file(call: Stowage, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    flags = ("--disk-protection", "blake3", "--disk-key-file", file, "--json")

    def found() -> dict[str, str]:
        checks = json.loads(call("doctor", *flags).stdout)["checks"]
        return next(check for check in checks if check["name"] == "key file")

    assert found()["level"] == "problem" and "stowage key new" in found()["found"]
    call("key", "new", file)
    assert found()["level"] == "ok"
    file.chmod(0o666)
    assert found()["level"] == "problem" and "chmod 600" in found()["found"]


def test_run_refuses_a_key_file_that_others_can_read(call: Stowage, tmp_path: Path, tiny_llama: Path) -> None:
    file = tmp_path / "keys"
    call("key", "new", file)
    file.chmod(0o640)
    memory = ("--host-memory", "8MiB", "--disk", f"{tmp_path / 'cache'}:64MiB")
    protected = ("--disk-protection", "aes-256-gcm", "--disk-key-file", file)
    result = call("run", tiny_llama, "--prompt", "hello", *memory, *protected)
    assert result.exit_code == 2 and "chmod 600" in result.stderr
    assert not (tmp_path / "cache").exists()
    assert "stowage key new" in call("run", tiny_llama, "--prompt", "hello", *memory, *protected[:2]).stderr
    assert "leave --disk-key-file out" in call("run", tiny_llama, "--prompt", "hello", *memory, *protected[2:]).stderr


def test_stats_say_how_segments_are_protected(call: Stowage, tmp_path: Path) -> None:
    keyed = [SecretKey(b"\1" * 32)]
    for protection in (Protection(), Protection(Method.AES_256_GCM, keyed), Protection(Method.AES_256_GCM, keyed)):
        with Client(tmp_path / "c", protection=protection) as client:
            client.store(keys_of(1), [4096])
    assert json.loads(call("stats", tmp_path / "c", "--json").stdout)["protections"] == {
        "checksum": 1,
        "aes-256-gcm": 2,
    }
    assert "1 checksum, 2 aes-256-gcm" in call("stats", tmp_path / "c").stdout
