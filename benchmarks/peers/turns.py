"""One engine in a process of its own, for `benchmarks.multi_turn`: answers all prompts of a round, given together.

    python benchmarks/peers/turns.py WAY MODEL DTYPE DEVICE_KV_BYTES HOST_BYTES

WAY: `stowage`, `stowage-device` (no tier below the device), `transformers` (one prompt after the other, no reuse),
`vllm`, `vllm-no-reuse` (prefix caching off), `vllm-stowage` (with the plugin). Commands are JSON lines on stdin,
{"prompts": [[...], ...], "tokens": 16}; an answer has for each prompt the seconds from the round's begin to its first
token, how many of its tokens were reused, and its greedy tokens. All of Stowage's ways and Transformers run in
Stowage's own environment, those of vLLM in the peers', with Stowage's sources on its path.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

SEQUENCES_MAX, CONTEXT_TOKENS = 20, 1536

Round = Callable[[list[list[int]], int], dict[str, Any]]


def stowage(model: str, dtype: str, device_bytes: int, host_bytes: int) -> Round:
    from stowage import Engine, Memory, SamplingParams

    memory = Memory(device_kv=device_bytes, host=host_bytes, sequences_max=SEQUENCES_MAX)
    engine = Engine(model, memory, dtype=dtype)

    def answer(prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
        done = engine.generate(list(prompts), params)
        return {
            "ttft_s": [one.ttft_s for one in done],
            "reused": [sum(one.reused_tokens.values()) for one in done],
            "tokens": [one.token_ids for one in done],
        }

    return answer


def transformers(model: str, dtype: str, _device_bytes: int, _host_bytes: int) -> Round:
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def answer(prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        began_s = time.perf_counter()
        found: dict[str, Any] = {"ttft_s": [], "reused": [0] * len(prompts), "tokens": []}
        for prompt in prompts:
            cache = DynamicCache(config=loaded.config)
            ids = torch.tensor([prompt])
            drawn: list[int] = []
            while len(drawn) < tokens:
                logits = loaded(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
                drawn.append(int(logits[0, -1].argmax()))
                ids = torch.tensor([drawn[-1:]])
                if len(drawn) == 1:
                    found["ttft_s"].append(time.perf_counter() - began_s)
            found["tokens"].append(drawn)
        return found

    return answer


def vllm(model: str, dtype: str, device_bytes: int, host_bytes: int, reuse: bool = True) -> Round:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM, SamplingParams

    extra: dict[str, Any] = {}
    if host_bytes:
        extra["kv_transfer_config"] = {
            "kv_connector": "StowageConnector",
            "kv_connector_module_path": "stowage.integrations.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"host": host_bytes},
        }
    engine = LLM(
        model=model,
        dtype=dtype,
        enforce_eager=True,
        enable_prefix_caching=reuse,
        skip_tokenizer_init=True,
        max_model_len=CONTEXT_TOKENS,
        max_num_seqs=SEQUENCES_MAX,
        max_num_batched_tokens=CONTEXT_TOKENS,
        kv_cache_memory_bytes=device_bytes,
        **extra,
    ).llm_engine
    asked = 0

    def answer(prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        nonlocal asked
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        began_s = time.perf_counter()
        names = [str(asked + at) for at in range(len(prompts))]
        asked += len(prompts)
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        first: dict[str, float] = {}
        done: dict[str, Any] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.outputs and output.outputs[0].token_ids:
                    first.setdefault(output.request_id, time.perf_counter() - began_s)
                done[output.request_id] = output
        return {
            "ttft_s": [first[name] for name in names],
            "reused": [done[name].num_cached_tokens for name in names],
            "tokens": [list(done[name].outputs[0].token_ids) for name in names],
        }

    return answer


def main() -> None:
    way, model, dtype, device, host = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed goes to stderr: the answers have the pipe for themselves
    sizes = (int(device), int(host))
    ways: dict[str, Callable[[], Round]] = {
        "stowage": lambda: stowage(model, dtype, *sizes),
        "stowage-device": lambda: stowage(model, dtype, sizes[0], 0),
        "transformers": lambda: transformers(model, dtype, *sizes),
        "vllm": lambda: vllm(model, dtype, sizes[0], 0),
        "vllm-no-reuse": lambda: vllm(model, dtype, sizes[0], 0, reuse=False),
        "vllm-stowage": lambda: vllm(model, dtype, *sizes),
    }
    answer = ways[way]()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(answer(command["prompts"], command["tokens"])), file=answers, flush=True)


if __name__ == "__main__":
    main()
