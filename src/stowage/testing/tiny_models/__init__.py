"""Tiny random checkpoints, one for each family: what tests, ``stowage tiny`` and users' own trials run on.

Owns the sizes and the tokenizer of such checkpoints. Every checkpoint is a complete Hugging Face directory (config,
safetensors, tokenizer with a chat template), so it is loaded exactly as a real one is. Weights are drawn wide
(``initializer_range=0.2``), so that the greedy tokens of the untrained model vary and flip at the slightest corruption
of its KV cache.

Never reaches for a network; the same arguments give the same bytes.
"""

from stowage.testing.tiny_models.checkpoint import build, config, vary, write
from stowage.testing.tiny_models.family import VOCAB_LEAST, Family, TinySize
from stowage.testing.tiny_models.table import ALONE, FAMILIES, HYBRIDS, KINDS, OUTER, REFUSED, TABLE
from stowage.testing.tiny_models.vocabulary import CHAT_TEMPLATE, SPECIAL_TOKENS, tokenizer

__all__ = [
    "ALONE",
    "CHAT_TEMPLATE",
    "FAMILIES",
    "HYBRIDS",
    "KINDS",
    "OUTER",
    "REFUSED",
    "SPECIAL_TOKENS",
    "TABLE",
    "VOCAB_LEAST",
    "Family",
    "TinySize",
    "build",
    "config",
    "tokenizer",
    "vary",
    "write",
]
