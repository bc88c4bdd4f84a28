"""Linear layers with one input: computed together where a model asks for all of them, with the same results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from stowage.executor import kernels as native
from stowage.executor.determinism.row_invariance import RowInvariance
from stowage.weights.offloaded_parameter import nan_placeholder, offload, restore
from stowage.weights.quantized.blocks import BlockLinear
from stowage.weights.quantized.formats import Spec
from tests.block_formats import parts_of
from tests.native import needs_native

pytestmark = needs_native


class Net(nn.Module):
    """Three layers of one input, and what comes between them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(40, 30, bias=False), nn.Linear(40, 7, bias=False)
        self.third = nn.Linear(40, 30, bias=False)
        self.disturbs, self.skips = False, False
        self.to(dtype)

    def forward(self, x: Tensor) -> list[Tensor]:
        outs = [self.first(x)]
        if self.disturbs:
            x += 1
        if not self.skips:
            outs.append(self.second(x))
        return [*outs, self.third(x)]


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def net(request):
    return Net(request.param).requires_grad_(False)


@pytest.fixture
def calls(monkeypatch):
    """How many layers each call of the kernel computed."""
    counted: list[int] = []
    real = native._kernel.linear

    class Counting:
        def __getattr__(self, name):
            return getattr(native_kernel, name)

        def linear(self, *args):
            counted.append((len(args) - 8) // 9)
            real(*args)

    native_kernel = native._kernel
    monkeypatch.setattr(native, "_kernel", Counting())
    return counted


def run(net: Net, mode: RowInvariance, seed: int, rows: int = 3) -> tuple[list[Tensor], list[Tensor]]:
    """What the model gives under the mode, and layer by layer."""
    dtype = net.first.weight.dtype
    x = torch.randn(1, rows, 40, generator=torch.Generator().manual_seed(seed)).to(dtype)
    later = x + 1 if net.disturbs else x
    layers = [(net.first, x), *([] if net.skips else [(net.second, later)]), (net.third, later)]
    expected = [native.linear(given, layer.weight) for layer, given in layers]
    with torch.inference_mode(), mode:
        return net(x.clone()), expected


def agree(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_layers_of_one_input_are_computed_in_one_call_with_the_same_bits(net, calls):
    mode = RowInvariance(linear=True, exact=False)
    for seed, rows in enumerate((3, 1, 8, 2)):
        found, expected = run(net, mode, seed, rows)
        assert agree(found, expected)
        assert all(out.shape == (1, rows, layer.shape[0]) for out, layer in zip(found, net.parameters(), strict=True))
    calls.clear()
    with torch.inference_mode(), mode:
        net(torch.ones(1, 1, 40, dtype=net.first.weight.dtype))
    assert calls == [3]


def test_a_model_that_changes_the_input_in_between_is_left_alone(net):
    net.disturbs = True
    mode = RowInvariance(linear=True, exact=False)
    for seed in range(3):
        assert agree(*run(net, mode, seed))


def test_a_layer_that_is_not_asked_for_any_more(net, calls):
    mode = RowInvariance(linear=True, exact=False)
    for seed in range(2):
        assert agree(*run(net, mode, seed))
    net.skips = True
    for seed in range(3):
        assert agree(*run(net, mode, seed))
    calls.clear()
    net.skips = False
    with torch.inference_mode(), mode:
        net(torch.ones(1, 1, 40, dtype=net.first.weight.dtype))
    assert calls[0] == 1, "what was in vain once is not tried again"


def test_other_weights_of_the_same_layer_count(net):
    """A parameter whose numbers are elsewhere than before."""
    mode = RowInvariance(linear=True, exact=False)
    for seed in range(3):
        net.second.weight.data = net.second.weight.data + seed
        assert agree(*run(net, mode, seed))


def test_a_weight_that_is_away_is_not_computed_ahead(net, calls):
    """The second layer's comes when it is called, and goes again; then it stays."""
    mode, weight = RowInvariance(linear=True, exact=False), net.second.weight
    here = weight.data
    offloaded = nan_placeholder(here.shape, here.dtype)
    handles = [
        net.second.register_forward_pre_hook(lambda *_: restore(weight, here)),
        net.second.register_forward_hook(lambda *_: offload(weight, offloaded)),
    ]
    offload(weight, offloaded)
    for seed in range(3):
        with torch.inference_mode():
            x = torch.randn(1, 2, 40, generator=torch.Generator().manual_seed(seed)).to(here.dtype)
            expected = [native.linear(x, net.first.weight), native.linear(x, here), native.linear(x, net.third.weight)]
            with mode:
                found = net(x)
        assert all(map(torch.equal, found, expected))
    assert 3 not in calls
    for handle in handles:
        handle.remove()
    restore(weight, here)
    calls.clear()
    with torch.inference_mode(), mode:
        net(torch.ones(1, 1, 40, dtype=here.dtype))
    assert calls == [3]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_are_left_to_torch_unless_each_must_be_computed_alike(dtype, bias, monkeypatch):
    torch.manual_seed(3)
    layer = nn.Linear(40, 24, bias=bias).requires_grad_(False).to(dtype)
    torch_is_quick = dtype is torch.float32 or torch.cpu._is_avx512_bf16_supported()
    most = native._ROWS_FEW_BESIDE_TILES if native.torch_is_faster(dtype) else native.ROWS_FEW
    asked = []
    multiply = native._multiply
    monkeypatch.setattr(native, "_multiply", lambda x, *rest: (asked.append(len(x)), multiply(x, *rest)))
    for rows in (most, most + 1):
        x = torch.randn(rows, 40).to(dtype)
        ours = native.linear(x, layer.weight, layer.bias)
        few = rows <= most or not torch_is_quick
        for exact, kernels in ((False, few), (True, True)):
            asked.clear()
            with RowInvariance(linear=True, exact=exact):
                found = layer(x)
            assert asked == [rows] * kernels
            assert torch.equal(found, ours if kernels else layer(x))
        asked.clear()
        assert torch.equal(native.product(x, layer.weight, layer.bias), ours if few else layer(x))
        assert asked == [rows] * few


class BlockNet(Net):
    """The same with matrices in block formats, of which one has codes without a bias."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        for own, name, outputs in (("first", "q4_0", 30), ("second", "q8_0", 7), ("third", "q4_1", 30)):
            spec = Spec(name, outputs, 96)
            layer = BlockLinear(spec, None, dtype)
            for part, tensor in parts_of(spec, seed=outputs).items():
                setattr(layer, layer._names[part], nn.Parameter(tensor, requires_grad=False))
            setattr(self, own, layer)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", native.DTYPES)
def test_matrices_in_block_formats_and_inputs_that_are_rounded_once(dtype, int8, calls):
    """Of many rows too, if they are rounded."""
    net = BlockNet(dtype)
    mode = RowInvariance(linear=True, exact=True, int8=int8)
    layers = [net.first, net.second, net.third]
    for rows, together in ((3, [1, 1, 1]), (2, [3]), (native.ROWS_FEW + 6, [3] if int8 else [1, 1, 1]), (1, [3])):
        x = torch.randn(1, rows, 96, generator=torch.Generator().manual_seed(rows)).to(dtype)
        alone = [mode.matrix(x, layer.matrix) for layer in layers]
        assert all(matrix is not None and matrix.int8 == int8 for matrix in alone)
        expected = [native.linear_of(x, matrix) for matrix in alone if matrix is not None]
        calls.clear()
        with torch.inference_mode(), mode:
            found = net(x)
        assert agree(found, expected) and calls == together


def test_a_matrix_that_is_away_is_not_computed_ahead(calls):
    net, mode = BlockNet(torch.bfloat16), RowInvariance(linear=True, exact=True, int8=True)
    weight = next(net.second.parameters())
    here = weight.data
    x = torch.randn(1, 2, 96).bfloat16()
    with torch.inference_mode():
        for _ in range(2):
            with mode:
                expected = net(x)
        assert calls[-1] == 3
        net.second.register_forward_pre_hook(lambda *_: restore(weight, here))
        offload(weight, nan_placeholder(here.shape, here.dtype))
        calls.clear()
        with mode:
            found = net(x)
    assert agree(found, expected) and calls == [1, 1, 1]


def test_products_of_other_sorts_are_not_computed_together(calls):
    """A matrix of plain numbers with the same input: that is not rounded."""
    net, mode = BlockNet(torch.bfloat16), RowInvariance(linear=True, exact=True, int8=True)
    net.second = nn.Linear(96, 7, bias=False).bfloat16().requires_grad_(False)
    x = torch.randn(1, 2, 96).bfloat16()
    with torch.inference_mode():
        for _ in range(3):
            calls.clear()
            with mode:
                found = net(x)
            assert calls == [1, 1, 1]
            assert torch.equal(found[1], native.linear(x, net.second.weight))
