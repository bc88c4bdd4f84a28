"""Offloading changes no bit of a real model's answers, with default settings: SmolLM2-135M-Instruct on real prompts.

The prompts are parts of this project's own pages and of Python's documentation, asked as questions. Each is answered
without tiers first; then from the device, from host memory, from disk after a restart, beside all others, and
preempted. Tiny random models hide what rounding does to a real one, so this is the judge of the promise. ``make real``
makes the model and runs it; ``make real PROMPTS=64`` asks more. The model's own type is bfloat16, of which most is
asked; float32 is slower, and float16, for which there are no kernels, much. ``make real DEVICE=cuda`` asks a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import decimal
import difflib
import inspect
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stowage import Engine, Memory, SamplingParams
from stowage.executor.determinism.pieces import TILE_PIECE_TOKENS
from tests.answers import bits

ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".real-model" / "SmolLM2-135M-Instruct"
PROMPTS = int(os.environ.get("REAL_PROMPTS") or 32)
DEVICE = os.environ.get("REAL_DEVICE") or "cpu"
SHARES = {"bfloat16": 1, "float32": 4, "float16": 8}
"""Of the prompts, one of so many is asked in each type: of each group the one in its middle, as the first prompt is so
short that nothing of it is worth reusing."""
NEW_TOKENS = 16
CONTEXT_TOKENS = 1024
"""Of the longest prompt, so that one run takes a minute."""
POOL = "256MiB"
BLOCK = 16 if DEVICE == "cpu" else TILE_PIECE_TOKENS
TOKEN_BYTES = 2 * 30 * 3 * 64 * 2
"""Keys and values of 30 layers of 3 heads of 64 numbers."""

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not (MODEL / "config.json").exists(), reason="there is no real model here: make real-model"),
]


def pages() -> str:
    """This project's documentation, and Python's."""
    ours = [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))]
    members = [
        member for module in (argparse, asyncio, decimal, difflib, statistics) for member in vars(module).values()
    ]
    theirs = [inspect.getdoc(member) or "" for member in members if callable(member)]
    return "\n\n".join([*ours, *theirs])


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Tokens of prompts of 20 to some 1,000 tokens. Every fourth goes on from the one before."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    text, made, asked = pages(), [], ""
    for number in range(PROMPTS):
        begin = number * (len(text) - 5000) // PROMPTS
        length = 40 + number * 3200 // PROMPTS
        part = text[begin : begin + length]
        if number % 4 == 3:
            part = asked + "\n\n" + part[: length // 4]
        asked = part
        messages = [{"role": "user", "content": f"What does this say?\n\n{part}"}]
        tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        made.append(list(tokens)[:CONTEXT_TOKENS])
    return made


def engine(memory: Memory, dtype: str = "auto") -> Engine:
    made = Engine(MODEL, memory, dtype=dtype, device=DEVICE)
    assert made.exact
    return made


def answers(
    of: Engine, prompts: Sequence[list[int]], *, together: bool = False, new_tokens: int = NEW_TOKENS
) -> list[Any]:
    params = SamplingParams(temperature=0, max_new_tokens=new_tokens, logprobs=3, ignore_eos=True)
    if together:
        return bits(of.generate(list(prompts), params))
    return [one for prompt in prompts for one in bits(of.generate([prompt], params))]


def computed_whole(prompts: Sequence[list[int]], dtype: str) -> list[Any]:
    """Without tiers, and with nothing to find on the device: each prompt is computed whole, alone."""
    found = []
    with engine(Memory(kv_cache_memory=POOL), dtype) as plain:
        for number, prompt in enumerate(prompts):
            params = SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS, logprobs=3, ignore_eos=True)
            asked = plain.submit(prompt, params, salt=f"{number}")
            assert asked.wait(600)
            found += bits([asked.result()])
    return found


@pytest.mark.parametrize("dtype", list(SHARES))
def test_nothing_differs_from_any_tier(dtype: str, prompts: list[list[int]], tmp_path: Path) -> None:
    share = SHARES[dtype]
    some = prompts[share // 2 :: share]
    expected = computed_whole(some, dtype)
    tiered = Memory(kv_cache_memory=POOL, host_memory="512MiB", disk=f"{tmp_path / 'kv'}:2GiB")
    with engine(tiered, dtype) as first:
        assert answers(first, some) == expected, "while it is stored"
        assert answers(first, some) == expected, "from device and host memory"
        assert first.stats()["engine"]["tokens_reused"] > 0
        first.flush()
    with engine(tiered, dtype) as second:
        second.forget_costs()
        assert answers(second, some) == expected, "from disk, after a restart"
        assert second.stats()["store"]["hits.disk"] > 0
        assert answers(second, some, together=True) == expected, "as one batch"


def test_recorded_prompts_have_the_bits_of_the_model_s_own_code(prompts: list[list[int]]) -> None:
    found = []
    for recording in (True, False):
        with engine(Memory(kv_cache_memory=POOL, max_num_batched_tokens=150)) as asked:
            recorded = getattr(asked.parts.runner, "prompts", None)
            if recorded is None:
                pytest.skip("prompts are not recorded on this device")
            if not recording:
                recorded.close()
            found.append(answers(asked, prompts[len(prompts) // 6 :: len(prompts) // 6], new_tokens=2))
            assert (recorded.counters.replayed_steps > 4) == recording
    assert found[0] == found[1]


def test_nothing_differs_when_sequences_are_preempted(prompts: list[list[int]]) -> None:
    """All prompts fit into the pool with the first tokens of their answers, and cannot grow to their ends together.

    Their ends are asked, which share no prefix: what is reused would leave room.
    """
    some, new_tokens = [prompt[-(190 + 3 * number) :] for number, prompt in enumerate(prompts[4:12])], 64
    with engine(Memory(kv_cache_memory=POOL)) as roomy:
        expected = [answers(roomy, [prompt], new_tokens=new_tokens)[0] for prompt in some]
    blocks = sum(len(prompt) // BLOCK + 1 for prompt in some) + len(some) * new_tokens // BLOCK // 2
    small = Memory(
        kv_cache_memory=blocks * BLOCK * TOKEN_BYTES, host_memory="256MiB", max_num_seqs=len(some), block_size=BLOCK
    )
    with engine(small) as crowded:
        assert answers(crowded, some, together=True, new_tokens=new_tokens) == expected
        assert crowded.stats()["engine"]["preemptions"] > 0
