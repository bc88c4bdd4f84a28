"""Fills an engine of vLLM's CPU build with prompts and counts what host memory then holds, for `benchmarks.capacity`.

    python benchmarks/peers/vllm_capacity.py JSON DIRECTORY

``repeats``: so often the first prompt is asked before, which shows what the traffic is like.

vLLM's own offloading runs with the worker of `vllm_offloading`. Runs in the peers' environment, with Stowage's sources
on its path. Its last line is the answer.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.v1.request import Request

VOCAB = 512
COMMON = {
    "hidden_size": 128,
    "vocab_size": VOCAB,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "gemma3": {"model_type": "gemma3_text", "head_dim": 32, "sliding_window": 200},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "head_dim": 64,
        "sliding_window": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}


def write_model(family: str, fields: dict[str, Any], directory: Path) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{**COMMON, **FAMILIES[family], **fields})
    path = directory / f"{family}-{len(list(directory.iterdir()))}"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def transfer(told: dict[str, Any]) -> dict[str, Any]:
    if told["peer"].startswith("Stowage"):
        name, module, extra = (
            "StowageConnector",
            "stowage.plugins.vllm",
            {"host_memory": told["host"], "eviction_policy": "lru"},
        )
    else:
        spec = {"spec_name": "CopyingSpec", "spec_module_path": "vllm_offloading"}
        name, module, extra = "OffloadingConnector", None, {"cpu_bytes_to_use": told["host"], **spec}
    return {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def main() -> None:
    told = json.loads(sys.argv[1])
    more = {} if "interval" not in told else {"prefix_cache_retention_interval": told["interval"]}
    llm = LLM(
        model=str(write_model(told["family"], told["fields"], Path(sys.argv[2]))),
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        max_model_len=8192,
        max_num_seqs=1,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=96 << 20,
        kv_transfer_config=transfer(told),
        **more,
    )
    chance = random.Random(0)
    prompts = [[chance.randrange(5, VOCAB) for _ in range(told["length"])] for _ in range(told["prompts"])]
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    for tokens in [prompts[0]] * told.get("repeats", 0) + prompts:
        llm.generate(TokensPrompt(prompt_token_ids=tokens), params, use_tqdm=False)
    core = llm.llm_engine.engine_core.engine_core
    connector = core.scheduler.connector
    numbers = iter(range(1 << 30))

    def found(tokens: list[int]) -> int:
        """What the connector would offer an engine whose device holds nothing."""
        params = SamplingParams(temperature=0, max_tokens=1)
        request = Request(f"ask-{next(numbers)}", tokens, params, None, block_hasher=core.request_block_hasher)
        connector.on_new_request(request)
        count, _ = connector.get_num_new_matched_tokens(request, 0)
        connector.request_finished_all_groups(
            request, tuple([] for _ in core.scheduler.kv_cache_config.kv_cache_groups)
        )
        return count or 0

    core.scheduler.reset_prefix_cache()
    again = [found(tokens) for tokens in prompts]
    block = core.scheduler.block_size
    parted = 0.0
    for tokens, whole in zip(prompts, again, strict=True):
        if not whole and told["peer"].startswith("Stowage"):
            continue
        ends = [*range(block - 1, len(tokens), block), len(tokens)]
        places = [found(tokens[:end] + [3] * 300) for end in ends]
        widths = [ends[0], *(after - before for before, after in itertools.pairwise(ends))]
        parted += sum(at * width for at, width in zip(places, widths, strict=True)) / len(tokens)
    print(json.dumps({"again": sum(again), "parted": round(parted), "whole": sum(count > 0 for count in again)}))


if __name__ == "__main__":
    main()
