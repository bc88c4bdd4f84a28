"""Speculative decoding: hits are exact for the target's layers and for the draft's, and rejected tokens are no hits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import Start
from tests.vllm.models import FAMILIES, WITH_MODULE, write_drafts
from tests.vllm.oracle import Answer, Engine, Engines, connector, prompt

METHODS = [("ngram", "llama"), ("draft_model", "llama"), ("eagle", "llama"), ("mtp", "mimo"), ("ngram", "gemma3")]
LOOKAHEAD = ("eagle", "mtp")
"""Their layers read the token behind each token."""


def asked(engine: Engine, tokens: list[int], new_tokens: int = 24) -> tuple[Answer, Any]:
    """The answer, and what was drafted for it."""
    engine.ask("drafts")
    answer = engine.generate(tokens, new_tokens)
    return answer, engine.ask("drafts")


def is_accepted(answer: Answer, drafts: Any) -> bool:
    """Whether it took fewer steps than tokens."""
    return len(drafts) < len(answer.tokens)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "name"), METHODS, ids=["-".join(pair) for pair in METHODS])
def test_hits_of_an_engine_that_drafts(method: str, name: str, start: Start, engines: Engines, tmp_path: Path) -> None:
    """Log-probabilities and drafts are those of a plain vLLM's own hit of the same length. (By default it drops the
    last block of its hits with EAGLE: a block is named without the token behind it. It is told not to.) No engine is
    asked for them first: until a plain vLLM has compiled how it looks for n-grams, its sums are others on AVX2.
    """
    family = WITH_MODULE if method == "mtp" else FAMILIES[name]
    named = f"{name}-{method}"
    drafts = write_drafts(method, engines.model(named, family), tmp_path / "draft")
    whole = drafts | {"disable_eagle_block_drop": True} if method in LOOKAHEAD else drafts
    stored = (prompt(150, seed=3) * 9)[:1300]  # n-grams find something to draft
    plain = start(named, family=family, speculative_config=whole, prefix_cache_retention_interval=None)
    plain.generate(stored, 24)
    own, own_drafts = asked(plain, stored)
    assert own.local > 0
    engine = start(named, connector(disk=tmp_path / "cache"), family=family, speculative_config=drafts)
    cold, _ = asked(engine, stored)
    engine.forget()
    found, found_drafts = asked(engine, stored)
    assert (found.local, found.external) == (0, own.local)
    assert found.distance(own) == 0.0 and found.tokens == cold.tokens
    assert found_drafts == own_drafts and found_drafts, "what draft layers read has come back too"
    if method == "draft_model":
        assert is_accepted(found, found_drafts)
    engine.close()
    engine = start(named, connector(disk=tmp_path / "cache"), family=family, speculative_config=drafts)
    engine.generate(prompt(5), 2)
    assert engine.generate(stored, 24).distance(own) == 0.0, "from disk"
    assert engine.hits("disk") > 0
    assert_conversation_goes_on(plain, engine, [*prompt(300, seed=5), *stored[:100]])
    assert_only_tokens_behind_matter(engine, method, prompt(1280, seed=6))
    engine.ask("check")


def assert_conversation_goes_on(plain: Engine, engine: Engine, first: list[int]) -> None:
    """What was generated, by tokens that were accepted and by rejected drafts, is a hit for the next turn."""
    answers = [one.generate(first, 300) for one in (plain, engine)]
    assert answers[0].tokens == answers[1].tokens
    second = [*first, *answers[0].tokens, *prompt(100, seed=1)]
    own, own_drafts = asked(plain, second)
    engine.forget()
    found, found_drafts = asked(engine, second)
    assert own.local > len(first) and found.local == 0
    assert own.local - 384 <= found.external <= own.local
    if found.external == own.local:
        assert found.distance(own) == 0.0 and found_drafts == own_drafts
    assert found.tokens == own.tokens


def assert_only_tokens_behind_matter(engine: Engine, method: str, shared: list[int]) -> None:
    """A prompt that parts exactly at the end of a chunk: what draft layers have for the last token is another's."""
    engine.generate([*shared, *prompt(200, seed=7)])
    engine.generate([*shared, *prompt(200, seed=7)])
    engine.forget()
    same = engine.generate([*shared, *prompt(200, seed=7)])
    engine.forget()
    parted = engine.generate([*shared, *prompt(200, seed=8)])
    assert same.external >= len(shared) - 384
    assert parted.external < len(shared) if method in LOOKAHEAD else parted.external <= len(shared)


def test_drafts_that_cannot_be_kept_are_refused() -> None:
    from stowage.errors import ConfigError
    from stowage.plugins.vllm import adapter

    class Extracting:
        decode_context_parallel_size = prefill_context_parallel_size = 1

        @staticmethod
        def uses_extract_hidden_states() -> bool:
            return True

    with pytest.raises(ConfigError, match="extract_hidden_states"):
        adapter.check_config(type("Config", (), {"parallel_config": Extracting, "speculative_config": Extracting}))
