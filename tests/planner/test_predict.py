"""How long a step takes, of the parts that were measured: by hand, for small models."""

from dataclasses import replace

import pytest

from stowage.planner.machine import TYPICAL_CPU
from stowage.planner.predict import Offloaded, Workload, decode_step, predict, prompt_s
from tests.planner.made import MIB, WORK, machine, model


def test_what_a_forward_takes_besides_its_products() -> None:
    """Whatever it does, for each layer and each further sequence, for each value that goes through norms and gates."""
    made, bare = model([4] * 3, head=0), machine("cpu")
    wide = replace(
        made, layers=tuple(replace(each, parameters={"attention": 1, "mlp": 3 * 64 * 256}) for each in made.layers)
    )
    slow = replace(bare, step_s=0.5, layer_s=2.0, sequence_s=0.25, logit_s=1.0, elements_per_s=1000.0)

    def more_s(work: Workload) -> float:
        slower = decode_step(wide, slow, work, Offloaded()).compute_s
        return slower - decode_step(wide, replace(bare, layer_s=0.0), work, Offloaded()).compute_s

    assert more_s(replace(WORK, batch=1)) == pytest.approx(0.5 + 3 * 2.0 + 256 + 3 * (64 + 256) / 1000)
    batch = 0.5 + 3 * (2.0 + 2 * 0.25) + 3 * 256 + 3 * 3 * (64 + 256) / 1000
    assert more_s(replace(WORK, batch=3)) == pytest.approx(batch)


def test_attention_of_a_step_takes_longer_the_more_was_said() -> None:
    made, bare = model([4] * 3), machine("cpu")
    slow = replace(bare, attention_steps={1: 1e6})

    def more_s(batch: int, context: int) -> float:
        work = Workload(context, batch, context - 64, 128)
        return (
            decode_step(made, slow, work, Offloaded()).compute_s - decode_step(made, bare, work, Offloaded()).compute_s
        )

    assert more_s(1, 1000) == pytest.approx(3 * 1000 * 256 / 1e6)
    assert more_s(2, 2000) == pytest.approx(4 * more_s(1, 1000))


def test_computing_is_slower_by_what_was_measured_while_something_is_read() -> None:
    made = model([8] * 4)
    offloaded = Offloaded(disk_bytes=30 * MIB)
    slow = replace(machine("cpu", disk=MIB), step_s=10.0)
    apart = decode_step(made, slow, WORK, offloaded)
    assert apart.total_s == pytest.approx(30.0)
    hidden = decode_step(made, replace(slow, overlap_loss={1: 0.5}), WORK, offloaded)
    assert hidden.total_s == pytest.approx(30.0)  # it would have waited for as long
    seen = decode_step(made, replace(slow, overlap_loss={1: 0.9}), WORK, offloaded)
    assert seen.total_s == pytest.approx(apart.compute_s + 0.9 * 30.0)
    prompts = replace(slow, overlap_loss={1: 0.9, 2: 0.0})
    few, many = (prompt_s(made, prompts, replace(WORK, prompt_tokens=count), offloaded, 1) for count in (1, 2))
    assert few - 0.9 * 30.0 == pytest.approx(apart.compute_s, rel=0.01) and many == pytest.approx(30.0)
    assert decode_step(made, replace(slow, stream_bytes_per_s=3.0 * MIB), WORK, offloaded).disk_s == pytest.approx(10.0)


def test_every_piece_of_a_prompt_fetches_again() -> None:
    made = model([8] * 4)
    slow = machine("cpu", disk=1e6)
    offloaded = Offloaded(disk_bytes=4 * MIB)
    one = predict(made, slow, replace(WORK, step_tokens=32), offloaded).ttft_s
    assert predict(made, slow, replace(WORK, step_tokens=16), offloaded).ttft_s == pytest.approx(2 * one)
    assert predict(made, slow, replace(WORK, step_tokens=32), offloaded).ttft_batch_s == pytest.approx(2 * one)


def test_parts_in_formats_are_computed_as_quickly_as_was_measured() -> None:
    """Of two layers with eight experts each: all of the experts, half of the rest, and nothing of the head."""
    made = model([4, 4], experts=8)
    measured = {made.dtype: {"quick": {1: 0.25, 128: 0.5}, "slow": {1: 3.0}}}
    on = replace(TYPICAL_CPU, step_s=0.0, layer_s=0.0, formats=measured)
    one = replace(WORK, batch=1)
    plain = decode_step(made, on, one, Offloaded()).compute_s

    def saved_s(part: str, parameters: int, name: str = "quick") -> float:
        other = replace(made, formats={part: {name: parameters}})
        return plain - decode_step(other, on, one, Offloaded()).compute_s

    each_s = on.multiply_s(made.dtype, MIB, 1)
    assert saved_s("dense", 4 * MIB) == pytest.approx(0.75 * 4 * each_s)
    assert saved_s("experts", 16 * MIB) == pytest.approx(0.75 * 4 * each_s), "two of eight in each layer are met"
    assert saved_s("head", 3 * MIB) == pytest.approx(0.75 * 3 * each_s)
    assert saved_s("head", 3 * MIB, "slow") == pytest.approx(-2 * 3 * each_s)
    assert saved_s("head", 3 * MIB, "never measured") == 0.0
    narrow = replace(on, narrow={made.dtype: {"quick": {1: 0.5}, made.dtype: {1: 1.5}}})
    half = replace(made, formats={"dense": {"quick": 4 * MIB}})
    longer_s = {
        name: decode_step(
            replace(half, outputs={"dense": {name: 4 * MIB // width}}), narrow, one, Offloaded()
        ).compute_s
        - decode_step(half, narrow, one, Offloaded()).compute_s
        for name, width in (("quick", 512), ("", 512), ("never measured", 512))
    }
    assert longer_s == {"quick": pytest.approx(4 * each_s * 0.25), "": pytest.approx(2 * each_s), "never measured": 0.0}
    quicker = replace(made, formats={"dense": {"quick": 8 * MIB}})
    assert prompt_s(quicker, on, WORK, Offloaded(), 1) < prompt_s(made, on, WORK, Offloaded(), 1)
