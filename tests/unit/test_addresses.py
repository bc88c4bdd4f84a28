"""Addresses of shared stores: what is understood, what is refused with which advice, and that no password is shown."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

from stowage.config.addresses import Valkey, parse_object, parse_valkey, read_password, shown
from stowage.config.memory import Memory
from stowage.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://host", Valkey("host")),
        ("redis://host:6380/3", Valkey("host", 6380, 3)),
        ("valkey://host/", Valkey("host")),
        ("rediss://user:p%40ss@[::1]:1", Valkey("::1", 1, 0, "user", "p@ss", True)),
        (
            "valkeys://:s@h?ca_file=/ca&cert_file=c&key_file=k",
            Valkey("h", 6379, 0, "", "s", True, False, "/ca", "c", "k"),
        ),
        ("redis://h?cluster=true&prefix=team-1:kv", Valkey("h", cluster=True, prefix="team-1:kv")),
        ("redis://h?cluster=False", Valkey("h")),
    ],
)
def test_servers_that_are_understood(url: str, address: Valkey) -> None:
    assert parse_valkey(url) == address


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("host:6379", "Write redis://host:6379/0"),
        ("http://host", "Write redis://"),
        ("redis://", "Write redis://"),
        ("redis://host/name", "Write redis://"),
        ("redis://host:99999", "Write redis://"),
        ("redis://[::1", "Write redis://"),
        ("redis://host/0#x", "Write redis://"),
        ("redis://host name", "Write redis://"),
        ("redis://h?cluter=true", "Did you mean 'cluster'"),
        ("redis://h?zzz=1", "Valid: ca_file"),
        ("redis://h?cluster=yes", "must be true or false"),
        ("redis://h/2?cluster=true", "a cluster has only 0"),
        ("redis://h?prefix={one-node}", "no braces"),
        ("redis://h?prefix=", "cannot be used"),
        ("redis://h?ca_file=/ca", "Write rediss://"),
        ("rediss://h?cert_file=c", "together, or neither"),
    ],
)
def test_servers_that_are_not(url: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice.replace("{", r"\{")):
        parse_valkey(url)


@pytest.mark.parametrize(
    "url", ["s3://bucket", "s3://bucket/a/b", "gs://b/p", "az://account/container/p", "file:///srv/kv", "memory:///"]
)
def test_object_stores_that_are_understood(url: str) -> None:
    assert parse_object(url) == url
    assert parse_object("s3://bucket/a/") == "s3://bucket/a"


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("bucket/prefix", "Write s3://"),
        ("s3://", "Write s3://"),
        ("file://relative/path", "Write s3://"),
        ("file:///", "Write s3://"),
        ("s3://id:secret@bucket", "AWS_ACCESS_KEY_ID"),
        ("s3://bucket?region=x", "AWS_REGION"),
        ("s3://bucket/a b", "Write s3://"),
    ],
)
def test_object_stores_that_are_not(url: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice) as caught:
        parse_object(url)
    assert "secret" not in str(caught.value)


SECRETS = [
    "redis://:hush@host/x",
    "redis://user:hush@host:99999",
    "redis://:hu/hush@host",
    "redis://:hu#hush@host",
    "redis://:hu?hush@host",
    "redis://:a@hush@[::1",
    "redis://host?password=hush",
    "http://:hush@host",
    "redis://:hush@host?cluster=maybe",
]


@pytest.mark.parametrize("url", SECRETS)
def test_no_error_shows_a_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Memory(host_memory="1MiB", valkey=url)
    assert "hush" not in "".join(traceback.format_exception_only(caught.value)) and "hush" not in shown(url)


def test_neither_repr_nor_text_shows_a_password() -> None:
    memory = Memory(host_memory="1MiB", valkey="redis://user:hush@host:6380/1?prefix=p")
    address = parse_valkey(memory.valkey)
    assert address.password == "hush"
    assert not any("hush" in text for text in (repr(memory), str(memory), repr(address), str(address)))
    assert str(address) == "redis://host:6380/1" and shown(memory.valkey) == "redis://***@host:6380/1"
    assert str(parse_valkey("rediss://[::1]")) == "rediss://[::1]:6379/0"


def test_a_password_is_the_first_line_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "password"
    for content in (b"hush", b"hush\n", b"hush\r\nmore\n"):
        path.write_bytes(content)
        path.chmod(0o600)
        assert read_password(path) == "hush"
    for content in (b"", b"\n", b"x" * 5000, b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="password file"):
            read_password(path)
    with pytest.raises(ConfigError, match=r"none does not exist\. Make one: \(umask 077; cat > "):
        read_password(tmp_path / "none")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o606, 0o700])
def test_a_password_that_others_may_read_is_refused_as_other_secrets_are(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("hush")
    path.chmod(mode)
    with pytest.raises(ConfigError, match=r"chmod 600 .*password") as caught:
        read_password(path)
    assert "hush" not in str(caught.value)
    path.chmod(0o600)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(ConfigError, match="it is a link"):
        read_password(tmp_path / "link")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"valkey": "redis://h", "host_memory": 0}, "valkey is set but host_memory is 0"),
        ({"object": "s3://b", "host_memory": 0}, "object is set but host_memory is 0"),
        ({"valkey": "redis://:a@h", "valkey_password_file": "f"}, "Keep one"),
        ({"valkey_password_file": "f"}, "no effect"),
        ({"object_limit": 5}, "no effect"),
        ({"object": "s3://b", "object_limit": "30%"}, "nothing here to take it of"),
        ({"valkey": "redis://h", "valkey_ttl_s": -1.0}, "valkey_ttl_s"),
        ({"lookup_timeout_s": float("nan")}, "lookup_timeout_s"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Memory(**({"host_memory": "1MiB"} | settings))  # type: ignore[arg-type]


def test_a_limit_in_bytes() -> None:
    assert Memory(host_memory="1MiB", object="s3://b", object_limit="1GiB").object_limit_bytes == 1 << 30
