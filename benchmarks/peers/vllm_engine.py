"""An engine of vLLM's in a process of its own, for `benchmarks.vllm_plugin`: reads commands, answers with seconds.

    python benchmarks/peers/vllm_engine.py MODEL DTYPE [DIRECTORY]

With DIRECTORY the engine has StowageConnector, with that disk cache. Commands are JSON lines on stdin:
{"do": "first_token", "prompt": [...]}, {"do": "batch", "prompts": [...], "tokens": 32}, {"do": "forget", "host": true}.
Runs in the peers' environment, with Stowage's sources on its path.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

HOST = "2GiB"
DISK = "4GiB"


def start(model: str, dtype: str, directory: str | None) -> Any:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM

    extra: dict[str, Any] = {}
    if directory is not None:
        extra["kv_transfer_config"] = {
            "kv_connector": "StowageConnector",
            "kv_connector_module_path": "stowage.integrations.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"host": HOST, "disk": f"{directory}:{DISK}"},
        }
    return LLM(
        model=model,
        dtype=dtype,
        enforce_eager=True,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        max_model_len=4096,
        max_num_seqs=8,
        max_num_batched_tokens=4096,
        kv_cache_memory_bytes=1 << 30,
        **extra,
    )


def generate(llm: Any, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    began_s = time.perf_counter()
    done = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - began_s
    cached = [one.num_cached_tokens for one in done]
    return {"seconds": seconds, "cached": cached, "tokens": [list(one.outputs[0].token_ids) for one in done]}


def forget(llm: Any, host: bool) -> dict[str, Any]:
    """Empty the device's prefix cache, and the host arena when asked for, once all is on disk."""
    llm.reset_prefix_cache()
    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    if connector is not None:
        side = connector._scheduler
        with side._background.turn:
            assert side._store.flush(60.0)
            if host:
                side._store.drop_host()
    return {}


def main() -> None:
    model, dtype, *rest = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed goes to stderr: the answers have the pipe for themselves
    llm = start(model, dtype, rest[0] if rest else None)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "first_token":
            answer = generate(llm, [command["prompt"]], 1)
        elif command["do"] == "batch":
            answer = generate(llm, command["prompts"], command["tokens"])
        else:
            answer = forget(llm, command["host"])
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
