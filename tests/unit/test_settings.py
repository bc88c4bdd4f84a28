"""Which source of a setting wins, and what happens to misspelt ones."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from stowage.config.memory import Memory
from stowage.config.settings import SETTINGS, find_config, load_settings
from stowage.errors import ConfigError


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "stowage.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_are_those_of_memory() -> None:
    settings = load_settings({}, {})
    assert settings.memory() == Memory()
    assert {value.source for value in settings.values.values()} == {"default"}


def test_every_budget_is_a_setting() -> None:
    assert {item.name for item in dataclasses.fields(Memory)} <= set(SETTINGS)


def test_precedence_flag_environment_file_default(tmp_path: Path) -> None:
    path = written(tmp_path, 'host_memory = "1GiB"\nkv_cache_memory = "1MiB"\nblock_size = 8\n')
    environ = {"STOWAGE_HOST_MEMORY": "2GiB", "STOWAGE_KV_CACHE_MEMORY": "2MiB", "HOME": "/", "STOWAGE_SEED": ""}
    settings = load_settings({"host_memory": "3GiB", "disk": None}, environ, path)
    found = {name: (settings.values[name].value, settings.values[name].source) for name in SETTINGS}
    assert found["host_memory"] == ("3GiB", "flag")
    assert found["kv_cache_memory"] == ("2MiB", "environment")
    assert found["block_size"] == (8, str(path))
    assert found["disk"] == ("", "default")
    assert found["seed"] == (None, "default")


def test_every_kind_of_value_reads_the_same_from_file_and_environment(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        'host_memory = 4096\nload_timeout_s = 2\ntemperature = 0.5\nseed = 7\ndeterministic = true\nstop = ["\\n"]\n'
        "[group_block_size]\nsliding = 32\nrecurrent = 512\n",
    )
    environ = {
        "STOWAGE_HOST_MEMORY": "4096",
        "STOWAGE_LOAD_TIMEOUT_S": "2",
        "STOWAGE_TEMPERATURE": "0.5",
        "STOWAGE_SEED": "7",
        "STOWAGE_DETERMINISTIC": "Yes",
        "STOWAGE_STOP": "\n",
        "STOWAGE_GROUP_BLOCK_SIZE": "sliding=32, recurrent=512",
    }
    from_file, from_environment = load_settings({}, {}, file), load_settings({}, environ)
    assert {name: from_file[name] for name in SETTINGS} == {name: from_environment[name] for name in SETTINGS}
    assert from_file.memory() == from_environment.memory()
    assert from_file.sampling()["stop"] == ("\n",) and from_file["deterministic"] is True
    assert load_settings({"deterministic": False}, environ)["deterministic"] is False


@pytest.mark.parametrize("name", ["stop", "allowed_origins"])
def test_every_list_is_written_in_the_same_ways(name: str, tmp_path: Path) -> None:
    two, variable = ("https://a.example", "https://b.example"), f"STOWAGE_{name.upper()}"
    file = written(tmp_path, f"{name} = {json.dumps(two)}\n")
    ways = [
        load_settings({}, {}, file),
        load_settings({}, {variable: json.dumps(two)}),
        load_settings({name: json.dumps(two)}, {}),
        load_settings({name: list(two)}, {}),
    ]
    assert [way[name] for way in ways] == [two] * 4
    assert load_settings({}, {variable: two[0]})[name] == two[:1]
    with pytest.raises(ConfigError, match="not text or a list of texts"):
        load_settings({}, {}, written(tmp_path, f"{name} = [5]\n"))


@pytest.mark.parametrize("text", ["[INST]", "[1]", '["a', "[" * 100_000, "a, b"])
def test_a_stop_that_is_no_list_of_texts_is_a_text(text: str) -> None:
    assert load_settings({}, {"STOWAGE_STOP": text})["stop"] == (text,)


def test_a_switch_that_may_be_left_to_the_program() -> None:
    for text, value in (("on", True), ("off", False), ("auto", None), ("", None)):
        assert load_settings({"cuda_graphs": text}, {})["cuda_graphs"] is value
        assert load_settings({}, {"STOWAGE_CUDA_GRAPHS": text})["cuda_graphs"] is value
    assert load_settings({}, {})["cuda_graphs"] is None


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("host_memroy", "host_memory"), ("kv-cache-memory", "kv_cache_memory"), ("blocksize", "block_size")],
)
def test_unknown_key_in_the_file_names_the_nearest(tmp_path: Path, wrong: str, right: str) -> None:
    path = written(tmp_path, f'"{wrong}" = 1\n')
    with pytest.raises(ConfigError, match=right) as caught:
        load_settings({}, {}, path)
    assert wrong in str(caught.value) and str(path) in str(caught.value)


def test_unknown_key_that_resembles_nothing_lists_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"block_size.*kv_cache_memory"):
        load_settings({}, {}, written(tmp_path, "zzzzzz = 1\n"))


def test_misspelt_variable_is_refused_and_a_foreign_one_is_not() -> None:
    with pytest.raises(ConfigError, match="Did you mean STOWAGE_KV_CACHE_MEMORY"):
        load_settings({}, {"STOWAGE_KV_CACHE_MEMROY": "1GiB"})
    foreign = {
        "STOWAGE_SERVICE_HOST": "10.0.0.1",
        "STOWAGE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "STOWAGE_PORT": "tcp://10.0.0.1:8000",
        "STOWAGE_DEBUG": "1",
    }
    assert load_settings({}, foreign).memory() == Memory()


@pytest.mark.parametrize(
    "line",
    [
        "host_memory = true",
        "host_memory = 1.5",
        "disk = 5",
        'block_size = "many"',
        "block_size = 1.5",
        'temperature = "hot"',
        "stop = [1]",
        "deterministic = 1",
        'deterministic = "perhaps"',
        'cuda_graphs = "perhaps"',
        "cuda_graphs = 2",
        "group_block_size = 3",
        'group_block_size = "sliding"',
    ],
)
def test_values_of_the_wrong_kind_name_the_setting_and_the_file(tmp_path: Path, line: str) -> None:
    path = written(tmp_path, line + "\n")
    with pytest.raises(ConfigError) as caught:
        load_settings({}, {}, path)
    assert line.split()[0] in str(caught.value) and str(path) in str(caught.value)
    assert re.search(r"\bwrite\b", str(caught.value), re.IGNORECASE), "what to do"


def test_what_is_no_pair_of_kind_and_tokens_is_told_with_an_example() -> None:
    with pytest.raises(ConfigError, match=r"STOWAGE_GROUP_BLOCK_SIZE .* it is 'full=16,sliding'; write kind=tokens"):
        load_settings({}, {"STOWAGE_GROUP_BLOCK_SIZE": "full=16,sliding"})


def test_a_table_in_the_file_is_told_as_one(tmp_path: Path) -> None:
    """And not as a setting that was misspelt."""
    path = written(tmp_path, '[memory]\nhost_memory = "1GiB"\n')
    with pytest.raises(ConfigError, match=r"table \[memory\] in .*leave that line out") as caught:
        load_settings({}, {}, path)
    assert str(path) in str(caught.value)


def test_file_that_is_no_toml_or_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_settings({}, {}, written(tmp_path, "host: 2GiB\n"))
    (tmp_path / "stowage.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_settings({}, {}, tmp_path / "stowage.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_settings({}, {}, tmp_path / "missing.toml")


def test_the_file_that_is_read(tmp_path: Path) -> None:
    assert find_config({}, tmp_path) is None
    path = written(tmp_path, "")
    assert find_config({}, tmp_path) == path
    assert find_config({"STOWAGE_CONFIG": "/etc/stowage.toml"}, tmp_path) == Path("/etc/stowage.toml")
