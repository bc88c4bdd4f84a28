"""llama.cpp with a GGUF file that it maps into memory, in a process of its own, for `benchmarks.weights`
(`turns.py` takes `Model` too).

    python benchmarks/peers/llamacpp_engine.py WAY FILE.gguf DTYPE SCRATCH

Ways: llamacpp, and llamacpp-memory, which reads the file into memory, as its kernels like it best.
Commands and answers are those of `weights_engine.py`, and {"score": [[...], ...]}: the negative log-likelihoods of
tokens, for `benchmarks.packing`. As many threads as there are processors, and llama.cpp's own
defaults otherwise (keys and values in float16).
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from weights_engine import drop_page_cache, status

_MADV_DONTNEED = 4


def unmap(path: str) -> None:
    """Let go of the pages of a mapped file, so that they can be dropped. They are read again when they are used."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines():
        if line.endswith(path):
            begin, end = (int(address, 16) for address in line.split()[0].split("-"))
            assert libc.madvise(begin, end - begin, _MADV_DONTNEED) == 0


def read_bytes() -> int:
    """What this process has had read from disk: pages of mapped files too."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def logprob(logits: Any, token: int) -> float:
    """Of ``token``, in nats."""
    row = logits.astype(float)
    top = row.max()
    return float(row[token] - top - np.log(np.exp(row - top).sum()))


class Model:
    """The model in the file at `path`, which is mapped into memory, or (not `mapped`) read into it."""

    def __init__(self, path: str, mapped: bool = True) -> None:
        import llama_cpp

        self._api, self.path = llama_cpp, path
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        asked = llama_cpp.llama_model_default_params()
        asked.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP if mapped else llama_cpp.LLAMA_LOAD_MODE_NONE
        asked.use_extra_bufts = not mapped  # else what it has kernels for is copied into memory of its own
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), asked)
        if not self._model:
            raise SystemExit(f"llama.cpp does not load {path}")
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def context(self, batch: int, tokens: int) -> Any:
        """For ``batch`` sequences of so many tokens each."""
        asked = self._api.llama_context_default_params()
        asked.n_ctx, asked.n_seq_max = batch * (-(-tokens // 256) * 256), batch
        asked.n_batch = batch * tokens
        asked.n_threads = asked.n_threads_batch = os.cpu_count() or 1
        return self._api.llama_init_from_model(self._model, asked)

    def free(self, context: Any) -> None:
        self._api.llama_free(context)

    def forward(self, context: Any, ids: Any, begin: int) -> Any:
        """The likeliest token after `ids` [sequences, tokens], which stand at position ``begin`` of theirs."""
        return self.logits(context, ids, begin).argmax(-1)[:, None]

    def logits(self, context: Any, ids: Any, begin: int) -> Any:
        """Of the token after them, [sequences, vocabulary]."""
        sequences, tokens = ids.shape
        batch = self._api.llama_batch_init(ids.size, 0, 1)
        batch.n_tokens = ids.size
        for at in range(ids.size):
            sequence, offset = divmod(at, tokens)
            batch.token[at], batch.pos[at] = int(ids[sequence, offset]), begin + offset
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
            batch.logits[at] = offset == tokens - 1
        failed = self._api.llama_decode(context, batch)
        if failed:
            raise SystemExit(f"llama_decode says {failed}")
        rows = [self._api.llama_get_logits_ith(context, (n + 1) * tokens - 1) for n in range(sequences)]
        self._api.llama_batch_free(batch)
        return np.stack([np.ctypeslib.as_array(row, (self.vocabulary,)) for row in rows])

    def score(self, ids: list[int]) -> float:
        """The negative log-likelihood of ``ids`` from the second on, in nats."""
        context = self.context(1, len(ids))
        batch = self._api.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for at, token in enumerate(ids):
            batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.seq_id[at][0] = token, at, 1, 0
            batch.logits[at] = True
        assert self._api.llama_decode(context, batch) == 0
        total = 0.0
        for at, token in enumerate(ids[1:]):
            row = np.ctypeslib.as_array(self._api.llama_get_logits_ith(context, at), (self.vocabulary,))
            total -= logprob(row, token)
        self._api.llama_batch_free(batch)
        self.free(context)
        return total

    def run(
        self, batch: int, prompt_tokens: int, new_tokens: int, cold: bool, text: list[int] | None = None
    ) -> dict[str, Any]:
        """As `weights_engine.run`: nothing is in the page cache when a cold forward begins. With ``text`` only when the
        first one does, and the answer has the log-probabilities of its tokens after the prompt.
        """
        if text is None:
            import torch

            generator = torch.Generator().manual_seed(batch)
            ids = torch.randint(5, self.vocabulary, (batch, prompt_tokens), generator=generator).numpy()
        else:
            ids = np.array([text[:prompt_tokens]])
        context = self.context(batch, prompt_tokens + new_tokens)
        Path("/proc/self/clear_refs").write_text("5\n", encoding="ascii")
        seconds, tokens, logprobs, begin, before = [], [], [], 0, 0
        for step in range(1 + new_tokens):
            if cold and (text is None or step == 0):
                unmap(self.path)
                drop_page_cache()
            began_s = time.perf_counter()
            logits, begin = self.logits(context, ids, begin), begin + ids.shape[1]
            ids = logits.argmax(-1)[:, None]
            seconds.append(time.perf_counter() - began_s)
            tokens.append(ids[:, 0].tolist())
            before = before or read_bytes()
            if text is not None and begin < len(text):
                ids = np.array([[text[begin]]])
                logprobs.append(logprob(logits[0], text[begin]))
        self.free(context)
        found = {"prefill_s": seconds[0], "steps_s": seconds[1:], "tokens": tokens, "stats": {}}
        found |= {"decoded": {"read_bytes": read_bytes() - before}, "logprobs": logprobs}
        return {**found, "peak": status("VmHWM"), "own": status("RssAnon")}


def main() -> None:
    began_s = time.perf_counter()
    model = Model(str(Path(sys.argv[2]).resolve()), mapped=sys.argv[1] == "llamacpp")
    print(json.dumps({"loaded_s": time.perf_counter() - began_s}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = {"scores": [model.score(one) for one in asked["score"]]} if "score" in asked else model.run(**asked)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
