"""An engine of vLLM's in a process of its own, for `benchmarks.vllm_plugin` and `benchmarks.lossless`: reads commands,
answers with seconds.

    python benchmarks/peers/vllm_engine.py MODEL DTYPE [DIRECTORY | SETTINGS]

With DIRECTORY the engine has StowageConnector, with that disk cache; with SETTINGS, a JSON object, with those. Commands
are JSON lines on stdin: {"do": "first_token", "prompt": [...]}, {"do": "batch", "prompts": [...], "tokens": 32},
{"do": "forget", "host": true}, {"do": "stats"}.
Of what is computed it tells also what the plugin took: seconds that the engine's thread was in its methods, and seconds
of processor time of all threads that Python knows besides.
Runs in the peers' environment, with Stowage's sources on its path.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOST = "2GiB"
DISK = "4GiB"


def start(model: str, dtype: str, plugin: dict[str, Any] | None, **more: Any) -> Any:
    """An engine in this process; ``plugin``: the settings of StowageConnector, which it has then."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM

    if plugin is not None:
        more["kv_transfer_config"] = {
            "kv_connector": "StowageConnector",
            "kv_connector_module_path": "stowage.plugins.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": plugin,
        }
    return LLM(model=model, dtype=dtype, enforce_eager=True, skip_tokenizer_init=True, **more)


class Watch:
    """What the plugin takes of the engine's thread, which is the one that made this, and of other threads."""

    def __init__(self) -> None:
        self._inside = False
        self._seconds = 0.0
        self._own = threading.get_ident()

    def wrap(self, connector: type) -> None:
        """Measure every method of ``connector``."""
        for name, method in list(vars(connector).items()):
            if callable(method) and not name.startswith("__") and not isinstance(method, type):
                setattr(connector, name, self._timed(method))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside or threading.get_ident() != self._own:
                return method(*args, **kwargs)
            self._inside, began_s = True, time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self._inside = False
                self._seconds += time.perf_counter() - began_s

        return timed

    def read(self) -> tuple[float, float]:
        """Seconds inside the plugin, and processor seconds of the other threads, since the start."""
        ticks = 0
        for thread in threading.enumerate():
            if thread.ident != self._own:
                fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return self._seconds, ticks / os.sysconf("SC_CLK_TCK")


def generate(llm: Any, watch: Watch, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    inside_s, threads_s = watch.read()
    began_s = time.perf_counter()
    done = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - began_s
    cached = [one.num_cached_tokens for one in done]
    inside_after_s, threads_after_s = watch.read()
    return {
        "seconds": seconds,
        "inside_s": inside_after_s - inside_s,
        "threads_s": threads_after_s - threads_s,
        "cached": cached,
        "tokens": [list(one.outputs[0].token_ids) for one in done],
    }


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


def stats(llm: Any) -> dict[str, int]:
    """The counters of the plugin's tiers."""
    side = llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler
    return {name: value for name, value in side._store.stats().items() if isinstance(value, int)}


def plugin_settings(given: str) -> dict[str, Any]:
    """Of a directory, or as they are."""
    found: dict[str, Any] = json.loads(given) if given.startswith("{") else {"disk": f"{given}:{DISK}"}
    return {"host_memory": HOST, **found}


def main() -> None:
    model, dtype, *rest = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed goes to stderr: the answers have the pipe for themselves
    llm = start(
        model,
        dtype,
        plugin_settings(rest[0]) if rest else None,
        enable_prefix_caching=True,
        max_model_len=4096,
        max_num_seqs=8,
        max_num_batched_tokens=4096,
        kv_cache_memory_bytes=1 << 30,
    )
    watch = Watch()
    if rest:
        from stowage.plugins.vllm import StowageConnector

        watch.wrap(StowageConnector)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "first_token":
            answer = generate(llm, watch, [command["prompt"]], 1)
        elif command["do"] == "batch":
            answer = generate(llm, watch, command["prompts"], command["tokens"])
        elif command["do"] == "stats":
            answer = stats(llm)
        else:
            answer = forget(llm, command["host"])
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
