"""Sizes, disks and budgets as users write them."""

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stowage.config.memory import (
    DISK_PROTECTIONS,
    Memory,
    format_size,
    parse_disk,
    parse_size,
    parse_tokens,
    ram_total_bytes,
)
from stowage.config.wording import shown_value
from stowage.errors import ConfigError

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@given(st.integers(0, 10_000), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]), st.booleans())
def test_whole_sizes_are_exact(number: int, unit: str, space: str, lower: bool) -> None:
    text = f"{number}{space}{unit}"
    assert parse_size(text.lower() if lower else text) == number * UNITS[unit]


@given(st.integers(0, 999), st.integers(0, 999_999), st.sampled_from(sorted(UNITS)))
def test_decimal_sizes_are_exact_and_rounded_down(whole: int, decimals: int, unit: str) -> None:
    text = f"{whole}.{decimals:06}"
    assert parse_size(text + unit) == int(Fraction(text) * UNITS[unit])


@given(st.integers(0, 1 << 60))
def test_numbers_are_bytes(size_bytes: int) -> None:
    assert parse_size(size_bytes) == parse_size(str(size_bytes)) == size_bytes


@given(st.integers(0, 100), st.integers(0, 1 << 50))
def test_percentages_are_of_the_total(percent: int, total_bytes: int) -> None:
    share_bytes = parse_size(f"{percent}%", total_bytes)
    assert share_bytes == percent * total_bytes // 100 <= total_bytes


@given(st.text())
def test_any_text_is_a_size_or_a_clear_error(text: str) -> None:
    try:
        assert parse_size(text, 1000) >= 0
    except ConfigError as error:
        assert "size" in str(error)


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "-1", "-1GiB", "1e9", "1_000", "1,5GiB", "0x10", "2 Gi B", "٣GiB", "nan", "inf", "2GiB2", "1.GiB"],
)
def test_what_is_not_a_size_is_refused_with_a_way_out(text: str) -> None:
    with pytest.raises(ConfigError, match=r"not understood|unit of the size") as caught:
        parse_size(text)
    assert "GiB" in str(caught.value)


@pytest.mark.parametrize("value", [True, 1.5, None, b"1GiB", [1]])
def test_other_types_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="not a number or text"):
        parse_size(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [-1, "101%", "30%", "99999999TiB", 1 << 63])
def test_impossible_sizes_are_refused(value: int | str) -> None:
    with pytest.raises(ConfigError):
        parse_size(value)


@pytest.mark.parametrize(
    "text", ["9" * 4301, "9" * 65, "1" + "0" * 10_000 + "GiB", "0." + "0" * 5000 + "1%", 10**5000], ids=range(5)
)
def test_sizes_of_thousands_of_digits_are_refused(text: int | str) -> None:
    """Python itself refuses to read them, with another error."""
    with pytest.raises(ConfigError, match="size") as caught:
        parse_size(text, 1000)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("disk", 5), ("disk", None), ("eviction_policy", b"lru"), ("weights", None), ("valkey", ["a"]), ("object", 1.5),
        ("disk_key_file", 5), ("disk_protection", None), ("valkey_password_file", True), ("load_timeout_s", "5"),
        ("load_timeout_s", None), ("load_timeout_s", True), ("load_timeout_s", 1j), ("valkey_ttl_s", "day"),
        ("lookup_timeout_s", [1]), ("lookup_timeout_s", float("nan")), ("group_block_size", 5),
        ("group_block_size", [("full", 16)]), ("group_block_size", {"full": "16"}), ("block_size", 10**5000),
        ("block_size", "16"), ("max_num_batched_tokens", 1.5), ("kv_cache_memory", None),
        ("host_memory", 10**5000), ("host_memory", "9" * 5000),
        ("device_memory", [1]), ("object_limit", {}),
    ],
    ids=range(27),
)  # fmt: skip
def test_fields_of_the_wrong_type_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        Memory(**{name: value})  # type: ignore[arg-type]
    assert len(str(caught.value)) < 400


def test_format_size() -> None:
    assert [format_size(n) for n in (0, 1023, 1024, 1536, 1 << 30, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "1.5 KiB",
        "1 GiB",
        "5 TiB",
    ]


def test_disk_expands_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/reader")
    assert parse_disk("~/.cache/stowage:20GiB") == (Path("/home/reader/.cache/stowage"), 20 << 30)


def test_disk_relative_is_from_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_disk("cache/../kv:1MB") == (tmp_path / "kv", 10**6)


def test_disk_keeps_colons_and_spaces_in_the_directory() -> None:
    assert parse_disk("/a:b/c d:5GiB") == (Path("/a:b/c d"), 5 << 30)


def test_disk_does_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/")
    assert parse_disk(f"{tmp_path}/link/kv:1GiB")[0] == tmp_path / "link" / "kv"


def test_disk_percentage_is_of_its_file_system(tmp_path: Path) -> None:
    whole, half = (parse_disk(f"{tmp_path}/not/there/yet:{percent}%")[1] for percent in (100, 50))
    assert abs(whole - 2 * half) <= 1 and whole > 0


@pytest.mark.parametrize("text", ["", ":", "/kv", "/kv:", ":5GiB", "/kv:lots", "/kv:0", "/k\0v:1GiB", "/kv:-1GiB"])
def test_bad_disks_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="disk"):
        parse_disk(text)


