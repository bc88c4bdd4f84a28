"""One directory over time: after a kill, in two servers at once, under another model, with flipped bytes, full."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tests.vllm.conftest import Start
from tests.vllm.models import FAMILIES
from tests.vllm.oracle import Engine, Engines, connector, prompt

TOKENS = prompt(700)


def stored(engine: Engine) -> int:
    """So many of TOKENS are whole blocks. A state is as large as the processor's kernel wants it, and so is a block."""
    step = int(engine.ask("layout")["hit_tokens"])
    return len(TOKENS) // step * step


def flip_bytes(directory: Path) -> int:
    """One byte in every 4 KiB of every segment, behind its first pages."""
    flipped = 0
    for path in directory.rglob("*"):
        if path.is_file() and path.stat().st_size > 1 << 16:
            data = bytearray(path.read_bytes())
            for place in range(9000, len(data), 4096):
                data[place] ^= 0x10
                flipped += 1
            path.write_bytes(data)
    return flipped


@pytest.mark.slow
def test_another_interpreter_after_a_kill(start: Start, tmp_path: Path) -> None:
    """Nothing is shared but the directory: not the hash seed, and nobody closed anything."""
    first = start("llama", connector(disk=tmp_path / "cache"))
    local = [first.generate(TOKENS), first.generate(TOKENS)][1]
    assert first.ask("flush")
    first.kill()
    second = start("llama", connector(disk=tmp_path / "cache"), fresh=True)
    external = second.generate(TOKENS)
    assert external.external == local.local == stored(second)
    assert external.distance(local) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_two_servers_share_a_directory(name: str, start: Start, tmp_path: Path) -> None:
    """Each finds what the other has stored since it started."""
    one, other = (start(name, connector(disk=tmp_path / "cache")) for _ in range(2))
    for writer, reader, seed in ((one, other, 1), (other, one, 2)):
        tokens = prompt(700, seed)
        writer.generate(tokens)
        local = writer.generate(tokens)
        assert writer.ask("flush")
        until_s = time.monotonic() + 60.0
        while reader.stats()["disk.chunks"] < writer.stats()["disk.chunks"]:  # it looks every second
            assert time.monotonic() < until_s, "the reader never saw what the writer wrote"
            time.sleep(0.1)
        external = reader.generate(tokens)
        assert external.external == local.local == stored(reader)
        assert external.distance(local) == 0.0
        assert reader.hits("disk") > 0


@pytest.mark.slow
def test_models_never_meet(start: Start, engines: Engines, tmp_path: Path) -> None:
    """Other weights of the same shapes find nothing; the same weights in another place do."""
    setting = connector(disk=tmp_path / "cache")
    first = start("llama", setting)
    first.generate(TOKENS)
    first.close()
    other = start("llama", setting, seed=1)
    assert other.generate(TOKENS).external == 0
    other.close()
    copied = shutil.copytree(engines.model("llama", FAMILIES["llama"]), tmp_path / "downloaded again")
    engines._models["llama-copied"] = copied
    again = start("llama", setting, seed="copied")
    assert again.generate(TOKENS).external == stored(again)


@pytest.mark.slow
def test_salts_never_meet(start: Start, tmp_path: Path) -> None:
    """Of two tenants of one server, and after a restart."""
    setting = connector(disk=tmp_path / "cache")
    engine = start("llama", setting)
    engine.generate(TOKENS, salt="one")
    engine.forget()
    assert engine.generate(TOKENS, salt="two").external == 0
    engine.forget()
    assert engine.generate(TOKENS).external == 0
    engine.close()
    again = start("llama", setting)
    assert again.generate(TOKENS, salt="three").external == 0
    again.forget()
    assert again.generate(TOKENS, salt="one").external == stored(again)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_a_corrupted_directory(name: str, start: Start, tmp_path: Path) -> None:
    """Case F1: the same answer, computed; counted; and repaired by the next store."""
    setting = connector(disk=tmp_path / "cache")
    first = start(name, setting)
    cold = first.generate(TOKENS)
    first.close()
    assert flip_bytes(tmp_path / "cache") > 20
    second = start(name, setting)
    computed = second.generate(TOKENS)
    assert computed.external == 0
    assert computed.distance(cold) == 0.0
    assert second.counted("corrupt") > 0
    second.close()
    third = start(name, setting)
    assert third.generate(TOKENS).external == stored(third)


@pytest.mark.slow
def test_a_full_disk(start: Start, tmp_path: Path) -> None:
    """Case F4: 40 MiB under a limit of 256. It costs hits; all is answered, and what host memory has is found."""
    (tmp_path / "small").mkdir()
    try:
        engine = start("llama", connector("16MiB", tmp_path / "small"), mount=(tmp_path / "small", 40))
    except PermissionError:
        pytest.skip("no right to mount")
    plain = start("llama")
    for seed in range(40):
        tokens = prompt(1500, seed)
        assert engine.generate(tokens, 1).tokens == plain.generate(tokens, 1).tokens
    engine.ask("flush")
    assert engine.counted("enospc") > 0
    engine.forget()
    found = engine.generate(tokens, 1)
    assert found.external == 1408
    assert found.tokens == plain.generate(tokens, 1).tokens
    engine.ask("check")


@pytest.mark.slow
def test_the_limit_holds(start: Start, tmp_path: Path) -> None:
    """64 MiB of disk and 8 of host memory while 60 are written: never more, and the newest are found."""
    cache = tmp_path / "cache"
    engine = start("llama", connector("8MiB", cache, "64MiB"))
    for seed in range(40):
        engine.generate(prompt(1500, seed), 1)
        held = sum(path.stat().st_blocks * 512 for path in cache.rglob("*") if path.is_file())
        assert held <= 64 << 20
    assert engine.ask("flush")
    engine.forget()
    assert engine.generate(prompt(1500, 39), 1).external == 1408
    engine.ask("check")


@pytest.mark.slow
def test_nothing_is_left_in_shared_memory(start: Start, engines: Engines, tmp_path: Path) -> None:
    """Case F5: after a kill and a restart, and after an orderly end."""
    before = engines.shared_memory()
    killed = start("llama", connector(disk=tmp_path / "cache"))
    killed.generate(TOKENS)
    killed.kill()
    again = start("llama", connector(disk=tmp_path / "cache"))
    again.generate(TOKENS)
    again.close()
    assert engines.shared_memory() == before
