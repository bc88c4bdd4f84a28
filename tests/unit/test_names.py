"""Old names of settings mean what they meant, and say so; other programs' names are answered with ours."""

import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from stowage import Memory
from stowage.config.names import RENAMED, elsewhere, today
from stowage.config.settings import SETTINGS, load_settings
from stowage.errors import ConfigError

VALUES: dict[str, Any] = {
    "policy": "arc",
    "served_name": "x",
    "group_block_tokens": {"sliding": 32},
    "body_max": "1MiB",
}


@pytest.mark.parametrize("old", sorted(RENAMED))
def test_an_old_name_means_the_same_from_every_source(old: str, tmp_path: Path) -> None:
    new, value = RENAMED[old], VALUES.get(old, 2048)
    assert new in SETTINGS and old not in SETTINGS
    file = tmp_path / "stowage.toml"
    text = f"{value!r}" if isinstance(value, int) else "{sliding = 32}" if isinstance(value, dict) else f'"{value}"'
    file.write_text(f"{old} = {text}\n")
    written = "sliding=32" if isinstance(value, dict) else str(value)
    for settings in (
        load_settings({}, {}, file),
        load_settings({}, {f"STOWAGE_{old.upper()}": written}),
        load_settings({old: written}, {}),
    ):
        assert settings[new] == value
        assert len(settings.hints) == 1 and new.replace("_", "-") in settings.hints[0].replace("_", "-").lower()
    assert load_settings({new: written}, {}).hints == ()


@pytest.mark.parametrize("old", sorted({*RENAMED, "host"} - {"served_name"}))
def test_memory_under_old_names(old: str) -> None:
    new = RENAMED.get(old, "host_memory")
    if new not in {item.name for item in fields(Memory)}:
        with pytest.raises(TypeError):
            Memory(**{old: 1})  # type: ignore[arg-type]
        return
    value = VALUES.get(old, 2048)
    with pytest.warns(DeprecationWarning, match=new) as said:
        memory = Memory(**{old: value})
    assert said[0].filename == __file__, "it names the caller's line"
    assert memory == Memory(**{new: value})
    with pytest.warns(DeprecationWarning, match=new):
        assert getattr(memory, old) == value


def test_sizes_of_memory_under_old_names() -> None:
    memory = Memory(kv_cache_memory="2MiB", host_memory="1MiB")
    with pytest.warns(DeprecationWarning):
        assert (memory.device_kv_bytes, memory.host_bytes) == (2 << 20, 1 << 20)  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="hots"):
        memory.hots  # type: ignore[attr-defined]  # noqa: B018


def test_new_names_say_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Memory(kv_cache_memory="1MiB", host_memory="1GiB", block_size=8).block_size == 8


@pytest.mark.parametrize("size", ["2GiB", "2 gb", "1073741824", "25%", 4096, 0, "0", "1.5G", "512m"])
def test_host_with_a_size_is_host_memory(size: int | str, tmp_path: Path) -> None:
    assert today("host", size) == {"host_memory": size}
    file = tmp_path / "stowage.toml"
    file.write_text(f"host = {size!r}\n".replace("'", '"'))
    settings = load_settings({}, {}, file)
    assert settings["host"] == "127.0.0.1" and str(settings["host_memory"]) == str(size) and settings.hints


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "::1", "[::1]", "localhost", "10.0.0.7", "node-1", "gpu1.example", ""]
)
def test_host_with_an_address_is_an_address(host: str) -> None:
    settings = load_settings({"host": host}, {})
    assert settings["host"] == host and settings["host_memory"] == "auto" and settings.hints == ()


@pytest.mark.parametrize(
    ("listen", "host", "port"), [("0.0.0.0:80", "0.0.0.0", 80), ("[::1]:0", "::1", 0), ("localhost:9", "localhost", 9)]
)
def test_listen_is_host_and_port(listen: str, host: str, port: int) -> None:
    settings = load_settings({}, {"STOWAGE_LISTEN": listen})
    assert (settings["host"], settings["port"]) == (host, port)
    assert "STOWAGE_HOST and STOWAGE_PORT" in settings.hints[0]


@pytest.mark.parametrize("listen", ["8000", ":8000", "localhost", "localhost:", "localhost:port", "::1:8000"])
def test_listen_that_is_no_address(listen: str) -> None:
    with pytest.raises(ConfigError, match="--host ADDRESS --port N"):
        load_settings({"listen": listen}, {})


def test_old_and_new_together_are_refused_in_one_source_and_ranked_across_sources(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one setting"):
        load_settings({}, {"STOWAGE_DEVICE_KV": "1MiB", "STOWAGE_KV_CACHE_MEMORY": "2MiB"})
    with pytest.raises(ConfigError, match="one setting"):
        Memory(host="1GiB", host_memory="2GiB")  # type: ignore[call-arg]
    file = tmp_path / "stowage.toml"
    file.write_text('kv_cache_memory = "1MiB"\n')
    assert load_settings({}, {"STOWAGE_DEVICE_KV": "2MiB"}, file)["kv_cache_memory"] == "2MiB"
    both = load_settings({"host": "2GiB", "listen": "0.0.0.0:80"}, {})
    assert (both["host_memory"], both["host"], both["port"]) == ("2GiB", "0.0.0.0", 80)


def test_names_of_other_programs_are_answered(tmp_path: Path) -> None:
    file = tmp_path / "stowage.toml"
    file.write_text("gpu_memory_utilization = 0.9\n")
    with pytest.raises(ConfigError, match="--device-memory"):
        load_settings({}, {}, file)
    with pytest.raises(ConfigError, match="--max-model-len"):
        load_settings({"ctx_size": "4096"}, {})
    with pytest.raises(ConfigError, match="--max-num-seqs"):
        Memory(max_running_requests=4)  # type: ignore[call-arg]


def test_no_setting_is_taken_for_another_program_s() -> None:
    assert [name for name in SETTINGS if elsewhere(name) and name not in ("host", "port")] == []
    assert [name for name in RENAMED if elsewhere(name)] == []


def test_the_plugin_for_vllm_takes_old_names(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("numpy")
    from stowage.plugins.vllm import settings

    read = settings.read({"host": "1MiB", "probe_timeout_s": 2})
    assert read.memory == Memory(host_memory="1MiB", lookup_timeout_s=2)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "host_memory" in caplog.text and "lookup_timeout_s" in caplog.text
    caplog.clear()
    assert settings.read({"host_memory": "1MiB"}).memory.host_memory == "1MiB" and not caplog.records
