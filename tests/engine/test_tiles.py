"""Many rows by tiles (AMX): the bits of few rows, with tiles emulated as Intel's reference has them.

Scores of attention by tiles and by pairs (AVX512_BF16): the bits of floats. And the trials that decide whether a
processor's own are used.

The kernels are compiled again with ``tests/tiles_emulated.h`` in place of the instructions, so that a processor without
tiles proves the layout and the order. What a real one does is tried on it, when kernels are loaded.
"""

from __future__ import annotations

import importlib.util
import itertools
import shutil
import struct
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stowage import Engine, Memory, SamplingParams
from stowage.core.geometry import Kind
from stowage.executor import kernels
from stowage.executor.determinism import pieces as prompt_pieces
from stowage.executor.replay.programs import program
from stowage.executor.tiles import try_scoring, try_tiles
from stowage.testing import tiny_models
from stowage.weights.quantized.formats import Spec
from tests.answers import bits
from tests.engine import test_int8_kernels
from tests.engine.conftest import random_prompt
from tests.engine.test_native import Case
from tests.threads import using_threads

pytestmark = pytest.mark.device  # all kernels are compiled again: `make second-device`
SOURCE = Path(__file__).parents[1] / "tiles_emulated.c"
FLAGS = "-shared -fPIC -O1 -std=gnu11 -ffp-contract=fast -Wno-psabi -Werror".split()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The kernels with emulated tiles, as a module of Python."""
    compiler = shutil.which("gcc")
    if compiler is None or not kernels.is_built() or not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("emulated tiles need gcc and a processor with AVX512_BF16")
    library = tmp_path_factory.mktemp("tiles") / "_native.so"
    includes = [f"-I{sysconfig.get_paths()['include']}", f"-I{SOURCE.parent}"]
    subprocess.run([compiler, *FLAGS, *includes, SOURCE, "-o", library, "-lm", "-lpthread"], check=True)
    spec = importlib.util.spec_from_file_location("_native", library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def kernel(compiled: Any) -> Iterator[Any]:
    """The same, trusted, as what `kernels` computes linear layers with."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (kernels, program):
            patch.setattr(module, "_kernel", compiled)
        compiled.trust_tiles()
        try_scoring(compiled)
        yield compiled


@pytest.mark.slow
def test_tiles_in_another_order_are_found_out_and_left_alone(compiled):
    """First of this module: nothing is trusted yet."""
    assert compiled.use_instructions(None) == "avx512_bf16"
    compiled.chain(True)
    assert "in another way than Stowage's kernels" in try_tiles(compiled)
    assert compiled.use_instructions(None) == "avx512_bf16"
    compiled.chain(False)
    assert try_tiles(compiled) == ""
    assert compiled.use_instructions(None) == "amx_bf16"


def attended(kernel: Any, case: Case, *pieces: tuple[int, int], more: float = 1.0) -> Tensor:
    """What attention gives in float32, before it is rounded. ``more``: times the scale of scores."""
    sums = torch.empty(sum(end - begin for begin, end in pieces) * case.heads * case.values.shape[-1])

    def attention(query: int, _out: int, *rest: Any) -> None:
        *before, scale, softcap, half, _narrow, rounded_from, threads = rest
        kernel.attention(query, sums.data_ptr(), *before, scale * more, softcap, half, False, rounded_from, threads)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_kernel", SimpleNamespace(attention=attention))
        case.attend(*pieces)
    return sums


@pytest.mark.slow
def test_scores_by_tiles_in_another_order_are_left_to_floats(compiled):
    """Second: tiles are trusted, scores not yet."""

    def found(name: str | None) -> Tensor:
        assert compiled.use_instructions(name) == name or name is None
        return attended(compiled, Case(90, Kind.FULL, 0, 16, width=64, dtype=torch.bfloat16), (0, 90))

    floats = found("avx512")
    compiled.chain(True)
    assert not torch.equal(found("amx_bf16"), floats)
    try_scoring(compiled)
    assert torch.equal(found(None), floats)
    compiled.chain(False)
    try_scoring(compiled)
    assert torch.equal(found(None), floats)
    compiled.chain(True)
    assert not torch.equal(found(None), floats), "tiles are used now"
    compiled.chain(False)


def test_shapes_of_tiles_are_written_before_they_are_loaded(compiled: Any, tmp_path: Path) -> None:
    """All 64 bytes, though GCC 12 believes that the instruction reads 8."""
    program, widths = tmp_path / "shapes", (64, 24, 256)
    source = Path(__file__).parents[1] / "tiles_shape.c"
    flags = "-O2 -std=gnu11 -Wno-psabi -static -ffunction-sections -fdata-sections -Wl,--gc-sections".split()
    include = f"-I{sysconfig.get_paths()['include']}"  # what calls Python is left out
    subprocess.run(["gcc", *flags, include, source, "-o", program, "-lm", "-lpthread"], check=True)
    said = subprocess.run([program, *map(str, widths)], check=True, capture_output=True, text=True).stdout.split()
    for width, line in zip(widths, said, strict=True):
        steps = width // 16
        row_bytes = [64] * 4 + [4 * steps] * 2 + [64] * 2 + [0] * 8
        assert bytes.fromhex(line) == struct.pack("<B15x16H16B", 1, *row_bytes, *[16] * 6, *[steps] * 2, *[0] * 8)


