"""What a token says by itself, for each way in which tokenizers spell."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stowage.server.vocabulary import Vocabulary
from stowage.testing import tiny_models

TEXT = "Grüße aus 日本, ✓ fine\n\ttabs  and 🙂"


def metaspace() -> PreTrainedTokenizerFast:
    """As SentencePiece spells: a mark for spaces, and bytes for what it does not know."""
    pieces = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁fine", "aus", "▁aus", "f", "i", "<0xZZ>"]
    merges = []
    backend = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


def wordpiece() -> PreTrainedTokenizerFast:
    pieces = ["[UNK]", "fine", "##st", "day"]
    backend = Tokenizer(models.WordPiece(vocab={p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


@pytest.mark.parametrize("tokenizer", [tiny_models.tokenizer(512), metaspace()], ids=["byte level", "metaspace"])
def test_the_bytes_of_tokens_are_the_text(tokenizer: PreTrainedTokenizerFast) -> None:
    words = Vocabulary(tokenizer)
    tokens = tokenizer(TEXT)["input_ids"]
    assert b"".join(words.bytes_of(token) for token in tokens).decode() == TEXT
    assert b"".join(words.shown(token) for token in tokens).decode() == TEXT
    for token in tokens:
        name, raw = words.text_of(token), words.bytes_of(token)
        if name.startswith("bytes:"):
            assert bytes.fromhex(name.removeprefix("bytes:").replace("\\x", "")) == raw
        else:
            assert name.encode() == raw


def test_tokens_that_are_no_text() -> None:
    words = Vocabulary(tiny_models.tokenizer(512))
    assert words.text_of(1) == "<bos>" and words.shown(1) == b""
    assert words.text_of(99_999) == "token_id:99999"
    assert Vocabulary(None).text_of(5) == "token_id:5" and Vocabulary(None).shown(5) == b""


def test_a_special_token_without_a_role_is_not_shown() -> None:
    tokenizer = tiny_models.tokenizer(512)
    tokenizer.add_tokens([AddedToken("<file_sep>", special=True)])
    words, token = Vocabulary(tokenizer), tokenizer.convert_tokens_to_ids("<file_sep>")
    assert words.text_of(token) == "<file_sep>" and words.shown(token) == b""
    assert words.shown(token, special=True) == b"<file_sep>"


def test_pieces_that_only_look_like_bytes() -> None:
    words, tokenizer = Vocabulary(metaspace()), metaspace()
    assert words.text_of(tokenizer.convert_tokens_to_ids("<0xZZ>")) == "<0xZZ>"
    assert words.bytes_of(tokenizer.convert_tokens_to_ids("<0x0A>")) == b"\n"
    assert words.text_of(tokenizer.convert_tokens_to_ids("▁fine")) == " fine"


def test_an_added_token_that_byte_level_cannot_spell() -> None:
    tokenizer = tiny_models.tokenizer(512)
    tokenizer.add_tokens(["<｜two words｜>"])
    words = Vocabulary(tokenizer)
    token = tokenizer.convert_tokens_to_ids("<｜two words｜>")
    assert words.text_of(token) == "<｜two words｜>" and words.shown(token) == words.bytes_of(token)


def test_other_tokenizers_decode() -> None:
    tokenizer = wordpiece()
    words = Vocabulary(tokenizer)
    assert [words.text_of(token) for token in tokenizer("fine day")["input_ids"]] == ["fine", "day"]
