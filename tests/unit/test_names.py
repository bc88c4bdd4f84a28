"""Other programs' names of settings are answered with ours, and none of ours is taken for one."""

from pathlib import Path

import pytest

from stowage import Memory
from stowage.config.names import advice_for
from stowage.config.settings import SETTINGS, load_settings
from stowage.errors import ConfigError


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "::1", "[::1]", "localhost", "10.0.0.7", "node-1", "gpu1.example", ""]
)
def test_host_with_an_address_is_an_address(host: str) -> None:
    settings = load_settings({"host": host}, {})
    assert settings["host"] == host and settings["host_memory"] == "auto"


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
    assert [name for name in SETTINGS if advice_for(name) and name not in ("host", "port")] == []


def test_a_setting_has_one_name() -> None:
    for given in ({"device_kv": "1MiB"}, {"listen": "0.0.0.0:80"}, {"policy": "lru"}):
        with pytest.raises(ConfigError, match=next(iter(given))):
            load_settings(given, {})
    with pytest.raises(ConfigError, match=r"Did you mean STOWAGE_BLOCK_SIZE\?"):
        load_settings({}, {"STOWAGE_BLOCK_SIZES": "16"})
    with pytest.raises(TypeError, match="device_kv"):
        Memory(device_kv="1MiB")  # type: ignore[call-arg]
