"""The paged attention kernel: interpreted on the CPU against plain attention in float64, and compiled for GPUs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stowage.core.geometry import Kind
from stowage.cuda.paged_attention import launch
from tests.second_device.interpreting import require
from tests.second_device.paged_cases import BOUND, EDGES, make

pytestmark = pytest.mark.device


@st.composite
def geometries(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from([Kind.FULL, Kind.SLIDING, Kind.CHUNKED]))
    window = draw(st.integers(1, 40))
    edges = st.builds(lambda times, more: max(0, times * window + more), st.integers(1, 2), st.integers(-1, 1))
    width = draw(st.sampled_from([4, 16, 24, 40, 64, 80]))
    latent = draw(st.booleans())
    narrower = st.sampled_from([w for w in (4, 16, 24, 32, 64) if w <= width])
    return {
        "positions": draw(st.lists(st.integers(0, 70) | edges, min_size=1, max_size=2)),
        "kind": kind,
        "window": 0 if kind is Kind.FULL else window,
        "block_tokens": draw(st.sampled_from([1, 5, 16, 32, 48])),
        "kv_heads": 1 if latent else draw(st.integers(1, 2)),
        "share": draw(st.sampled_from([1, 2, 3, 17])),
        "width": width,
        "value_width": draw(narrower if latent else st.sampled_from([8, 16, 40])),
        "latent": latent,
        "softcap": draw(st.sampled_from([None, 2.0, 30.0])),
        "sunk": draw(st.booleans()),
        "dtype": draw(st.sampled_from(list(BOUND))),
        "spare": draw(st.integers(0, 3)),
        "seed": draw(st.integers(0, 999)),
    }


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(geometry=geometries(), pieces=st.integers(1, 4))
@pytest.mark.usefixtures("interpreter")
def test_any_geometry(geometry: dict[str, Any], pieces: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_pieces", lambda *_: pieces)
        patch.setattr(launch, "_keys_at_once", lambda *_: 16)
        make(**geometry).check()


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.usefixtures("interpreter")
def test_edges(edge: str, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_pieces", lambda *_: pieces)
    make(**EDGES[edge]).check()


@pytest.mark.usefixtures("interpreter")
def test_pieces_are_cut_alone() -> None:
    """As the kernel is called: one sequence of many keys is worth several programs."""
    case = make([700], share=1, kv_heads=1)
    assert launch._pieces(1, 700, case.query.device) == 2
    case.check()


@pytest.mark.usefixtures("interpreter")
def test_a_row_without_keys_is_zero() -> None:
    """Padding of a recorded step may ask with a position before its table."""
    case = make([5, 5])
    case.positions[1] = -1
    found = case.found()
    torch.testing.assert_close(found[0].double(), case.expected[0], rtol=0, atol=BOUND[found.dtype])
    assert not found[1].any()


def test_launches_follow_from_shapes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CUDA graph freezes is the same for other lengths, positions and windows' places."""
    launched: list[tuple[Any, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]):  # type: ignore[no-untyped-def]
            plain = lambda given: tuple(v for v in given if not isinstance(v, torch.Tensor))  # noqa: E731
            return lambda *args, **constants: launched.append((grid, plain(args), tuple(constants.items())))

    monkeypatch.setattr(launch, "_kernels", lambda: SimpleNamespace(split=Kernel(), combine=Kernel()))
    case = make([900, 40], kind=Kind.SLIDING, window=600, share=1, kv_heads=1)
    case.found()
    assert [grid for grid, *_ in launched] == [(2, 1, 2), (2,)], "two pieces, and what combines them"
    first = launched.copy()
    launched.clear()
    for tensor in (case.blocks, case.bases, case.positions):
        tensor.zero_()
    case.found()
    assert launched == first


def test_it_compiles_for_gpus(tmp_path: Path) -> None:
    """For two generations, with tensor cores, in the shared memory of a small one. No GPU is asked."""
    require()
    script = Path(__file__).with_name("compile_paged.py")
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 5, done.stdout
