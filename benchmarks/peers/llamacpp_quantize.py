"""llama.cpp's quantiser: one GGUF file into another.

    python benchmarks/peers/llamacpp_quantize.py FROM.gguf TO.gguf TYPE

TYPE is a number of llama.cpp's `llama_ftype`. Every matrix gets that type, instead of the mixtures that llama.cpp makes
by default: so that a table says what a format costs.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    import llama_cpp

    source, target, kind = sys.argv[1:4]
    asked = llama_cpp.llama_model_quantize_default_params()
    asked.ftype, asked.pure, asked.nthread = int(kind), True, os.cpu_count() or 1
    if llama_cpp.llama_model_quantize(source.encode(), target.encode(), asked):
        raise SystemExit(f"llama.cpp does not quantise {source}")


if __name__ == "__main__":
    main()