@pytest.mark.slow
@pytest.mark.parametrize("spec", test_int8_kernels.INTEGER, ids=test_int8_kernels.named)
def test_inputs_rounded_to_8_bits_have_the_bits_of_other_sets(kernel: Any, spec: Spec) -> None:
    assert kernel.use_instructions(None) == "amx_bf16"
    test_int8_kernels.test_published_formats(spec, torch.bfloat16)


def test_where_there_are_no_tiles_nothing_is_against_them():
    def refuse(name: str | None) -> str:
        raise ValueError(name)

    assert try_tiles(SimpleNamespace(use_instructions=refuse)) == ""


def numbers(generator: torch.Generator, *shape: int, any_size: bool) -> Tensor:
    if not any_size:
        return torch.randn(shape, generator=generator).bfloat16()
    bits = torch.randint(-(1 << 15), 1 << 15, shape, generator=generator, dtype=torch.int16).view(torch.bfloat16)
    return torch.where(bits.isfinite(), bits, 0)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 80) | st.sampled_from([511, 513, 530]),
    inputs=st.integers(1, 80) | st.sampled_from([479, 480, 481, 511, 512, 513, 1100]),
    outputs=st.integers(1, 70),
    coded=st.booleans(),
    any_size=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1 << 30),
    data=st.data(),
)
def test_a_row_is_its_own_among_few_and_many(kernel, rows, inputs, outputs, coded, any_size, threads, seed, data):
    generator = torch.Generator().manual_seed(seed)
    x = numbers(generator, rows, inputs, any_size=any_size)
    if coded:
        codes = torch.randint(-128, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
        scales = torch.rand(outputs, generator=generator)
        weight = codes.double() * scales[:, None].double()

        def multiply(part: Tensor) -> Tensor:
            return kernels.linear_of(part, kernels.of_plain(codes, scales))
    else:
        weight = numbers(generator, outputs, inputs, any_size=any_size)

        def multiply(part: Tensor) -> Tensor:
            return kernels.linear(part, weight)

    with using_threads(threads):
        whole = multiply(x)
        begin = data.draw(st.integers(0, rows - 1))
        end = data.draw(st.integers(begin + 1, rows) | st.just(begin + 1))
        part = multiply(x[begin:end])
    same = part.view(torch.int16) == whole[begin:end].view(torch.int16)
    assert bool((same | (part.isnan() & whole[begin:end].isnan())).all())
    if not any_size:
        bound = 2**-8 * (x.double().abs() @ weight.double().abs().T)
        assert bool(((whole.double() - x.double() @ weight.double().T).abs() <= bound).all())


LIMIT = 2.0**-56
"""Numbers below it are left to floats."""


def sized(generator: torch.Generator, size: str, like: Tensor) -> Tensor:
    """Numbers in the shape of ``like`` that tell ways to add them up apart, or that have to be left to floats."""
    shape = like.shape
    common = torch.randn(shape, generator=generator)
    if size == "any":
        return numbers(generator, *shape, any_size=True)
    if size == "spread":
        return torch.ldexp(common, torch.randint(-8, 9, shape, generator=generator)).bfloat16()
    if size == "cancelling":
        large = torch.tensor([1.0, 2.0**24, -(2.0**24), 0.0, -1.0, 2.0**-24])
        return large[torch.randint(len(large), shape, generator=generator)].bfloat16()
    if size == "near the limit":
        near = torch.tensor([1.0, -1.0, 1 + 2**-7, -1 - 2**-7])[torch.randint(4, shape, generator=generator)]
        least = int(torch.randint(-64, -54, (), generator=generator))  # a lower one leaves all of them to floats
        return torch.ldexp(near, torch.randint(least, least + 2, shape, generator=generator)).bfloat16()
    odd = torch.tensor([torch.inf, torch.nan, 1e-40, -1e-40, LIMIT, LIMIT / 2, 2.0**57, -0.0, 3e38])
    chosen = torch.rand(shape, generator=generator) < (0.002 if size == "odd" else 0)
    return torch.where(chosen, odd[torch.randint(len(odd), shape, generator=generator)], common).bfloat16()


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    tiles=st.booleans(),
    kind=st.sampled_from([(Kind.FULL, 0), (Kind.SLIDING, 40), (Kind.SLIDING, 64), (Kind.CHUNKED, 48)]),
    block_tokens=st.sampled_from([7, 16, 32, 48]),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 2), (6, 2), (5, 1)]),
    width=st.sampled_from([8, 16, 24, 64, 80, 96, 128, 200, 256, 270, 272, 300]),
    value=st.sampled_from([8, 64, 80]),
    size=st.sampled_from(["common", "spread", "cancelling", "near the limit", "odd", "any"]),
    softcap=st.sampled_from([0.0, 0.0, 15.0]),
    sinks=st.booleans(),
    rounded_from=st.just(0) | st.integers(0, 150),
    places=st.lists(st.integers(0, 150), min_size=2, max_size=3, unique=True).map(sorted),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1 << 30),
)
def test_scores_have_the_bits_of_floats(compiled, tiles, kind, block_tokens, heads, width, value, size, softcap, sinks,
                                        rounded_from, places, threads, seed):  # fmt: skip
    """Keys, queries and values of any size, beside others: tiles are emulated, pairs this processor's own."""
    generator = torch.Generator().manual_seed(seed)
    case = Case(150, *kind, block_tokens, heads=heads, width=width, value=value, dtype=torch.bfloat16, softcap=softcap,
                sinks=sinks, rounded_from=rounded_from)  # fmt: skip
    case.query, case.keys, case.values = (sized(generator, size, part) for part in (case.query, case.keys, case.values))
    pieces = list(itertools.pairwise(places))
    more = 2.0**115 if size == "near the limit" else 1.0  # else e is raised to nothing for all of them
    with using_threads(threads):
        compiled.use_instructions("avx512")
        floats = attended(compiled, case, *pieces, more=more)
        compiled.use_instructions("amx_bf16" if tiles else "avx512_bf16")
        found = attended(compiled, case, *pieces, more=more)
        compiled.use_instructions(None)
    same = found.view(torch.int32) == floats.view(torch.int32)
    assert bool((same | (found.isnan() & floats.isnan())).all())


