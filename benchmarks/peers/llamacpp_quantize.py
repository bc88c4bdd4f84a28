"""llama.cpp's quantiser: one GGUF file into another.

    python benchmarks/peers/llamacpp_quantize.py FROM.gguf TO.gguf TYPE [mixture]

TYPE is a number of llama.cpp's `llama_ftype`. Every matrix gets that type, so that a table says what a format costs; or
`mixture`: what llama.cpp makes by default, with the embedding in Q8_0.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    import llama_cpp

    source, target, kind, *mixture = sys.argv[1:]
    asked = llama_cpp.llama_model_quantize_default_params()
    asked.ftype, asked.pure, asked.nthread = int(kind), not mixture, os.cpu_count() or 1
    if mixture:
        asked.token_embedding_type = 8  # GGML_TYPE_Q8_0, which the package does not name
    if llama_cpp.llama_model_quantize(source.encode(), target.encode(), asked):
        raise SystemExit(f"llama.cpp does not quantise {source}")


if __name__ == "__main__":
    main()
