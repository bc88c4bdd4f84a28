"""What llama.cpp makes of a GGUF file: a program of the peers' environment, which has no torch.

    python llamacpp.py FILE LOGITS < IDS
    python llamacpp.py FILE < TEXT

The one writes what it computes of tokens, the other says which tokens a text is.
IDS: tokens, in one line. LOGITS: [tokens, vocabulary], bare float32.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import llama_cpp
import numpy as np

SAY = llama_cpp.llama_log_callback(lambda level, text, _: sys.stderr.write(text.decode()) if level >= 3 else None)


def load(path: str, vocab_only: bool = False) -> Any:
    """Raises SystemExit for a file that llama.cpp does not load."""
    llama_cpp.llama_log_set(SAY, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    asked = llama_cpp.llama_model_default_params()
    asked.vocab_only = vocab_only
    model = llama_cpp.llama_model_load_from_file(path.encode(), asked)
    if not model:
        raise SystemExit(f"llama.cpp does not load {path}")
    return model


def tokens(path: str, text: bytes) -> list[int]:
    """Those of ``text``, with what the file says that a text begins and ends with."""
    vocabulary = llama_cpp.llama_model_get_vocab(load(path, vocab_only=True))
    found = (llama_cpp.llama_token * (len(text) + 2))()
    return found[: llama_cpp.llama_tokenize(vocabulary, text, len(text), found, len(found), True, False)]


def logits(path: str, ids: list[int]) -> np.ndarray:
    """Of each of ``ids``."""
    model = load(path)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    asked = llama_cpp.llama_context_default_params()
    asked.n_ctx = asked.n_batch = asked.n_ubatch = 256
    asked.type_k = asked.type_v = llama_cpp.GGML_TYPE_F32
    asked.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama_cpp.llama_init_from_model(model, asked)
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for at, token in enumerate(ids):
        batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.seq_id[at][0] = token, at, 1, 0
        batch.logits[at] = True
    if failed := llama_cpp.llama_decode(context, batch):
        raise SystemExit(f"llama_decode says {failed}")
    rows = [llama_cpp.llama_get_logits_ith(context, at) for at in range(len(ids))]
    return np.stack([np.ctypeslib.as_array(row, (vocabulary,)) for row in rows])


if __name__ == "__main__":
    said = sys.stdin.buffer.read()
    if len(sys.argv) > 2:
        logits(sys.argv[1], [int(word) for word in said.split()]).tofile(sys.argv[2])
    else:
        print(*tokens(sys.argv[1], said))
