"""The tokenizer of tiny checkpoints: bytes, and enough further entries to fill any vocabulary."""

from __future__ import annotations

from typing import Any

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<user>", "<assistant>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<user>' if message['role'] != 'assistant' else '<assistant>' }}{{ message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer(vocab: int) -> Any:
    """A byte-level tokenizer with exactly ``vocab`` entries, every one of which decodes to some text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = [*SPECIAL_TOKENS, *alphabet]
    letters = [c for c in alphabet if c.isascii() and c.isalpha()]
    pairs = (a + b for a in letters for b in letters)
    triples = (a + b + c for a in letters for b in letters for c in letters)
    quadruples = (a + b + c + d for a in letters for b in letters for c in letters for d in letters)
    for source in (pairs, triples, quadruples):
        while len(entries) < vocab and (entry := next(source, None)) is not None:
            entries.append(entry)
    backend = Tokenizer(models.BPE(vocab={entry: i for i, entry in enumerate(entries)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>",
        additional_special_tokens=["<user>", "<assistant>"],
    )  # fmt: skip
    fast.chat_template = CHAT_TEMPLATE
    return fast
