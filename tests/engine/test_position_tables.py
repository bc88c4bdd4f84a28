"""What depends on positions alone is looked up: the very bits, and only where a row is its own position's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stowage import Engine, Memory, SamplingParams
from stowage.executor.determinism.row_invariance import RowInvariance
from stowage.executor.replay.calls import position_tables
from stowage.executor.replay.calls.call_list import RecordedCalls, listed
from stowage.executor.replay.calls.position_tables import PositionTables
from stowage.executor.replay.calls.recording import one_call, recorded
from tests.native import needs_native

Forward = Callable[[Tensor, Tensor], Tensor]
WIDTH = 6


def rotary(positions: Tensor) -> tuple[Tensor, Tensor]:
    """As Transformers writes it."""
    frequencies = torch.arange(1, WIDTH + 1)[None, :, None].float().expand(positions.shape[0], -1, 1)
    angles = (frequencies / 7 @ positions[:, None, :].float()).transpose(1, 2)
    both = torch.cat((angles, angles), dim=-1)
    return (both.cos() * 1.5).to(torch.bfloat16), (both.sin() * 1.5).to(torch.bfloat16)


def turned(x: Tensor, positions: Tensor) -> Tensor:
    cos, sin = rotary(positions)
    for _ in range(2):  # layers
        x = x * cos.unsqueeze(1) + x.flip(-1) * sin.unsqueeze(1)
    return x.flatten()


def written(
    tables: PositionTables, forward: Forward, positions: Tensor, along: int = 1
) -> tuple[RecordedCalls, RecordedCalls]:
    """The step as it is, and with what is looked up."""
    x = inputs(positions)
    with torch.inference_mode():
        _, step = recorded(
            lambda: forward(x, positions), (x, positions), (), (), RowInvariance(linear=False, exact=True)
        )
        return listed(step), listed(tables.looked_up(step, step.given[1], along))


def inputs(positions: Tensor) -> Tensor:
    return torch.randn(1, 3, positions.numel(), 2 * WIDTH, generator=torch.Generator().manual_seed(5)).bfloat16()


def assert_same(plain: RecordedCalls, quick: RecordedCalls, positions: Tensor) -> None:
    with torch.inference_mode():
        given = (inputs(positions), positions)
        assert torch.equal(quick.replay(given), plain.replay(given)), positions


@pytest.mark.parametrize("count", [1, 2, 5])
def test_rotary_embeddings_are_looked_up(count: int) -> None:
    tables = PositionTables()
    begun = torch.arange(9, 9 + count)[None]
    plain, quick = written(tables, turned, begun)
    assert len(quick.calls) < len(plain.calls) - 8
    assert not any(getattr(call.function, "__name__", "") in ("cos", "sin", "matmul") for call in quick.calls)
    generator = torch.Generator().manual_seed(count)
    for most in (9, 255, 256, 3000):
        assert_same(plain, quick, torch.randint(most + 1, (1, count), generator=generator))
        assert_same(plain, quick, torch.full((1, count), most))
    assert tables.nbytes == 2 * 4096 * 2 * WIDTH * 2


def test_steps_of_other_sizes_share_the_table() -> None:
    tables = PositionTables()
    written(tables, turned, torch.tensor([[40]]))
    nbytes = tables.nbytes
    plain, quick = written(tables, turned, torch.tensor([[7, 3000, 0]]))
    assert len(quick.calls) < len(plain.calls) and tables.nbytes > nbytes
    assert_same(plain, quick, torch.tensor([[1, 9000, 2]]))
    other = [written(tables, lambda x, p: turned(x, p + 1), torch.tensor([[n, 8]])) for n in (0, 1)]
    assert all(len(quick.calls) == len(plain.calls) for plain, quick in other), "it has other numbers"


def test_rows_may_be_sequences() -> None:
    def forward(x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = rotary(positions)
        return (x.squeeze(0) * cos.squeeze(1) + sin.squeeze(1)).flatten()

    tables = PositionTables()
    for count in (1, 3):
        begun = torch.arange(count)[:, None] + 4
        plain, quick = written(tables, forward, begun, along=0)
        assert len(quick.calls) < len(plain.calls)
        assert_same(plain, quick, begun * 100)


def test_positions_beyond_the_table_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(position_tables, "_BYTES_MOST", 512 * 2 * WIDTH * 4)
    tables = PositionTables()
    plain, quick = written(tables, turned, torch.tensor([[3, 4]]))
    for most in (511, 512, 100_000, 5):
        assert_same(plain, quick, torch.tensor([[most, 0]]))
    assert tables.nbytes == 512 * 2 * WIDTH * 4
    far = PositionTables()
    plain, quick = written(far, turned, torch.tensor([[3, 4000]]))
    assert len(quick.calls) == len(plain.calls) and not far.nbytes


def among_others(positions: Tensor) -> tuple[Tensor, Tensor]:
    return rotary(positions - positions.amin())


def in_a_row(positions: Tensor) -> tuple[Tensor, Tensor]:
    return rotary(positions.cumsum(1))


def seen_by_all(positions: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = rotary(positions)
    return cos @ cos.transpose(1, 2).expand(1, -1, -1) @ cos, sin


def of_so_many(positions: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = rotary(positions)
    return cos * torch.ones(1, positions.numel(), 1), sin


def complex_numbers(positions: Tensor) -> Tensor:
    """As Llama 4 has them: torch multiplies those in ways that round differently."""
    angles = rotary(positions)[0].float()
    turns = torch.polar(torch.ones_like(angles), angles) * 1.1
    return torch.view_as_real(turns).flatten(-2)[..., : 2 * WIDTH].bfloat16()


@pytest.mark.parametrize("rows", [among_others, in_a_row, seen_by_all, of_so_many])
def test_rows_that_depend_on_others_are_computed(rows: Any) -> None:
    def forward(x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = rows(positions)
        return (x * cos.unsqueeze(1) + sin.unsqueeze(1)).flatten()

    tables = PositionTables()
    plain, quick = written(tables, forward, torch.tensor([[11, 5, 7]]))
    assert len(quick.calls) == len(plain.calls) and not tables.nbytes
    assert_same(plain, quick, torch.tensor([[2, 200, 3]]))


def test_complex_numbers_are_computed() -> None:
    def forward(x: Tensor, positions: Tensor) -> Tensor:
        return (x * complex_numbers(positions).unsqueeze(1)).flatten()

    tables = PositionTables()
    plain, quick = written(tables, forward, torch.tensor([[11, 5, 7]]))
    assert any(call.function is torch.view_as_real for call in quick.calls)
    assert tables.nbytes, "what they are made of is looked up"
    assert_same(plain, quick, torch.tensor([[2, 200, 3]]))


def test_what_others_change_is_their_own() -> None:
    """A result that is changed in place, inside of a call of Python too, is another one in the next step."""

    @one_call
    def double(x: Tensor) -> Tensor:
        return x.mul_(2)

    def forward(x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = rotary(positions)
        cos.add_(1.0)
        doubled = double(sin)
        return (x * cos.unsqueeze(1) + (sin + doubled).unsqueeze(1)).flatten()

    plain, quick = written(PositionTables(), forward, torch.tensor([[11, 5]]))
    for _ in range(2):
        assert_same(plain, quick, torch.tensor([[11, 5]]))
        assert_same(plain, quick, torch.tensor([[0, 1]]))


def test_a_few_calls_are_made_as_they_are() -> None:
    tables = PositionTables()
    plain, quick = written(
        tables, lambda x, p: (x * (p + 1).float()[:, None, :, None]).flatten(), torch.tensor([[3, 4]])
    )
    assert len(quick.calls) == len(plain.calls) and not tables.nbytes


@needs_native
def test_recorded_steps_of_a_model_look_up(checkpoints: Callable[..., Path]) -> None:
    with Engine(checkpoints("llama"), Memory(kv_cache_memory="8MiB")) as engine:
        engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=8, ignore_eos=True))
        runner: Any = engine.parts.runner
        steps = runner.steps
        assert steps.counters.replayed_steps > 3
        assert steps.backend._tables.nbytes > 0


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_cross_the_ends_of_the_table(
    dtype: str, checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It grows from 256 rows to 512 while programs have its address, and positions behind that are computed."""
    path = checkpoints("llama")
    prompts = [list(range(3, 3 + count)) for count in (250, 507, 9)]
    chosen = SamplingParams(max_new_tokens=20, ignore_eos=True)

    def answers(at_a_time: int) -> tuple[list[Any], Any]:
        with Engine(path, Memory(kv_cache_memory="32MiB", max_num_seqs=at_a_time), dtype=dtype) as engine:
            found = [one.token_ids for one in engine.generate(prompts, chosen)]
            runner: Any = engine.parts.runner
            return found, (runner.steps.counters.replayed_steps, runner.steps.backend._tables.nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(position_tables, "_CALLS_LEAST", 1 << 20)
        expected, (_, nothing) = answers(1)
    rows: list[int] = []
    with monkeypatch.context() as patch:
        looked_up = PositionTables.addresses
        patch.setattr(position_tables, "_BYTES_MOST", 512 * 16 * (8 if dtype == "float32" else 4))
        patch.setattr(
            PositionTables, "addresses", lambda self, at, last: (rows.append(last), looked_up(self, at, last))[1]
        )
        for at_a_time in (1, 3):
            found, (replayed, nbytes) = answers(at_a_time)
            assert found == expected and replayed > 10 and nbytes > nothing
    assert min(rows) < 256 and {255, 256, 511, 512} <= set(rows)