@pytest.mark.slow
def test_layers_in_one_call_and_rows_that_do_not_lie_side_by_side(kernel):
    generator = torch.Generator().manual_seed(1)
    x = numbers(generator, 40, 2, 600, any_size=False)[:, 1]
    weights = [numbers(generator, outputs, 700, any_size=False)[:, 50:650] for outputs in (33, 1, 100)]
    for out, weight in zip(kernels.linears(x, list(map(kernels.of_plain, weights))), weights, strict=True):
        few = torch.cat([kernels.linear(row, weight.contiguous()) for row in x.contiguous().split(3)])
        assert torch.equal(out, few)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 4, 5, 40])
def test_a_matrix_whose_inputs_come_first(kernel, rows):
    generator = torch.Generator().manual_seed(1)
    x, weight = numbers(generator, rows, 700, any_size=False), numbers(generator, 700, 130, any_size=False).T
    assert torch.equal(kernels.linear(x, weight), kernels.linear(x, weight.contiguous()))


@pytest.mark.slow
def test_an_engine_with_tiles_is_exact(kernel, tmp_path):
    """Prompts by tiles, tokens by vectors: the same to the bit in one piece, in many, and beside others."""
    path = tiny_models.write("llama", tmp_path, tiny_models.TinySize(context_tokens=256))
    prompts = [random_prompt(20 + 30 * seed, seed) for seed in range(3)]
    params = SamplingParams(temperature=0, max_new_tokens=8, logprobs=2, ignore_eos=True)
    found = []
    for step_tokens in (512, 19):
        memory = Memory(kv_cache_memory="8MiB", max_num_batched_tokens=step_tokens, max_num_seqs=8)
        with Engine(path, memory, dtype="bfloat16") as engine:
            assert (
                engine.exact
                and engine.parts.pieces.whole
                and "amx_bf16" in prompt_pieces.exact_name(engine.parts.pieces)
            )
            alone = [engine.generate([prompt], params)[0] for prompt in prompts]
            found += [bits(alone), bits(engine.generate(prompts, params))]
    assert all(way == found[0] for way in found)


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Play a processor with tiles, which kernels use or do not."""

    def play(instructions: str, refused: str = "") -> None:
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
        monkeypatch.setattr(kernels, "instructions", lambda: instructions)
        monkeypatch.setattr(kernels, "TILES_REFUSED", refused)
        monkeypatch.setattr(
            kernels, "_kernel", SimpleNamespace(multiplies_halves=lambda: True, use_instructions=lambda _: instructions)
        )

    return play


def test_few_rows_are_the_kernels_and_many_are_whose_tiles_they_are(processor):
    few, many = torch.zeros(16, 8, dtype=torch.bfloat16), torch.zeros(17, 8, dtype=torch.bfloat16)
    processor("avx512_bf16")
    assert kernels.torch_is_faster(torch.bfloat16) and not kernels.torch_is_faster(torch.float32)
    assert kernels.has_few_rows(few) and not kernels.has_few_rows(many)
    assert kernels.has_few_rows(many.float())
    processor("amx_bf16")
    assert not kernels.torch_is_faster(torch.bfloat16) and kernels.has_few_rows(many)


def test_what_is_said_where_tiles_failed_their_trial(processor, tmp_path):
    """The slower exact way, and why it is slower."""
    model = SimpleNamespace(
        device=torch.device("cpu"), dtype=torch.bfloat16, config=SimpleNamespace(model_type="llama")
    )
    processor("avx512_bf16", refused="this processor's tiles add up otherwise")
    assert "add up otherwise: prompts are computed by torch, in pieces of 256 tokens" in prompt_pieces.slow_path_reason(
        model
    )
    processor("amx_bf16")
    assert prompt_pieces.slow_path_reason(model) == ""
