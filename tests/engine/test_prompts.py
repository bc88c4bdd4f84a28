"""Prompts cost work in proportion to the tokens that are allowed, whatever is sent, and are right at any length."""

from __future__ import annotations

import asyncio
import json
import random
import threading

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stowage.engine import prompts as module
from stowage.engine.prompts import PromptTooLong, characters_most
from stowage.errors import RequestError
from stowage.server.api_errors import ApiError
from stowage.server.apis import completions
from stowage.server.async_engine import SHORT_BYTES, AsyncEngine
from stowage.server.limits import Limits
from stowage.server.memory import Reservation
from stowage.server.served_model import ServedModel
from stowage.server.supervisor import EngineSupervisor
from tests.engine.conftest import greedy

WORDS = ["ahoy", "there", " ", "naïve", "漢字", "🚢", "\n", "e\u0301", "x" * 40, "\u1f82", "a\u0323\u0302", "   ", "0"]


class Noting:
    """A tokenizer that notes how many characters it was given."""

    def __init__(self, real):
        self.real, self.given = real, []

    def __call__(self, text, **options):
        self.given.append(len(text))
        return self.real(text, **options)

    def __getattr__(self, name):
        return getattr(self.real, name)


@pytest.fixture
def noted(engines):
    engine = engines("llama", context_tokens=128)
    engine.prompts._tokenizer = Noting(engine.tokenizer)
    return engine.prompts, engine.prompts._tokenizer.given, engine


def test_a_text_with_more_characters_than_the_context_can_have_is_not_read(noted):
    _, given, engine = noted
    longest = characters_most(engine.tokenizer)
    assert 0 < longest < 100
    for prompt in ("ab" * 4_000_000, [{"role": "user", "content": "ab" * 4_000_000}]):
        with pytest.raises(PromptTooLong, match=r"80000\d\d characters.*above the context of 128"):
            engine.generate([prompt], greedy(1))
    assert given == []


def test_templates_for_other_uses_are_told_as_such(engines, monkeypatch):
    """As GGUF files and checkpoints have them by name, where none is for all messages."""
    engine = engines("llama", context_tokens=128)
    named = {"tool_use": "{{ messages[0].content }} {{ tools | length }}", "rag": "{{ documents }}"}
    monkeypatch.setattr(engine.tokenizer, "chat_template", named)
    asked = [{"role": "user", "content": "ahoy"}]
    with pytest.raises(RequestError, match=r"for other uses only \(rag, tool_use\).*: --chat-template FILE$"):
        engine.generate([asked], greedy(1))
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
    assert engine.prompts.read(asked, template={"tools": tools})
    monkeypatch.setitem(named, "default", "{{ messages[0].content }}")
    assert engine.generate([asked], greedy(1))


def test_of_a_long_text_no_more_is_read_than_is_needed(noted, monkeypatch):
    prompts, given, _ = noted
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 100)
    vars(prompts)["_characters_most"] = 0  # as of tokenizers that drop characters
    with pytest.raises(PromptTooLong, match=r"100000 characters, the first of which are \d+ tokens"):
        prompts.read("ab" * 50_000)
    assert 100 <= sum(given) <= 1000


def test_too_many_messages(noted):
    prompts, given, _ = noted
    with pytest.raises(PromptTooLong, match="100000 messages"):
        prompts.read([{"role": "user", "content": ""}] * 100_000)
    assert given == []


def test_long_prompts_that_fit_are_tokenized_as_ever(noted, monkeypatch):
    prompts, _, engine = noted
    monkeypatch.setattr(module, "_CHARACTERS_PER_TOKEN", 0)
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 7)
    text = "".join(random.Random(5).choices(WORDS, k=12))
    assert prompts.read(text) == engine.tokenizer(text)["input_ids"]
    with pytest.raises(PromptTooLong, match="more than 3 tokens"):
        prompts.read(text, 3)
    with pytest.raises(RequestError, match="empty"):
        prompts.read("")


def tokenizer_of(model, normalizer=None, pre_tokenizer=None, added=()):
    backend = Tokenizer(model)
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


ALPHABET = {piece: at for at, piece in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "xx", "xxxx", "<unk>"])}
BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256, "aa": 257, "<unk>": 258}
MERGES = [("x", "x"), ("xx", "xx")]
LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)


def bytewise(vocabulary=ALPHABET, **options):
    return models.BPE(vocab=vocabulary, merges=MERGES, **options)


def bytes_behind(**options):
    return models.BPE(vocab=BYTES, merges=[("a", "a")], byte_fallback=True, unk_token="<unk>", **options)


