"""What pages are named by: which engines share a directory, and which must not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang.srt.mem_cache.hicache_storage", reason="make sglang installs it")

from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

from tests.sglang.backends import Make, hashes, indices
from tests.sglang.pools import Pool


@pytest.mark.parametrize(
    ("other", "shared"),
    [
        ({}, True),
        ({"model_name": "org/other"}, False),
        ({"tp_size": 2}, False),
        ({"tp_rank": 1, "tp_size": 2}, False),
        ({"pp_size": 2}, False),
        ({"is_page_first_layout": True}, False),
        ({"pool": Pool(dtype=torch.float16)}, False),
        ({"pool": Pool(width=48)}, False),
    ],
    ids=str,
)
def test_who_shares_a_directory(other: dict[str, Any], shared: bool, make: Make) -> None:
    """Engines whose pages mean the same, and no others."""
    first, keys = make(), hashes(3)
    assert all(first.batch_set_v1(keys, indices(3)))
    first.close()
    assert make(**other).batch_exists(keys) == (3 if shared else 0)


def test_models_in_files_are_told_apart_by_what_these_hold(make: Make, tmp_path: Path) -> None:
    """All files that one is split over, whichever is given."""
    paths = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for path in paths:
        path.write_bytes(b"of the first model")
    first, keys = make(model_name=str(paths[0])), hashes(3)
    assert all(first.batch_set_v1(keys, indices(3)))
    first.close()
    assert make(model_name=str(paths[0])).batch_exists(keys) == 3
    paths[1].write_bytes(b"of another model")
    assert make(model_name=str(paths[0])).batch_exists(keys) == 0


def test_a_repository_that_moved_on_is_another_model(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is the same; what was downloaded of it is not. Copies of a config alone say nothing."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    home, keys = tmp_path / "hub" / "models--org--model", hashes(3)
    (home / "refs").mkdir(parents=True)

    def downloads(revision: str, files: dict[str, bytes]) -> None:
        (home / "refs" / "main").write_text(revision)
        (home / "snapshots" / revision).mkdir(parents=True)
        for name, content in files.items():
            (home / "snapshots" / revision / name).write_bytes(content)

    first = make()
    assert all(first.batch_set_v1(keys, indices(3)))
    first.close()
    downloads("a" * 40, {"config.json": b"{}"})
    assert make().batch_exists(keys) == 3
    downloads("b" * 40, {"config.json": b"{}", "model.safetensors": b"first"})
    assert make().batch_exists(keys) == 0


def test_a_latent_is_stored_once_for_all_ranks(make: Make) -> None:
    """MLA's pages are alike on every rank; its states are not."""
    ranks = [make(is_mla_model=True, tp_rank=rank, tp_size=2, pools={"mamba": Pool(page=1)}) for rank in (0, 1)]
    keys = hashes(4)
    state = PoolTransfer(PoolName.MAMBA, torch.tensor([3]), keys=keys[-1:])
    assert all(ranks[0].batch_set_v1(keys, indices(4))) and all(*ranks[0].batch_set_v2([state]).values())
    until_s = time.monotonic() + 60
    while ranks[1].batch_exists(keys) < 4:  # other processes' pages are seen within a second
        assert time.monotonic() < until_s
        time.sleep(0.05)
    assert ranks[1].batch_get_v2([state]) == {PoolName.MAMBA: [False]}
    written = ranks[0].stats()["disk.chunks"]
    assert all(ranks[1].batch_set_v1(keys, indices(4)))
    assert ranks[0].stats()["disk.chunks"] == written == 5
