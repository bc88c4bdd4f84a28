"""``stowage doctor`` and ``config show`` on shared stores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Stowage
from tests.cli.conftest import call as call
from tests.tiers.servers import RedisServer, redis_server


def test_a_store_that_answers(call: Stowage, redis: RedisServer, s3: str) -> None:
    before = redis.client.dbsize()
    result = call("doctor", "--host-memory", "1MiB", "--valkey", redis.url, "--object", s3, "--json")
    found = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert found["valkey"]["level"] == found["object"]["level"] == "ok" and "answers" in found["valkey"]["found"]
    assert redis.client.dbsize() == before


def test_stores_that_do_not(call: Stowage, s3: str) -> None:
    bucket = "s3://no-such-bucket-anywhere"
    result = call(
        "doctor", "--host-memory", "1MiB", "--valkey", "redis://:hush@127.0.0.1:1", "--object", bucket, "--json"
    )
    found = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert found["valkey"]["level"] == found["object"]["level"] == "problem" and found["valkey"]["fix"]
    assert result.exit_code == 1 and "hush" not in result.stdout + result.stderr


def test_a_directory_is_not_made_by_looking(call: Stowage, tmp_path: Path) -> None:
    result = call("doctor", "--host-memory", "1MiB", "--object", f"file://{tmp_path}/objects")
    assert "will be made" in result.stdout and list(tmp_path.iterdir()) == []


def test_the_password_is_taken_from_the_environment(call: Stowage, monkeypatch: pytest.MonkeyPatch) -> None:
    with redis_server("--requirepass", "hush", password="hush") as server:
        assert call("doctor", "--host-memory", "1MiB", "--valkey", server.url).exit_code == 1
        monkeypatch.setenv("STOWAGE_VALKEY_PASSWORD", "hush")
        assert call("doctor", "--host-memory", "1MiB", "--valkey", server.url).exit_code == 0


@pytest.mark.parametrize("style", [[], ["--json"]])
def test_config_show_shows_no_password(style: list[str], call: Stowage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOWAGE_VALKEY", "redis://me:hush@host:6380/1")
    monkeypatch.setenv("STOWAGE_VALKEY_PASSWORD", "hush")
    result = call("config", "show", "--host-memory", "1MiB", *style)
    assert result.exit_code == 0 and "hush" not in result.stdout and "redis://***@host:6380/1" in result.stdout