def test_disk_of_an_unknown_user_is_refused() -> None:
    with pytest.raises(ConfigError, match="home directory"):
        parse_disk("~no-such-user-here/kv:1GiB")


def test_memory_defaults_are_usable() -> None:
    memory = Memory()
    assert (memory.kv_cache_memory_bytes, memory.host_memory_bytes, memory.disk_directory, memory.disk_bytes) == (
        1 << 30,
        0,
        None,
        0,
    )


def test_memory_reads_sizes_once_stated() -> None:
    memory = Memory(kv_cache_memory="256MiB", host_memory="10%", disk="/kv:1GiB")
    assert memory.kv_cache_memory_bytes == 256 << 20
    assert memory.host_memory_bytes == ram_total_bytes() // 10
    assert (memory.disk_directory, memory.disk_bytes) == (Path("/kv"), 1 << 30)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"kv_cache_memory": "much"}, "kv_cache_memory"),
        ({"kv_cache_memory": 0}, "kv_cache_memory is 0"),
        ({"host_memory": -5}, "host_memory"),
        ({"disk": "/kv:1GiB", "host_memory": 0}, "give it a size"),
        ({"host_memory": "1GiB", "disk": "/kv"}, "DIRECTORY:SIZE"),
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": True}, "block_size is True"),
        ({"chunk_blocks": 65}, "at most 64"),
        ({"snapshot_tokens": 1.5}, "snapshot_tokens"),
        ({"max_num_seqs": -1}, "max_num_seqs"),
        ({"group_block_size": {"slding": 16}}, "'sliding'"),
        ({"group_block_size": {"sliding": 0}}, "group_block_size"),
        ({"load_timeout_s": 0}, "load_timeout_s"),
        ({"load_timeout_s": float("nan")}, "load_timeout_s"),
    ],
)
def test_memory_that_cannot_be_used_is_never_made(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Memory(**wrong)  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_protection_and_key_file_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert Memory().disk_key_path is None
    for method in DISK_PROTECTIONS[1:]:
        memory = Memory(host_memory=1, disk_protection=method, disk_key_file="~/keys")
        assert memory.disk_key_path == Path("/home/me/keys"), "not looked at yet"
        with pytest.raises(ConfigError, match="stowage key new"):
            Memory(disk_protection=method)
    with pytest.raises(ConfigError, match="leave disk_key_file out"):
        Memory(disk_key_file="~/keys")
    for wrong, near in (
        ("aes256gcm", "aes-256-gcm"),
        ("blake", "blake3"),
        ("AES-256-GCM", "aes-256-gcm"),
        ("", "Valid"),
    ):
        with pytest.raises(ConfigError, match=near):
            Memory(disk_protection=wrong, disk_key_file="keys")


def test_memory_is_a_value() -> None:
    assert Memory(host_memory=1024) == Memory(host_memory=1024) and hash(Memory()) == hash(Memory())
    with pytest.raises(AttributeError):
        Memory().host_memory = 5  # type: ignore[misc]


@pytest.mark.parametrize("below", [{"disk": "/kv:1GiB"}, {"valkey": "redis://h"}, {"object": "s3://b"}])
def test_a_place_below_gives_host_memory_a_size(below: dict[str, str]) -> None:
    assert Memory().host_memory_bytes == 0
    found = Memory(**below).host_memory_bytes  # type: ignore[arg-type]
    assert 0 < found == min(4 << 30, ram_total_bytes() // 8)
    assert Memory(host_memory="1MiB", **below).host_memory_bytes == 1 << 20  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="leave host_memory out"):
        Memory(host_memory=0, **below)  # type: ignore[arg-type]


def test_a_budget_for_the_device_sets_a_part_aside_for_the_kv_cache() -> None:
    assert Memory(device_memory="1GiB").kv_cache_memory_bytes == 256 << 20
    assert Memory(device_memory="64GiB").kv_cache_memory_bytes == 1 << 30
    assert Memory(device_memory="1GiB", kv_cache_memory="2MiB").kv_cache_memory_bytes == 2 << 20


@pytest.mark.parametrize(("text", "tokens"), [("4096", 4096), ("32k", 32_768), ("1M", 1 << 20), (" 7 ", 7)])
def test_numbers_of_tokens(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5k", "32kb", "k", "many", "1e3"])
def test_bad_numbers_of_tokens(text: str) -> None:
    with pytest.raises(ConfigError, match="number of tokens"):
        parse_tokens(text)


@pytest.mark.parametrize("value", [10**40, [10**5000], {"a": -(10**5000)}, "x" * 10**6, list(range(1000))])
def test_a_message_shows_any_value_in_few_words(value: object) -> None:
    assert 0 < len(shown_value(value)) < 60
