"""Stowage's engine whose weights lie somewhere, in a process of its own, for `benchmarks.weights` and
`benchmarks.published_moe`.

    python benchmarks/peers/engine_weights.py WAY MODEL DTYPE SCRATCH

Commands and answers are those of `weights_engine.py`; with "text", the answer to its first tokens is drawn, and its
log-probabilities are told. Ways: engine-mapped, engine-stream, engine-half, engine-memory, engine-within:BYTES (the
engine's own choice in so much device memory); engine-int8-... for activations in 8 bits.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from placed_engine import Round
from weights_engine import drop_page_cache, status

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

RULES = {
    "engine-memory": ("auto", "0"),
    "engine-mapped": ("*=mapped", "100%"),
    "engine-stream": ("lm_head=stream,model.layers.*=stream", "0"),
    "engine-half": ("last 1 of 2=stream", "0"),
    "engine-within": ("auto", "0"),
}


def run(
    engine: Any, batch: int, prompt_tokens: int, new_tokens: int, cold: bool, text: list[int] | None = None
) -> dict[str, Any]:
    """Greedy decoding of prompts that come at once. Cold: nothing is in the page cache when the prompts come."""
    import torch

    generator = torch.Generator().manual_seed(batch)
    ids = torch.randint(5, engine.model.config.vocab_size, (batch, prompt_tokens), generator=generator).tolist()
    ids = ids if text is None else [text[:prompt_tokens]]
    engine.drop_device_cache()
    engine.drop_host()
    if cold:
        drop_page_cache()
    Path("/proc/self/clear_refs").write_text("5\n", encoding="ascii")
    done = Round(engine, ids, 1 + new_tokens, *((1.0, 1) if text else ()))
    taken = done.answer()
    return {
        "prefill_s": max(taken["ttft_s"]),
        "steps_s": [taken["decode_s"] / new_tokens],
        "tokens": list(zip(*done.tokens, strict=True)),
        "stats": engine.weights.stats() if engine.weights is not None else {},
        "decoded": taken["weights"],
        "logprobs": done.logprobs[0],
        "peak": status("VmHWM"),
        "own": status("RssAnon"),
    }


def main() -> None:
    way, path, dtype = sys.argv[1:4]
    plain, _, device = way.replace("int8-", "").partition(":")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed goes to stderr: the answers have the pipe for themselves
    began_s = time.perf_counter()
    from stowage import openmp

    openmp.wait_briefly()  # as `stowage run` and `stowage serve`
    from stowage import Engine, Memory

    rules, host = RULES[plain]
    own = {"device_memory": int(device)} if device else {}
    memory = Memory(kv_cache_memory="128MiB", host_memory=host, weights=rules, max_num_seqs=8, **own)
    with Engine(path, memory, dtype=dtype, int8_activations="int8" in way) as engine:
        print(json.dumps({"loaded_s": time.perf_counter() - began_s}), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(run(engine, **json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
