"""What a load finds is never less than vLLM's own device cache finds of the same prompt, and exactly that."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from stowage.core.geometry import Kind
from stowage.plugins.vllm.adapter import GroupShape, parts_of_blocks
from tests.vllm.conftest import Start
from tests.vllm.oracle import Engine, connector, prompt

UNIT = 64


def seen(engine: Engine, first: list[int], again: list[int], *, load: bool) -> Any:
    """What ``again`` comes to when nothing but ``first`` was computed before."""
    assert engine.ask("reset", connector=load)
    engine.generate(first, 1)
    if load:
        engine.forget()
    return engine.generate(again)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [("llama", {}), ("gemma3", {}), ("qwen3_5", {}), ("qwen3_5", {"prefix_match_unit": UNIT})],
    ids=["llama", "gemma3", "qwen3_5", "qwen3_5-unit"],
)
def test_as_much_is_found_as_on_the_device(name: str, options: dict[str, Any], start: Start) -> None:
    """Of a prompt that comes again, one that goes on behind it, and one that parts from it near its end. How many
    tokens a block has, and so which hits end inside one, depends on the processor's instructions.
    """
    engine, plain = start(name, connector(), **options), start(name, **options)
    block, inside, expected = engine.ask("layout")["hit_tokens"], 0, 0
    for seed, tokens in enumerate((1380, 300, 800)):
        first = prompt(tokens, seed)
        for again in (first, first + prompt(150, 10 + seed), first[: tokens - 40] + prompt(90, 20 + seed)):
            local, loaded = (seen(one, first, again, load=one is engine) for one in (plain, engine))
            assert loaded.external >= local.local, (tokens, len(again))
            if loaded.external == local.local:
                assert loaded.distance(local) == 0.0
            inside += loaded.external % block > 0
        end = tokens // UNIT * UNIT  # where the first one's states are kept, beside those at ends of blocks
        expected += (2 + (end <= tokens - 40)) * (end % block > 0)
    assert inside == (expected if options else 0)
    assert expected > 0
    engine.ask("check")


def test_which_models_have_groups_for_parts_of_blocks() -> None:
    """Those with states and full attention in blocks of one size, of which vLLM finds parts."""
    full, state = GroupShape(Kind.FULL, 640, 0, ("a",)), GroupShape(Kind.RECURRENT, 640, 0, ("s",))
    window, dense = GroupShape(Kind.SLIDING, 640, 100, ("w",)), GroupShape(Kind.RECURRENT, 640, 0, ("s",), dense=True)
    small = GroupShape(Kind.FULL, 64, 0, ("b",))
    whole = [[full, state]] * 4 + [[full, window, state], [full], [full, dense], [small, state]]
    for shapes, unit in zip(whole, [0, 640, 1280, 48, 64, 64, 64, 64], strict=True):
        assert parts_of_blocks(shapes, unit) == shapes
    attention, states, parts = parts_of_blocks([full, state], UNIT)
    assert (attention.block_tokens, attention.resume_tokens) == (640, UNIT)
    assert (states.block_tokens, states.parts, states.spared_tokens) == (UNIT, 10, 0)
    assert (parts.kind, parts.of, parts.block_tokens, parts.parts) == (Kind.RECURRENT, 0, UNIT, 10)
    assert (parts.spared_tokens, parts.layers) == (640, ("a",))
