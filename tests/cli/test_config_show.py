"""``stowage config show``."""

import json
from pathlib import Path

import pytest

from stowage.config.settings import SETTINGS
from tests.cli.conftest import Stowage


def test_shows_every_setting_with_its_source(call: Stowage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stowage.toml").write_text('kv_cache_memory = "64MiB"\nstop = ["a", "b"]\n')
    monkeypatch.setenv("STOWAGE_HOST_MEMORY", "10%")
    result = call("config", "show", "--chunk-blocks", "8", "--json")
    found = json.loads(result.stdout)
    assert found.keys() == SETTINGS.keys()
    assert found["kv_cache_memory"] == {"value": "64MiB", "source": str(tmp_path / "stowage.toml")}
    assert found["stop"]["value"] == ["a", "b"]
    assert found["host_memory"] == {"value": "10%", "source": "environment"}
    assert found["chunk_blocks"] == {"value": 8, "source": "flag"}
    assert found["top_k"] == {"value": 0, "source": "default"}


def test_text_shows_what_a_percentage_comes_to(call: Stowage) -> None:
    lines = {line.split()[0]: line for line in call("config", "show", "--host-memory", "100%").stdout.splitlines()}
    assert lines.keys() == SETTINGS.keys()
    assert "100% = " in lines["host_memory"] and "iB" in lines["host_memory"] and lines["host_memory"].endswith("flag")


def test_config_flag_names_another_file(call: Stowage, tmp_path: Path) -> None:
    (tmp_path / "stowage.toml").write_text("host_memory = 1\n")
    (tmp_path / "other.toml").write_text("host_memory = 2\n")
    found = json.loads(call("config", "show", "--json", "--config", tmp_path / "other.toml").stdout)
    assert found["host_memory"]["value"] == 2


def test_misspelt_key_stops_and_names_the_nearest(call: Stowage, tmp_path: Path) -> None:
    (tmp_path / "stowage.toml").write_text('kvcache_memory = "64MiB"\n')
    result = call("config", "show")
    assert result.exit_code == 2 and "Did you mean 'kv_cache_memory'?" in result.stderr


def test_budgets_that_run_would_refuse_are_refused_here(call: Stowage) -> None:
    result = call("config", "show", "--disk", "/kv:1GiB", "--host-memory", "0")
    assert result.exit_code == 2 and "give it a size" in result.stderr


@pytest.mark.parametrize("flag", ["--stop", "--allowed-origins"])
def test_a_list_is_given_flag_by_flag_or_in_one(call: Stowage, flag: str) -> None:
    for given in ((flag, "a", flag, "b"), (flag, '["a", "b"]')):
        found = json.loads(call("config", "show", *given, "--json").stdout)
        assert found[flag[2:].replace("-", "_")]["value"] == ["a", "b"]
