"""``stowage serve``: what it refuses before it loads anything, and why. tests/server is about what it serves."""

import importlib.util
import socket
from pathlib import Path

import pytest

from stowage.config.settings import SETTINGS
from stowage.server.limits import Limits
from tests.cli.conftest import Stowage

KEY = "k" * 32


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


IPV6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")


def refused(call: Stowage, *arguments: str) -> str:
    """What it says about a model that is not there, if it comes so far."""
    result = call("serve", "./nowhere", *arguments)
    assert result.exit_code == 2 and result.stdout == ""
    return result.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--host", ""), "127.0.0.1"),
        (("--host", "no such host.invalid"), "is not known"),
        (("--host", "much"), "is not known"),
        (("--host", "x" * 300), "is not known"),
        (("--host", "192.0.2.1"), "no such address"),
        (("--port", "70000"), "from 1 to 65535"),
        (("--port", "-1"), "from 1 to 65535"),
        (("--port", "http"), "write a whole number"),
    ],
)
def test_an_address_that_cannot_be_had(call: Stowage, flags: tuple[str, ...], words: str) -> None:
    assert words in refused(call, *flags)


def test_a_port_in_use_is_told_before_the_model_is_loaded(call: Stowage) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        told = refused(call, "--port", str(taken.getsockname()[1]))
    assert "another program listens there" in told


@pytest.mark.parametrize("host", ["0.0.0.0", pytest.param("::", marks=IPV6), pytest.param("[::]", marks=IPV6)])
def test_other_machines_need_a_key(call: Stowage, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where = ("--host", host, "--port", "0")
    assert "there is no API key" in refused(call, *where)
    assert "nowhere does not exist" in refused(call, *where, "--insecure")
    monkeypatch.setenv("STOWAGE_API_KEYS", KEY)
    assert "nowhere does not exist" in refused(call, *where)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", pytest.param("::1", marks=IPV6), "localhost"])
def test_this_machine_needs_none(call: Stowage, host: str) -> None:
    assert "nowhere does not exist" in refused(call, "--host", host, "--port", "0")


def test_a_bad_key_file(call: Stowage, tmp_path: Path) -> None:
    assert "does not exist" in refused(call, "--api-key-file", str(tmp_path / "none"))
    (tmp_path / "keys").write_text(KEY)
    (tmp_path / "keys").chmod(0o644)
    words = refused(call, "--api-key-file", str(tmp_path / "keys"))
    assert "chmod 600" in words and KEY not in words


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--max-body-size", "10", "at least 1024"),
        ("--max-body-size", "much", "--max-body-size"),
        ("--max-header-size", "0", "at least 1024"),
        ("--max-queued-requests", "-1", "0 or more"),
        ("--max-choices", "0", "1 or more"),
        ("--max-prompt-tokens", "-5", "0 or more"),
        ("--max-connections", "0", "1 or more"),
        ("--request-timeout-s", "0", "0.001 or more"),
        ("--shutdown-timeout-s", "inf", "finite"),
        ("--stall-timeout-s", "nan", "finite"),
        ("--keep-alive-s", "soon", "not a number"),
        ("--kv-cache-memory", "0", "--kv-cache-memory is 0"),
    ],
)
def test_limits_that_cannot_be_kept(call: Stowage, flag: str, value: str, words: str) -> None:
    assert words in refused(call, flag, value)


def test_every_limit_is_a_setting_with_the_same_default() -> None:
    assert {name: SETTINGS[name].default for name in Limits.__dataclass_fields__} == {
        name: getattr(Limits(), name) for name in Limits.__dataclass_fields__
    }


def test_settings_of_the_environment(call: Stowage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOWAGE_PORT", "nonsense")
    assert "nonsense" in refused(call)
    monkeypatch.setenv("STOWAGE_PORT", "70000")
    assert "70000" in refused(call)
    assert "nowhere does not exist" in refused(call, "--port", "0")


def test_without_the_extra_it_says_how_to_get_it(call: Stowage, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr("stowage.extras.find_spec", lambda name: None if name == "uvicorn" else real(name))
    words = refused(call)
    assert "needs uvicorn" in words and "pip install 'stowage[server]'" in words


def test_no_other_command_needs_it(call_process, tmp_path: Path) -> None:
    """With Starlette and uvicorn broken, everything else works."""
    for name in ("starlette", "uvicorn"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not for you')")
    source = str(Path(importlib.util.find_spec("stowage").origin).parents[1])  # type: ignore[union-attr, arg-type]
    for arguments in (["--help"], ["serve", "--help"], ["config", "show"]):
        done = call_process(*arguments, PYTHONPATH=f"{tmp_path}:{source}")
        assert done.returncode == 0, done.stderr
