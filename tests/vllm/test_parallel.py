"""Real engines at tensor-parallel size 2, each rank a process of vLLM's, and what they leave for one at size 1."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import driver
from tests.vllm.child import Run
from tests.vllm.models import FAMILIES, Family, write
from tests.vllm.oracle import USUAL, connector, prompt

FAMILY = {"heads": FAMILIES["llama"], "mla": replace(FAMILIES["deepseek_v3"], dtype="float32")}
COPIES = {"heads": 1, "mla": 2}
"""Of each byte, that the two ranks hold."""
ROUNDING = 1e-3
"""Sums are rounded otherwise with another number of ranks. A wrong byte changes log-probabilities by more than 0.1."""


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILY)
def test_chunks_of_two_ranks_come_back_to_two_and_to_one(name: str, run: Run, tmp_path: Path) -> None:
    """At the same size with vLLM's own log-probabilities to the bit, stored once; at another with the same bytes."""
    write(FAMILY[name], tmp_path / "model")
    run(at_two, name)
    run(at_one, name)


class _Engine:
    def __init__(self, directory: Path, family: Family, ranks: int) -> None:
        from vllm import LLM

        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        for name in ("patient", "keep_prefix_caching"):
            driver.PREPARATIONS[name]()
        transfer = connector(disk=directory / "disk", chunk_blocks=1, any_parallel_size=True)
        told = {**USUAL, "dtype": family.dtype, **family.options, "kv_transfer_config": transfer}
        self.llm = LLM(str(directory / "model"), **told, tensor_parallel_size=ranks)
        self.side = self.llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler

    def ask(self, salt: str | None = None) -> tuple[int, list[dict[int, float]]]:
        """How many tokens of the prompt were not computed, and the log-probabilities of what followed."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        asked = TokensPrompt(prompt_token_ids=prompt(700))
        if salt is not None:
            asked["cache_salt"] = salt
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=4, detokenize=False)
        (told,) = self.llm.generate([asked], params, use_tqdm=False)
        rows = [{token: value.logprob for token, value in row.items()} for row in told.outputs[0].logprobs]
        return told.num_cached_tokens, rows

    def forget(self) -> None:
        assert self.llm.reset_prefix_cache()
        assert min(self.llm.collective_rpc(_scribble)) > 1 << 20, "every rank's"

    def close(self) -> None:
        assert self.side._store.flush(60.0)
        self.llm.llm_engine.engine_core.shutdown()


def _scribble(worker: Any) -> int:
    """In a worker: overwrite its KV cache; how many bytes."""
    import torch

    storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage() for cache in worker.model_runner.kv_caches}
    for storage in storages.values():
        torch.empty(0, dtype=torch.uint8).set_(storage).random_(*driver.GARBAGE)
    return sum(storage.nbytes() for storage in storages.values())


def at_two(directory: Path, name: str) -> None:
    engine = _Engine(directory, FAMILY[name], 2)
    assert engine.ask()[0] == 0
    local, own_hit = engine.ask()
    engine.forget()
    external, loaded = engine.ask()
    assert external == local > 600
    assert loaded == own_hit, "the numbers are others"
    counts = engine.side.counts
    assert counts["tokens_loaded"] == local and counts["faults"] == counts["stores_failed"] == 0
    (group,) = engine.side._groups
    assert counts["loaded_bytes"] == COPIES[name] * local // group.block_tokens * group.bytes_per_block
    assert counts["stored_bytes"] % group.bytes_per_block == 0, "each block once"
    engine.close()


def at_one(directory: Path, name: str) -> None:
    engine = _Engine(directory, FAMILY[name], 1)
    found, loaded = engine.ask()
    assert found > 600 and engine.side.stats()["hits.disk"] > 0
    cold, computed = engine.ask(salt="by itself")
    assert cold == 0
    for one, other in zip(loaded, computed, strict=True):
        assert one.keys() == other.keys()
        assert max(abs(one[token] - other[token]) for token in one) < ROUNDING
    engine.close()
