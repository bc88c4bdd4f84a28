"""``stowage scrub``: exit status, what it prints, and what a real kill leaves behind. What it does: tests/unit."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stowage.storage import key_file
from stowage.storage.format.protection import Method
from tests.cli.conftest import SOURCE, Stowage
from tests.disk_client import Client, segments
from tests.numbered_chunks import fill
from tests.tier_client import key

COUNT = 60


def test_a_clean_directory(call: Stowage, tmp_path: Path) -> None:
    cache = fill(tmp_path / "c", COUNT)
    result = call("scrub", tmp_path / "c")
    assert result.exit_code == 0 and "Nothing bad." in result.stdout and f"{COUNT} chunks" in result.stdout
    assert result.stderr == ""
    report = json.loads(call("scrub", tmp_path / "c", "--json").stdout)
    assert report["clean"] and report["good"] == report["chunks"] == COUNT and report["bad_chunks"] == []
    assert report["bytes"] == sum(place.length for place in cache.places.values()) and not report["check"]


def test_check_then_remove(call: Stowage, tmp_path: Path) -> None:
    cache = fill(tmp_path / "c", COUNT)
    cache.flip(7, 33)
    result = call("scrub", tmp_path / "c", "--check", "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 1 and (report["bad"], report["left"], report["clean"]) == (2, 2, False)
    told = [(item["segment"], item["offset"], item["length"]) for item in report["bad_chunks"]]
    assert told == [(p.path.name, p.offset, p.length) for p in (cache.places[7], cache.places[33])]
    result = call("scrub", tmp_path / "c", "--check")
    assert result.exit_code == 1 and "NOT CLEAN" in result.stdout and result.stdout.count("damaged:") == 2
    result = call("scrub", tmp_path / "c")
    assert result.exit_code == 0 and "2 of them removed" in result.stdout and "Clean now." in result.stdout
    assert cache.found() == set(range(COUNT)) - {7, 33}
    assert call("scrub", tmp_path / "c", "--check").exit_code == 0


def test_a_live_writer_keeps_its_bad_chunk_and_the_status_says_so(call: Stowage, tmp_path: Path) -> None:
    with Client(tmp_path / "c") as client:
        client.store([key(1)], [20_000])
        (path,) = segments(tmp_path / "c")
        with path.open("r+b") as file:
            file.seek(8192 + 50)
            file.write(b"?")
        result = call("scrub", tmp_path / "c")
        assert result.exit_code == 1 and "in use" in result.stdout and "1 of them left" in result.stdout


def test_keys(call: Stowage, tmp_path: Path) -> None:
    key_file.make(tmp_path / "k")
    protection = key_file.protection(Method.AES_256_GCM.label, tmp_path / "k")
    cache = fill(tmp_path / "c", COUNT, protection)
    cache.flip(5)
    result = call("scrub", tmp_path / "c")
    assert result.exit_code == 0 and f"{COUNT} chunks not checked" in result.stdout and "--key-file" in result.stdout
    result = call("scrub", tmp_path / "c", "--key-file", tmp_path / "k")
    assert result.exit_code == 0 and "1 of them removed" in result.stdout
    assert cache.found() == set(range(COUNT)) - {5}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "no cache has been stored there"),
        (["."], "not a Stowage cache"),
        (["c", "--key-file", "missing"], "missing"),
        (["c", "--limit-rate", "fast"], "not understood"),
        (["c", "--limit-rate", "0"], "nothing would ever be read"),
    ],
)
def test_what_cannot_be_done_says_why(call: Stowage, tmp_path: Path, arguments: list[str], words: str) -> None:
    (tmp_path / "c").mkdir(mode=0o700)
    (tmp_path / "c" / "lock").touch()
    result = call("scrub", *arguments)
    assert result.exit_code == 2 and words in result.stderr and result.stdout == ""


def test_the_rate_is_limited(call: Stowage, tmp_path: Path) -> None:
    fill(tmp_path / "c", COUNT)
    began_s = time.monotonic()
    result = call("scrub", tmp_path / "c", "--limit-rate", "300KB")
    assert result.exit_code == 0 and time.monotonic() - began_s > 0.5  # 540 KB, a second's worth of which is free


@pytest.mark.rare
def test_killed_for_real_it_loses_nothing_good(tmp_path: Path) -> None:
    """The process is killed at random moments while it works, over and over; then it is let through."""
    cache = fill(tmp_path / "c", 200)
    bad = set(range(0, 200, 7))
    cache.flip(*bad)
    good = [n for n in range(200) if n not in bad]
    program = (
        "import sys, pathlib; from stowage.storage.disk.scrub import scrub\n"
        "print('go', flush=True)\n"
        "report = scrub(pathlib.Path(sys.argv[1]), bytes_per_s_max=float(sys.argv[2]))\n"
        "sys.exit(not report.is_clean)"
    )

    def start(rate: float) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / "c"), str(rate)],
            env={"PYTHONPATH": str(SOURCE)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None and process.stdout.readline() == "go\n"
        return process

    chance = random.Random(11)
    killed = 0
    for _ in range(4):
        with start(250_000.0) as process:  # would take some seconds
            time.sleep(chance.random() * 0.8)
            os.kill(process.pid, signal.SIGKILL)
            killed += process.wait() == -signal.SIGKILL
        with Client(tmp_path / "c") as client:
            assert client.load([key(n) for n in good], [cache.places[n].length for n in good]).ok.all()
    assert killed
    with start(1e12) as process:
        assert process.wait() == 0
    assert cache.found() == set(good)


def test_stats_tells_a_torn_segment_from_one_that_is_written(call: Stowage, tmp_path: Path) -> None:
    cache = fill(tmp_path / "c", COUNT)
    torn, unusable = segments(tmp_path / "c")[:2]
    with Client(tmp_path / "c") as client:
        client.store([key("live")], [5000])
        # Made now: a tier that opens the directory, or makes a segment, would have finished it.
        torn.write_bytes(torn.read_bytes()[:-4096] + bytes(65536))
        unusable.write_bytes(b"x" * unusable.stat().st_size)
        before = cache.image()
        found = json.loads(call("stats", tmp_path / "c", "--json").stdout)["segments"]
        assert (found["open"], found["torn"], found["unusable"]) == (1, 1, 1) and cache.image() == before
        assert f"stowage scrub {tmp_path / 'c'}" in call("stats", tmp_path / "c").stdout
        assert call("scrub", tmp_path / "c").exit_code == 0
        found = json.loads(call("stats", tmp_path / "c", "--json").stdout)["segments"]
        assert (found["open"], found["torn"], found["unusable"]) == (1, 0, 0)
        assert "scrub" not in call("stats", tmp_path / "c").stdout
        client.check()
