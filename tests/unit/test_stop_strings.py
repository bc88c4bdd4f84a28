"""Stop strings: found where they begin first, nothing given away that they take back, and long ones cost no more."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from stowage.engine.detokenizer import Detokenizer
from stowage.engine.sampling_params import SamplingParams
from stowage.errors import RequestError

LETTERS = "ab"


def characters() -> SimpleNamespace:
    """A tokenizer whose tokens are characters."""
    return SimpleNamespace(decode=lambda tokens, **_: "".join(map(chr, tokens)))


def pieces(text: str, stop: list[str]) -> tuple[list[str], str, bool]:
    made = Detokenizer(characters(), [], stop)
    given = []
    for character in text:
        given.append(made.push(ord(character)))
        if made.stopped:
            break
    return [*given, made.finish()], made.text, made.stopped


def test_against_plain_search() -> None:
    chance = random.Random(5)
    for _ in range(3000):
        text = "".join(chance.choices(LETTERS, k=chance.randrange(1, 40)))
        stop = ["".join(chance.choices(LETTERS, k=chance.randrange(1, 9))) for _ in range(chance.randrange(0, 4))]
        given, whole, stopped = pieces(text, stop)
        ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
        first = min((end for end, _ in ends), default=0)  # the token that completes one ends the answer
        expected = text[: min(begin for end, begin in ends if end == first)] if ends else text
        assert (whole, stopped) == (expected, bool(ends))
        assert "".join(given) == whole, "what was handed out is never taken back"
        if not stopped and stop:  # nothing is held back that no stop string could take
            tail = max((n for n in range(9) for s in stop if n < len(s) and text.endswith(s[:n])), default=0)
            assert len("".join(given[:-1])) == len(text) - tail


def test_long_ones_cost_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons per character do not grow with a stop string: counted, since clocks lie."""
    import stowage.engine.detokenizer as module

    class Counting(str):
        compared = 0
        __hash__ = str.__hash__

        def __getitem__(self, at: object) -> Counting:
            Counting.compared += 1
            return Counting(super().__getitem__(at))  # type: ignore[index]

    costs = []
    for length in (8, 1024):
        matcher = module._Stop(Counting("a" * length + "b"))
        Counting.compared = 0
        assert matcher.feed("a" * 5000) is None and matcher.begun == length
        costs.append(Counting.compared)
    assert costs[1] <= 3 * 5000 and costs[0] <= 3 * 5000


@pytest.mark.parametrize("stop", [["x" * 1025], ["x"] * 65, [""], "x", [b"x"], [None], 5])
def test_limits(stop: object) -> None:
    with pytest.raises(RequestError, match="stop must be"):
        SamplingParams(stop=stop)  # type: ignore[arg-type]
    SamplingParams(stop=("x" * 1024,) * 64)


def test_lists_without_an_end() -> None:
    def forever():
        while True:
            yield 5

    with pytest.raises(RequestError, match="stop_token_ids must be at most"):
        SamplingParams(stop_token_ids=forever())  # type: ignore[arg-type]


def test_special_tokens_cost_nothing() -> None:
    """A model that goes on behind its end says nothing, as often as it is asked to."""
    decoded = []

    def decode(tokens, **_):
        decoded.append(len(tokens))
        return "".join(chr(token) for token in tokens if token != 7)

    made = Detokenizer(SimpleNamespace(decode=decode, all_special_ids=[7]), [104], [])
    assert made.push(105) == "i" and [made.push(7) for _ in range(5000)] == [""] * 5000
    assert made.push(33) == "!" and made.finish() == "" and made.text == "i!"
    assert max(decoded) <= 4


def test_bytes_that_never_become_characters() -> None:
    """They are given out after a few tokens, as a whole decoding has them, and are not decoded again and again."""
    decoded = []

    def decode(tokens, **_):
        decoded.append(len(tokens))
        return bytes(tokens).decode(errors="replace")

    made = Detokenizer(SimpleNamespace(decode=decode), [], [])
    given = "".join(made.push(0x80) for _ in range(2000))
    assert len(given) >= 1990 and given + made.finish() == "\ufffd" * 2000
    assert max(decoded) <= 16
    chance = random.Random(7)
    parts = [b"\x80", b"\xe6", b"\xe6\x97", b"\xf0\x9f\x98", "日".encode(), "😀".encode(), b"a", b"\xc3"]
    for _ in range(2000):
        text = b"".join(chance.choices(parts, k=chance.randrange(1, 30)))
        made = Detokenizer(SimpleNamespace(decode=decode), [], [])
        assert "".join(map(made.push, text)) + made.finish() == text.decode(errors="replace")