KNOWN = {
    "bytes": (bytewise(), None, LEVEL),
    "composed": (bytewise(), normalizers.NFC(), LEVEL),
    "in turn": (bytewise(), normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]), LEVEL),
    "fallback": (bytes_behind(), normalizers.Replace(" ", "▁"), None),
    "metaspace": (bytes_behind(), None, pre_tokenizers.Metaspace()),
    "cut": (bytewise(), None, pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "isolated"), LEVEL])),
    "one unknown each": (models.BPE(vocab={"a": 0, "<unk>": 1}, merges=[], unk_token="<unk>"), None, None),
}
UNKNOWN = {
    "spaces dropped": (bytewise(), None, pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), LEVEL])),
    "removed": (bytewise(), None, pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), LEVEL])),
    "stripped": (bytewise(), normalizers.Strip(), LEVEL),
    "replaced": (bytewise(), normalizers.Replace("xx", "y"), LEVEL),
    "unknown ones dropped": (models.BPE(vocab={"a": 0}, merges=[]), None, None),
    "unknown ones as one": (models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True), None, None),
    "a byte is lacking": (bytewise({piece: at for piece, at in ALPHABET.items() if piece != "a"}), None, LEVEL),
    "words": (models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"), None, None),
    "spaces beside": (bytewise(), None, LEVEL, [AddedToken("<s>", lstrip=True)]),
}


@pytest.mark.parametrize("parts", KNOWN.values(), ids=KNOWN)
def test_no_token_stands_for_more_characters_than_is_said(parts):
    tokenizer = tokenizer_of(*parts)
    most = characters_most(tokenizer)
    assert most > 0
    chance = random.Random(1)
    texts = ["".join(chance.choices(WORDS, k=chance.randrange(1, 30))) for _ in range(300)]
    for text in [*texts, "x" * 1000, " " * 1000, "a" * 1000, "\u1f82" * 50, "α\u0313\u0300\u0345" * 50]:
        assert len(text) <= most * len(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_what_is_tokenized_is_told_before(noted, monkeypatch):
    """In pieces of a bounded length, and as a whole only where that is no more than the context can have."""
    prompts, given, _ = noted
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 100)
    vars(prompts)["_characters_most"] = 0
    told: list[int] = []
    with pytest.raises(PromptTooLong):
        prompts.read("ab" * 50_000, None, told.append)
    assert told == given and max(told) <= 100
    told.clear()
    given.clear()
    prompts.read("ab", None, told.append)
    assert (given, told) == ([2], [2, 0])

    def refuse(characters):
        raise RequestError("no")

    given.clear()
    with pytest.raises(RequestError, match="no"):
        prompts.read("ab", None, refuse)
    assert given == []


@pytest.mark.parametrize("parts", UNKNOWN.values(), ids=UNKNOWN)
def test_where_a_token_may_stand_for_any_number_of_characters(parts):
    assert characters_most(tokenizer_of(*parts)) == 0


class Waiting(Noting):
    """Takes its time over long texts: until it is told."""

    def __init__(self, real):
        super().__init__(real)
        self.reached, self.released = threading.Event(), threading.Event()

    def __call__(self, text, **options):
        if len(text) > 1000:
            self.reached.set()
            assert self.released.wait(60)
        return self.real(text, **options)


def test_nobody_waits_until_long_prompts_of_others_are_read(engines):
    engine = engines("llama", context_tokens=4096)
    waiting = engine.prompts._tokenizer = Waiting(engine.tokenizer)
    async_engine = AsyncEngine(
        EngineSupervisor(lambda: engine), ServedModel("tiny"), Limits(max_queued_requests=2, max_choices=2)
    )
    short = b'{"model": "tiny", "prompt": "ahoy"}'
    text = "ahoy " * 3000
    long = json.dumps({"model": "tiny", "prompt": text}).encode() + b" " * SHORT_BYTES

    def read(body: bytes):
        return async_engine.read(completions.read, body, Reservation(async_engine.memory, "anybody"))

    async def ask() -> None:
        slow = [asyncio.create_task(read(long)) for _ in range(3)]
        await asyncio.to_thread(waiting.reached.wait, 60)
        for _ in range(5):
            assert (await asyncio.wait_for(read(short), 60)).prompts
        assert not any(task.done() for task in slow)
        more = [asyncio.create_task(read(long)) for _ in range(async_engine.max_choices)]
        await asyncio.sleep(0)
        assert async_engine.choices_open == async_engine.max_choices
        with pytest.raises(ApiError) as caught:
            await read(short)
        assert caught.value.status == 429
        waiting.released.set()
        refused = await asyncio.gather(*slow, *more, return_exceptions=True)
        assert {type(error) for error in refused} == {ApiError} and async_engine.choices_open == 0

    try:
        asyncio.run(ask())
    finally:
        waiting.released.set()
        async_engine.close()
