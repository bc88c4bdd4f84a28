"""The kernels that unpack published formats on GPUs: interpreted on the CPU against torch, to the bit, and compiled."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stowage.cuda.unpacking import launch
from stowage.weights.quantized.formats import BLOCKS, Spec, dequantized_by_torch, first_outputs, outputs_of
from tests.block_formats import SPECS, parts_of, raw_bytes
from tests.second_device.interpreting import require

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")]  # float16
KNOWN = [spec for spec in SPECS if spec.name in launch.FORMATS]
BITS = {torch.float32: torch.int32, torch.float16: torch.int16}
"""The interpreter cuts bfloat16 off instead of rounding; see tests/cuda."""


def assert_unpacks(spec: Spec, parts: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    assert launch._fits(spec, parts, dtype)
    found, expected = launch.unpack(spec, parts, dtype), dequantized_by_torch(spec, parts, dtype)
    same = found.view(BITS[dtype]) == expected.view(BITS[dtype])
    assert bool((same | (found.isnan() & expected.isnan())).all()), spec


@pytest.mark.parametrize("spec", KNOWN, ids=str)
@pytest.mark.usefixtures("interpreter")
def test_every_format(spec: Spec) -> None:
    parts = parts_of(spec, 3)
    assert_unpacks(spec, parts, torch.float16)
    assert_unpacks(*outputs_of(spec, parts, 128, spec.outputs), torch.float32)


@st.composite
def matrices(draw: st.DrawFn) -> Spec:
    name = draw(st.sampled_from(sorted({spec.name for spec in KNOWN})))
    outputs, wide = draw(st.integers(1, 40)), 256 if name.endswith(("_k", "_xs")) else 32
    inputs = wide * draw(st.integers(1, 5))
    if name in BLOCKS or name == "mxfp4":
        return Spec(name, outputs, inputs)
    if name == "nvfp4":
        return Spec(name, outputs, inputs, block_rows=draw(st.sampled_from([0, 1, 7])), divides=draw(st.booleans()))
    scales = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    if name in ("fp8", "s8", "u8"):
        block_rows, group = draw(st.sampled_from([0, 1, 7, 128])), draw(st.sampled_from([0, 32, 64, 128, 1000]))
        ragged = inputs - draw(st.integers(0, 31))
        powers = [scales] if name != "fp8" else [scales, torch.uint8]
        return Spec(name, outputs, ragged, group, block_rows, scale_dtype=draw(st.sampled_from(powers)))
    group = draw(st.sampled_from([size for size in (0, 32, 64, 96, 128) if not size or inputs % size == 0]))
    return Spec(name, 8 * outputs, inputs, group, zeros=draw(st.booleans()), scale_dtype=scales)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(spec=matrices(), seed=st.integers(0, 99), dtype=st.sampled_from(list(BITS)))
@pytest.mark.usefixtures("interpreter")
def test_any_matrix(spec: Spec, seed: int, dtype: torch.dtype) -> None:
    assert_unpacks(spec, parts_of(spec, seed), dtype)


@pytest.mark.parametrize(
    "spec",
    [
        Spec("fp8", 16, 32, 0, 0),
        Spec("mxfp4", 16, 32),
        Spec("mxfp4_block", 16, 32),
        *(Spec("nvfp4", 16, 512, block_rows=0, divides=divides) for divides in (False, True)),
    ],
    ids=str,
)
@pytest.mark.usefixtures("interpreter")
def test_every_code_and_exponent(spec: Spec) -> None:
    """Infinities, NaN, denormals and both zeros."""
    bytes = torch.arange(512, dtype=torch.int64).to(torch.uint8)
    parts = {part: raw_bytes(*shape).view(-1) for part, (shape, _) in spec.tensors().items() if shape}
    for part, values in parts.items():
        values.copy_(bytes.repeat(-(-values.numel() // 512))[: values.numel()])
        parts[part] = values.view(spec.tensors()[part][0])
    if spec.name == "fp8":
        parts = {"codes": parts["codes"].view(torch.float8_e4m3fn), "scales": torch.tensor([[0.37]])}
    elif spec.name == "nvfp4":
        parts |= {"scales": parts["scales"].view(torch.float8_e4m3fn), "globals": torch.tensor([0.37])}
    assert_unpacks(spec, parts, torch.float32)


@pytest.mark.usefixtures("interpreter")
def test_what_differs_is_left_to_torch(caplog: pytest.LogCaptureFixture) -> None:
    spec = Spec("q4_0", 16, 64)
    parts = parts_of(spec)
    assert launch.Unpacking(dequantized_by_torch, first_outputs).takes(spec, parts, torch.float32)
    off = launch.Unpacking(lambda *given: dequantized_by_torch(*given) + 1, first_outputs)
    assert not off.takes(spec, parts, torch.float32)
    assert "the kernel that unpacks q4_0 cannot be used here" in caplog.text
    assert not off.takes(spec, parts, torch.float32)
    assert caplog.text.count("cannot be used here") == 1, "said once"
    trusted = launch.Unpacking(dequantized_by_torch, first_outputs)
    assert not trusted.takes(spec, {"": parts[""].t()}, torch.float32), "lies otherwise"
    assert not trusted.takes(replace(spec, name="f16"), parts, torch.float32)
    assert not trusted.takes(Spec("iq2_s", 16, 256), parts_of(Spec("iq2_s", 16, 256)), torch.float32)
    assert not trusted.takes(Spec("fp8", 16, 96, 48), parts_of(Spec("fp8", 16, 96, 48)), torch.float32)


def test_it_compiles_for_gpus(tmp_path: Path) -> None:
    require()
    script = Path(__file__).parent / "compile_unpacking.py"
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2 * len(KNOWN)
