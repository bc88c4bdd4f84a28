"""The bytes and the text of single tokens. A token's bytes need not be whole characters.

Answers with log-probabilities list tokens one by one, where decoding would need their neighbours.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from stowage.engine.detokenizer import special_tokens

_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_MARK: Final = "\u2581"


class Vocabulary:
    """The tokens of one tokenizer; None: the model has none. Thread-safe: its cache is only added to."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = special_tokens(tokenizer) if tokenizer is not None else frozenset()
        self._decoders = _decoders(tokenizer)
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token: int) -> bytes:
        """The token's bytes; of a special token, its name."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._find(token)
        return found

    def text_of(self, token: int) -> str:
        """The token's text, or `bytes:\\xe2\\x80` where it is not text by itself."""
        raw = self.bytes_of(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def count(self, text: str) -> int:
        """Number of tokens of a text."""
        if self._tokenizer is None or not text:
            return 0
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def shown(self, token: int, *, special: bool = False) -> bytes:
        """The bytes that the token adds to a text, which has `special` tokens or leaves them out."""
        left_out = self._tokenizer is None or (token in self._special and not special)
        return b"" if left_out else self.bytes_of(token)

    def _find(self, token: int) -> bytes:
        piece = self._tokenizer.convert_ids_to_tokens(token) if self._tokenizer is not None else None
        if piece is None:
            return f"token_id:{token}".encode()
        if token in self._special:
            return str(piece).encode()
        if "ByteLevel" in self._decoders:
            if all(character in _BYTES for character in piece):
                return bytes(_BYTES[character] for character in piece)
            return str(piece).encode()
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        if _SPACE_MARK in piece:
            return str(piece).replace(_SPACE_MARK, " ").encode()
        if self._decoders & {"Metaspace", "ByteFallback"}:
            return str(piece).encode()
        return str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False)).encode()


def _decoders(tokenizer: Any) -> frozenset[str]:
    """The kinds of decoder that the tokenizer is made with."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return frozenset()
    described = json.loads(backend.decoder.__getstate__())
    return frozenset(part["type"] for part in described.get("decoders", [described]))


def _byte_level() -> dict[str, int]:
    """Which byte each character of a byte-level piece stands for: the printable ones of Latin-1 for themselves, the
    others, in order, for the characters from 256 on (Radford et al., GPT-2).
    """
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES: Final = _byte_level()
