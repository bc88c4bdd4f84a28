"""``PrefixCache(exact=True)`` on a real model in bfloat16: turns of a chat give the bits of a run without a store."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import stowage
from tests.real_model.test_exact import MODEL, pages

CHATS, TURNS = 2, 2

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not (MODEL / "config.json").exists(), reason="there is no real model here: make real-model"),
]


def answered(model: torch.nn.Module, ids: torch.Tensor, cache: object) -> tuple[torch.Tensor, torch.Tensor]:
    """All tokens, and the scores of the new ones."""
    out = model.generate(  # type: ignore[operator]
        ids,
        past_key_values=cache,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=12,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    return out.sequences, torch.stack(out.scores)


def test_chats(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL).eval()
    tokenizer, text = AutoTokenizer.from_pretrained(MODEL), pages()
    disk = f"{tmp_path / 'kv'}:1GiB"
    hits = 0
    for chat in range(CHATS):
        messages: list[dict[str, str]] = []
        for turn in range(TURNS):
            at = (chat * TURNS + turn) * 600
            messages.append({"role": "user", "content": f"What does this say?\n\n{text[at : at + 600]}"})
            made = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
            ids = made["input_ids"]
            with stowage.PrefixCache(model, "64MiB", exact=True) as nothing:
                expected, scores = answered(model, ids, nothing.prefill(ids))
            with stowage.PrefixCache(model, "256MiB", disk, exact=True) as prefixes:
                cache = prefixes.prefill(ids, timeout_s=30)
                found, same = answered(model, ids, cache)
                prefixes.keep(cache, found)
                hits += prefixes.stats()["prefixes"]["restores_hit"]
            assert torch.equal(found, expected) and torch.equal(same, scores), f"chat {chat}, turn {turn}"
            messages.append({"role": "assistant", "content": tokenizer.decode(found[0, ids.shape[1] :])})
    assert hits == CHATS * (TURNS - 1), "every turn but the first is a hit"
