"""An engine whose weights lie where rules say, in a process of its own, for `benchmarks.placement`.

    python benchmarks/peers/placed_engine.py MODEL DTYPE RULES DEVICE_MEMORY_BYTES HOST_BYTES

RULES as `--weights` takes them; a device memory of 0 sets no limit. Commands are JSON lines on stdin,
{"prompts": [[...], ...], "tokens": 16}: prompts that come at once, and how long each answer is; "temperature" draws
tokens (a mixture with random weights would repeat itself, and choose the same experts). Answers: seconds to the first
token of each prompt; seconds that all tokens after the first took, from the last prompt's first token to the end of
all; and the statistics of weights for that time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
SEQUENCES_MAX, STEP_TOKENS = 8, 1024


class Round:
    """The requests of one command."""

    def __init__(
        self, engine: Any, prompts: list[list[int]], tokens: int, temperature: float = 0.0, logprobs: int = 0
    ) -> None:
        from stowage import SamplingParams

        self._engine, self._waits = engine, len(prompts)
        self._began_s = time.perf_counter()
        self._first_s = self._last_s = 0.0
        self._before: dict[str, float] = {}
        params = [
            SamplingParams(tokens, temperature=temperature, seed=at, ignore_eos=True, logprobs=logprobs)
            for at in range(len(prompts))
        ]
        requests = [engine.submit(prompt, one, self._heard) for prompt, one in zip(prompts, params, strict=True)]
        for request in requests:
            request.wait()
        self._done = [request.result() for request in requests]

    def _heard(self, delta: Any) -> None:
        """On the engine's thread: the first piece of each request, and the last of all."""
        now_s = time.perf_counter()
        self._last_s = now_s
        if delta.token_ids and self._waits:
            self._waits -= 1
            if not self._waits:
                self._first_s, self._before = now_s, self._stats()

    def _stats(self) -> dict[str, float]:
        return self._engine.weights.stats() if self._engine.weights is not None else {}

    @property
    def tokens(self) -> list[list[int]]:
        """What each was answered."""
        return [list(one.token_ids) for one in self._done]

    @property
    def logprobs(self) -> list[list[float]]:
        """Of these tokens, where they were asked for."""
        return [[token.logprob for token in one.logprobs or []] for one in self._done]

    def answer(self) -> dict[str, Any]:
        after = self._stats()
        return {
            "ttft_s": [one.ttft_s for one in self._done],
            "decode_s": self._last_s - self._first_s,
            "weights": {name: after[name] - self._before[name] for name in self._before},
        }


def main() -> None:
    model, dtype, rules, device, host = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed goes to stderr: the answers have the pipe for themselves
    from stowage import openmp

    openmp.wait_briefly()  # as `stowage run` and `stowage serve`
    from transformers.utils import logging

    from stowage import Engine, Memory

    logging.disable_progress_bar()
    memory = Memory(
        kv_cache_memory="128MiB",
        host_memory=int(host),
        device_memory=int(device),
        weights=rules,
        max_num_seqs=SEQUENCES_MAX,
        max_num_batched_tokens=STEP_TOKENS,
    )
    with Engine(model, memory, dtype=dtype) as engine:
        said = {"weights": engine.weights.stats() if engine.weights is not None else {}}
        print(json.dumps(said), file=answers, flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            print(
                json.dumps(
                    Round(engine, command["prompts"], command["tokens"], command.get("temperature", 0.0)).answer()
                ),
                file=answers,
                flush=True,
            )


if __name__ == "__main__":
    main()
