"""A Transformers model on a GPU whose weights lie somewhere, in a process of its own, for `benchmarks.cuda_weights`.

    python benchmarks/peers/cuda_weights_engine.py WAY MODEL DTYPE DEVICE_MEMORY

Commands are JSON lines on stdin: {"batch": 1, "prompt_tokens": 128, "new_tokens": 16}; answers are seconds of the
prompt and of each step, the tokens, and bytes that crossed over for the steps. Ways: resident, prefetch, mapped,
experts (ours: Stowage's sources must be on the path), accelerate (`cpu_offload`), link (no model: each command answers
with the rate of plain copies from pinned memory).
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

LINK_BYTES, LINK_TIMES = 256 << 20, 8


def load(way: str, path: str, dtype: str, device_memory: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    kind = getattr(torch, dtype)
    if way == "resident":
        return AutoModelForCausalLM.from_pretrained(path, dtype=kind).eval().to("cuda")
    if way == "accelerate":
        from accelerate import cpu_offload

        model = AutoModelForCausalLM.from_pretrained(path, dtype=kind).eval()
        return cpu_offload(model, execution_device=torch.device("cuda", 0))
    import stowage

    ours: dict[str, Any] = {"host_memory": "90%", "device": "cuda", "dtype": dtype}
    if way == "experts":
        return stowage.offload(path, device_memory=device_memory, **ours)
    rules = f"lm_head={way},model.layers.*={way},*=resident"
    return stowage.offload(path, weights=rules, **ours)


def link() -> dict[str, Any]:
    """Bytes per second of copies from memory that is pinned as our weights are."""
    import torch

    from stowage.transfer.pinning import pin
    from stowage.weights.host_buffers import HostBuffers

    device, buffers = torch.device("cuda", 0), HostBuffers()
    here = buffers.keep(torch.ones(LINK_BYTES, dtype=torch.uint8))
    there = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
    buffers.pin(lambda memory: pin(memory, device))
    there.copy_(here, non_blocking=True)
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    for _ in range(LINK_TIMES):
        there.copy_(here, non_blocking=True)
    torch.cuda.synchronize()
    rate = LINK_BYTES * LINK_TIMES / (time.perf_counter() - began_s)
    pinned = buffers.whole
    buffers.close()
    return {"bytes_per_s": rate, "pinned": pinned}


def run(model: Any, batch: int, prompt_tokens: int, new_tokens: int) -> dict[str, Any]:
    """Greedy decoding, one forward at a time, each waited for."""
    import torch
    from transformers import DynamicCache

    generator = torch.Generator().manual_seed(batch)
    ids = torch.randint(5, model.config.vocab_size, (batch, prompt_tokens), generator=generator).to("cuda")
    ours = getattr(model, "stowage", None)
    cache, seconds, tokens, before = DynamicCache(config=model.config), [], [], 0.0
    for step in range(1 + new_tokens):
        began_s = time.perf_counter()
        with torch.inference_mode():
            out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ids = out.logits[:, -1:].argmax(-1).to("cuda")
        tokens.append(ids[:, 0].tolist())  # waits for the device
        seconds.append(time.perf_counter() - began_s)
        before = before if step or ours is None else ours.stats()["read_bytes"]
    stats = ours.stats() if ours is not None else {}
    crossed = (stats["read_bytes"] - before) / new_tokens if ours is not None else 0.0
    return {
        "prefill_s": seconds[0],
        "steps_s": seconds[1:],
        "tokens": tokens,
        "step_bytes": crossed,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "hits": stats.get("expert_hits", 0),
        "misses": stats.get("expert_misses", 0),
    }


def main() -> None:
    way, path, dtype, device_memory = sys.argv[1:5]
    began_s = time.perf_counter()
    model = load(way, path, dtype, device_memory) if way != "link" else None
    print(json.dumps({"loaded_s": time.perf_counter() - began_s}), flush=True)
    for line in sys.stdin:
        print(json.dumps(link() if model is None else run(model, **json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
