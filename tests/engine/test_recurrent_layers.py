"""Functions of recurrent layers by the kernels: only where they compute the same, and only in an engine's forward."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from stowage.executor import kernels
from stowage.executor.batch import current
from stowage.executor.fused import recurrent_layers
from stowage.testing import tiny_models
from tests.native import needs_native

pytestmark = needs_native
DELTAS = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
KIMIS = ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")
SPACES = ("mamba2_chunk_scan", "mamba2_selective_state_update")
CONVOLUTIONS = ("causal_conv1d_fn", "causal_conv1d_update")
OURS = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid"), DELTAS + CONVOLUTIONS),
    "kimi_linear": KIMIS + CONVOLUTIONS,
    **dict.fromkeys(
        ("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"), SPACES + CONVOLUTIONS
    ),
    **dict.fromkeys(("jamba", "mamba", "falcon_mamba", "zamba", "lfm2", "lfm2_moe"), CONVOLUTIONS),
}
SCANNED = ("jamba", "mamba", "falcon_mamba", "zamba")
"""By torch, whose states of Mamba's first kind decay number by number."""


class Layer(nn.Module):
    """Of a module of its own, which the tests fill."""


@pytest.fixture
def home(monkeypatch):
    module = SimpleNamespace(__name__="tests.some_modeling")
    monkeypatch.setitem(recurrent_layers.sys.modules, module.__name__, module)
    monkeypatch.setattr(Layer, "__module__", module.__name__)
    return module


@pytest.mark.parametrize("family", OURS)
def test_every_function_of_transformers_is_found(family):
    """If this fails, Transformers calls it otherwise now, or computes something else."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    names = [name for name in recurrent_layers._KNOWN if name in vars(module) and name != recurrent_layers.ROTARY]
    assert sorted(names) == sorted(OURS[family])
    for name in names:
        assert recurrent_layers._agrees(name, vars(module)[name]), name
    model = tiny_models.build(family)
    assert recurrent_layers.whole_prompts(model) == (family not in SCANNED)
    if family not in SCANNED:
        assert not [name for name in recurrent_layers._NOT_OURS if name in vars(module)]


def convolve(x, weight, bias=None, activation=None, **kwargs):
    out = F.conv1d(x, weight[:, None], bias, padding=weight.shape[-1] - 1, groups=x.shape[1])[:, :, : x.shape[2]]
    return out if activation is None else F.silu(out)


def test_engines_share_a_function_and_outside_of_them_it_is_what_it_was(home, forward, monkeypatch):
    def own(hidden_states, weight, bias=None, activation=None, **kwargs):
        seen.append("own")
        return convolve(hidden_states, weight, bias, activation)

    seen: list[str] = []
    home.causal_conv1d_fn = own
    x, weight = torch.randn(1, 6, 5), torch.randn(6, 4)
    model = nn.Sequential(Layer(), Layer())
    recurrent_layers.install(model)
    recurrent_layers.install(model)
    recurrent_layers.uninstall(model)
    assert home.causal_conv1d_fn is not own
    seen.clear()
    assert torch.allclose(home.causal_conv1d_fn(x, weight), convolve(x, weight), atol=1e-6) and not seen
    double = home.causal_conv1d_fn(x.double(), weight.double())
    assert double.dtype is torch.float64 and seen == ["own"]
    for activation in ("gelu", "relu"):
        home.causal_conv1d_fn(x, weight, activation=activation)
    home.causal_conv1d_fn(x, weight, None, "silu")  # by place, which none of Transformers' does
    forward.kernels = False  # an engine on a GPU, or without kernels
    home.causal_conv1d_fn(x, weight)
    token = current.set(None)
    home.causal_conv1d_fn(x, weight)
    current.reset(token)
    assert seen == ["own"] * 6
    recurrent_layers.uninstall(model)
    assert home.causal_conv1d_fn is own
    recurrent_layers.install(model)
    recurrent_layers.uninstall(model)
    assert seen == ["own"] * 6, "it was tried once"


def test_what_computes_something_else_keeps_its_own(home, forward):
    def more(hidden_states, weight, bias=None, activation=None, seq_idx=None, **kwargs):
        return convolve(hidden_states, weight, bias, activation)

    def other(hidden_states, weight, bias=None, activation=None, **kwargs):
        return convolve(hidden_states, weight, bias, activation) * 1.001

    def fewer(hidden_states, weight):
        return convolve(hidden_states, weight)

    def delta(query, key, value, g, beta, initial_state=None, output_final_state=False, **kwargs):
        raise ValueError("it wants something else")

    for name, function in (
        ("causal_conv1d_fn", more),
        ("causal_conv1d_fn", other),
        ("causal_conv1d_fn", fewer),
        ("torch_chunk_gated_delta_rule", delta),
    ):
        setattr(home, name, function)
        recurrent_layers.install(Layer())
        assert getattr(home, name) is function
        assert not recurrent_layers.whole_prompts(Layer())
        recurrent_layers.uninstall(Layer())
        delattr(home, name)


@pytest.mark.parametrize("dtype", kernels.DTYPES)
@torch.inference_mode()
def test_a_prompt_is_what_its_tokens_are(dtype, forward):
    """A state is changed where it is, and what a prompt leaves is what its tokens would have."""
    model = tiny_models.build("qwen3_next")
    recurrent_layers.install(model)
    try:
        generator = torch.Generator().manual_seed(1)
        q, k, v = (torch.randn(1, 20, 2, 16, generator=generator).to(dtype) for _ in range(3))
        g, beta = -torch.rand(1, 20, 2, generator=generator), torch.rand(1, 20, 2, generator=generator).to(dtype)
        more = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        out, state = qwen.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, initial_state=None, **more)
        mine = torch.zeros(1, 2, 16, 16)
        for at in range(20):
            one = (x[:, at : at + 1] for x in (q, k, v, g, beta))
            found, same = qwen.torch_recurrent_gated_delta_rule(*one, initial_state=mine, **more)
            assert torch.equal(found, out[:, at : at + 1]) and same is mine
        assert torch.equal(mine, state)
        far = torch.zeros(4, 2, 16, 16, dtype=torch.bfloat16)[::2]  # what kernels cannot change
        qwen.torch_recurrent_gated_delta_rule(
            *(x[:, :1].expand(2, *x[:, :1].shape[1:]) for x in (q, k, v, g, beta)), initial_state=far, **more
        )
        assert not far.any()
    finally:
        recurrent_layers.uninstall(model)
