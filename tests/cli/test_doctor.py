"""``stowage doctor`` and the checks behind it."""

import errno
import importlib.metadata
import json
import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from stowage.cli import checks
from stowage.config.settings import load_settings
from tests.cli.conftest import Stowage


def levels(found: list[checks.Check]) -> dict[str, str]:
    return {check.name: check.level for check in found}


@pytest.mark.parametrize(
    ("said", "level"),
    [
        ("always [madvise] never\n", "ok"),
        ("[always] madvise never\n", "ok"),
        ("always madvise [never]\n", "note"),
        (None, "ok"),
    ],
)
def test_huge_pages(said: str | None, level: str, tmp_path: Path) -> None:
    path = tmp_path / "enabled"
    if said is not None:
        path.write_text(said)
    found = checks.check_huge_pages(path)
    assert found.level == level
    assert (f"echo madvise > {path}" in found.fix) == (level == "note")


def test_this_machine_has_no_problem(call: Stowage, tmp_path: Path) -> None:
    result = call(
        "doctor", "--kv-cache-memory", "1MiB", "--host-memory", "1MiB", "--disk", f"{tmp_path}/kv:1MiB", "--json"
    )
    report = json.loads(result.stdout)
    assert (result.exit_code, report["problems"]) == (0, 0), report
    assert not (tmp_path / "kv").exists(), "looking must not make the directory"
    assert list(tmp_path.iterdir()) == []


def test_every_problem_has_a_fix_and_makes_status_1(call: Stowage, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = call("doctor", "--host-memory", "99TiB", "--disk", f"{tmp_path}/file:1MiB")
    assert result.exit_code == 1
    assert result.stdout.count("PROBLEM") == 2 and result.stdout.rstrip().endswith("2 problems.")
    for place, line in enumerate(lines := result.stdout.splitlines()):
        assert not line.startswith("PROBLEM") or lines[place + 1].strip().startswith("fix: ")


def test_versions() -> None:
    versions = {"torch": "2.10.1", "transformers": "5.16.1", "safetensors": "0.8.0", "blake3": "1.0.0"}

    def version_of(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    found = levels(checks.check_packages(version_of))
    assert found == {
        "torch": "problem",
        "transformers": "problem",
        "safetensors": "ok",
        "blake3": "ok",
        "xxhash": "problem",
    }
    versions |= {"torch": "2.13.0+cpu", "transformers": "5.17.0rc1", "xxhash": "3.5"}
    assert set(levels(checks.check_packages(version_of)).values()) == {"ok"}
    versions["transformers"] = "5.99.0"
    assert levels(checks.check_packages(version_of))["transformers"] == "note"


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        ({"avx2", "avx512f", "avx512_bf16"}, "ok"),
        ({"avx2"}, "note"),
        ({"sse2"}, "note"),
        ({"asimd", "bf16"}, "ok"),
        (set(), "note"),
    ],
)
def test_instruction_sets(flags: set[str], level: str) -> None:
    assert checks.check_instructions(frozenset(flags)).level == level


def test_more_threads_than_cores_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "10000")
    assert checks.check_cores().level == "note"


def test_a_budget_that_cannot_be_used_is_a_problem() -> None:
    settings = load_settings({"disk": "/kv:1GiB", "host_memory": 0}, {})
    assert checks.check_budgets(settings).level == "problem"


def test_devices() -> None:
    assert [checks.check_device("", driver).level for driver in (False, True)] == ["ok", "note"]
    assert checks.check_device("cpu", True).fix.startswith("Give --device cuda")
    assert checks.check_device("gpu", True).level == "problem"


def test_what_lies_on_another_device_takes_none_of_this_machines_memory() -> None:
    asked = {"kv_cache_memory": "100%", "host_memory": "10%"}
    assert checks.check_budgets(load_settings(asked, {})).level == "problem"
    elsewhere = checks.check_budgets(load_settings(asked | {"device": "cuda"}, {}))
    assert elsewhere.level == "ok" and elsewhere.found.startswith("host ")


def test_cache_directory_of_others(tmp_path: Path) -> None:
    (link := tmp_path / "link").symlink_to(tmp_path)
    (crowded := tmp_path / "crowded").mkdir(mode=0o755)
    (crowded / "letter.txt").write_text("")
    (writable := tmp_path / "writable").mkdir()
    writable.chmod(0o777)
    (mine := tmp_path / "mine").mkdir(mode=0o700)
    (readable := tmp_path / "readable").mkdir()
    readable.chmod(0o755)
    found = [checks.check_owner(path).level for path in (link, crowded, writable, mine, readable, tmp_path / "new")]
    assert found == ["problem", "problem", "problem", "ok", "ok", "ok"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_cache_directory_of_another_user(tmp_path: Path) -> None:
    (foreign := tmp_path / "foreign").mkdir(mode=0o700)
    os.chown(foreign, 12345, 12345)
    assert "12345" in checks.check_owner(foreign).found and checks.check_owner(foreign).level == "problem"


def test_a_limit_beyond_the_free_space_is_noted(tmp_path: Path) -> None:
    assert checks.check_free(tmp_path, tmp_path, 1 << 60).level == "note"
    assert checks.check_free(tmp_path, tmp_path, 1).level == "ok"


@pytest.mark.parametrize(
    ("code", "level", "says"),
    [
        (errno.EROFS, "problem", "no file can be written in"),
        (errno.EACCES, "problem", "no file can be written in"),
        (errno.ENOSPC, "note", "is full"),
        (errno.EDQUOT, "note", "is full"),
    ],
)
def test_a_disk_that_takes_nothing(
    code: int, level: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a server would end on is a problem, and none of it is said to be about direct reads."""

    def refuse(**_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    found = checks.check_direct(tmp_path)
    assert (found.level, says in found.found) == (level, True), found
    assert os.strerror(code) in found.found and "page cache" not in found.fix


def test_no_limit_of_0_bytes_is_advised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    assert checks.check_free(tmp_path, tmp_path, 1 << 20).fix == "Free some."


def test_direct_reads_leave_nothing_behind(tmp_path: Path) -> None:
    assert checks.check_direct(tmp_path).level in ("ok", "note")
    assert list(tmp_path.iterdir()) == []
