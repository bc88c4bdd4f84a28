"""The tokens that end an answer of a GGUF file's model: those that its fields state, and those that are known by name.

Example: in a vocabulary that has `<|im_end|>` it ends an answer, whether a field states it or not. Some converters
write such tokens as plain text or as the user's own; llama.cpp ends answers with them all the same
(``special_eog_ids``). So they count as control tokens here, whatever kind a file says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from stowage.weights.gguf import GgufFile

_ENDS: Final = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] "
    "<|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[".split()
)
"""Tokens that end a turn or a text wherever a vocabulary has them."""
_GO_ON: Final = (frozenset({"<|return|>", "<|call|>"}), frozenset({"<|calls|>", "<|flush|>"}))
"""Of gpt-oss and Solar, which end answers with these. "<|end|>" ends a message there, such as their thoughts."""


def named_ends(tokens: Sequence[str]) -> list[int]:
    """Those of ``tokens`` that end an answer by their names."""
    there = set(tokens)
    own = [names for names in _GO_ON if names <= there]
    ends = _ENDS.union(*own) - {"<|end|>"} if own else _ENDS
    return [number for number, text in enumerate(tokens) if text in ends]


def end_ids(file: GgufFile) -> list[int]:
    """Tokens that end an answer: of a text, of a turn, of a message. The first is the file's own."""
    tokens: Any = file.fields.get("tokenizer.ggml.tokens", [])
    named: list[Any] = [file.fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    known = named_ends(tokens) if isinstance(tokens, list) else []
    return list(dict.fromkeys(int(one) for one in [*named, *known] if is_token(one, len(tokens))))


def is_token(value: Any, count: int) -> bool:
    """Whether it is one of ``count`` tokens."""
    return isinstance(value, int) and 0 <= value < count
