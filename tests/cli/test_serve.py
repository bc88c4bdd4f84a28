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
    ("listen", "words"),
    [
        ("8000", "127.0.0.1:8000"),
        (":8000", "0.0.0.0:8000"),
        ("localhost", "127.0.0.1:8000"),
        ("localhost:", "127.0.0.1:8000"),
        ("localhost:port", "127.0.0.1:8000"),
        ("localhost:70000", "127.0.0.1:8000"),
        ("localhost:-1", "127.0.0.1:8000"),
        ("::1:8000", "[::1]:8000"),
        ("no such host.invalid:8000", "is not known"),
        ("192.0.2.1:8000", "no such address"),
    ],
)
def test_an_address_that_cannot_be_had(call: Stowage, listen: str, words: str) -> None:
    assert words in refused(call, "--listen", listen)


@pytest.mark.parametrize(
    "flags",
    [
        ("--port", "8000"),
        ("--host", "0.0.0.0", "--port", "8000"),
        ("--host", "0.0.0.0"),
        ("--host", "localhost"),
        ("--host", "::"),
    ],
)
def test_the_flags_of_other_servers_lead_to_the_right_one(call: Stowage, flags: tuple[str, ...]) -> None:
    told = refused(call, *flags)
    assert "--listen 127.0.0.1:8000" in told and "--host 2GiB" in told


def test_a_size_of_host_memory_is_no_address(call: Stowage) -> None:
    for size in ("2GiB", "1073741824", "10%"):
        assert "nowhere does not exist" in refused(call, "--host", size)
    assert "The size 'much' is not understood" in refused(call, "--host", "much")


@pytest.mark.parametrize("listen", ["0.0.0.0:0", pytest.param("[::]:0", marks=IPV6)])
def test_other_machines_need_a_key(call: Stowage, listen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "there is no API key" in refused(call, "--listen", listen)
    assert "nowhere does not exist" in refused(call, "--listen", listen, "--insecure")
    monkeypatch.setenv("STOWAGE_API_KEYS", KEY)
    assert "nowhere does not exist" in refused(call, "--listen", listen)


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.0.0.9:0", pytest.param("[::1]:0", marks=IPV6), "localhost:0"])
def test_this_machine_needs_none(call: Stowage, listen: str) -> None:
    assert "nowhere does not exist" in refused(call, "--listen", listen)


def test_a_bad_key_file(call: Stowage, tmp_path: Path) -> None:
    assert "does not exist" in refused(call, "--api-key-file", str(tmp_path / "none"))
    (tmp_path / "keys").write_text(KEY)
    (tmp_path / "keys").chmod(0o644)
    words = refused(call, "--api-key-file", str(tmp_path / "keys"))
    assert "chmod 600" in words and KEY not in words


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--body-max", "10", "at least 1024"),
        ("--body-max", "much", "body_max"),
        ("--header-max", "0", "at least 1024"),
        ("--queue-max", "-1", "0 or more"),
        ("--choices-max", "0", "1 or more"),
        ("--prompt-tokens-max", "-5", "0 or more"),
        ("--connections-max", "0", "1 or more"),
        ("--request-timeout-s", "0", "0.001 or more"),
        ("--grace-s", "inf", "finite"),
        ("--stall-timeout-s", "nan", "finite"),
        ("--keep-alive-s", "soon", "not a number"),
        ("--device-kv", "0", "device_kv"),
    ],
)
def test_limits_that_cannot_be_kept(call: Stowage, flag: str, value: str, words: str) -> None:
    assert words in refused(call, flag, value)


def test_every_limit_is_a_setting_with_the_same_default() -> None:
    assert {name: SETTINGS[name].default for name in Limits.__dataclass_fields__} == {
        name: getattr(Limits(), name) for name in Limits.__dataclass_fields__
    }


def test_settings_of_the_environment(call: Stowage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOWAGE_LISTEN", "nonsense")
    assert "nonsense" in refused(call)
    assert "nowhere does not exist" in refused(call, "--listen", "127.0.0.1:0")


def test_without_the_extra_it_says_how_to_get_it(call: Stowage, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr("stowage.cli.serve.find_spec", lambda name: None if name == "uvicorn" else real(name))
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
