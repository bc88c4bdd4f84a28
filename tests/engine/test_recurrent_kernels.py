"""Kernels of layers with a state: right, and a token's bits depend on nothing but its sequence up to it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stowage.executor import kernels
from stowage.executor.fused import recurrent_kernels
from tests.native import needs_native
from tests.threads import using_threads

pytestmark = needs_native


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def deltas(batch: int, tokens: int, heads: int, keys: int, values: int, per_key: bool, dtype: torch.dtype):
    """query, key, value, decay and beta; of a decay some are steep, and one is none."""
    q, k = (numbers(batch, tokens, heads, keys, seed=at, dtype=dtype) for at in (1, 2))
    decay = -numbers(batch, tokens, heads, *([keys] if per_key else []), seed=4).exp()
    decay.view(-1)[::7] *= 40
    decay.view(-1)[0] = 0.0
    value = numbers(batch, tokens, heads, values, seed=3, dtype=dtype)
    return q, k, value, decay, numbers(batch, tokens, heads, seed=5).sigmoid().to(dtype)


def exact_delta(q, k, v, decay, beta, state, normed):
    """As it is defined, in float64."""
    q, k, v, decay, beta, state = (x.double() for x in (q, k, v, decay, beta, state))
    if normed:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q = q / math.sqrt(q.shape[-1])
    decay = decay.exp() if decay.dim() == 4 else decay.exp()[..., None]
    outs = []
    for t in range(q.shape[1]):
        state = state * decay[:, t, :, :, None]
        change = (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * change[:, :, None]
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outs, 1), state


def close(found: Tensor, exact: Tensor, roundings: int = 1) -> bool:
    bound = 1e-5 if found.dtype is torch.float32 else roundings * 2**-8
    return bool((found.double() - exact).abs().max() <= bound * (1 + exact.abs().max()))


def check_that_cuts_change_nothing(compute, states: Tensor, tokens: int, threads: int, data: st.DataObject) -> None:
    """``compute(sequences, tokens, state)`` of all sequences at once, and of the second alone, in pieces and by so many
    threads, from ``states``.
    """
    everything = slice(None)
    whole, state = states.clone(), states[1:2].clone()
    expected = compute(everything, everything, whole)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(tokens - 1, 1)), max_size=4)) | {0, tokens})
    with using_threads(threads):
        found = [compute(slice(1, 2), slice(*ends), state) for ends in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(found, 1), expected[1:2]) and torch.equal(state, whole[1:2])


@pytest.mark.parametrize("dtype", kernels.DTYPES)
@pytest.mark.parametrize("per_key", [False, True])
@pytest.mark.parametrize(("keys", "values"), [(1, 1), (5, 7), (16, 36), (64, 64), (128, 200)])
def test_delta_is_right(keys, values, per_key, dtype, instructions):
    args = deltas(2, 9, 3, keys, values, per_key, dtype)
    for normed in (True, False):
        if not normed:  # a key is as long as it is: else a state grows without bounds
            args = (args[0], (args[1].float() / math.sqrt(keys)).to(dtype), *args[2:])
        state = numbers(2, 3, keys, values, seed=6)
        exact, after = exact_delta(*args, state, normed)
        found = recurrent_kernels.delta(*args, state, normed=normed)
        assert found.dtype is dtype and close(found, exact) and close(state, after)


def test_a_delta_whose_decay_grows_is_right():
    q, k, v, decay, beta = deltas(1, 4, 1, 24, 20, True, torch.float32)
    decay = decay.abs().clamp(max=1)
    state = numbers(1, 1, 24, 20, seed=6)
    exact, after = exact_delta(q, k, v, decay, beta, state, True)
    assert close(recurrent_kernels.delta(q, k, v, decay, beta, state, normed=True), exact) and close(state, after)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 40),
    heads=st.integers(1, 5),
    keys=st.integers(1, 70),
    values=st.integers(1, 150),
    per_key=st.booleans(),
    half=st.booleans(),
    threads=st.integers(1, 3),
    data=st.data(),
)
def test_a_delta_is_the_same_however_it_is_cut(tokens, heads, keys, values, per_key, half, threads, data):
    dtype = torch.bfloat16 if half else torch.float32
    args = deltas(3, tokens, heads, keys, values, per_key, dtype)
    states = numbers(3, heads, keys, values, seed=6)

    def compute(sequences, tokens, state):
        return recurrent_kernels.delta(*(x[sequences, tokens] for x in args), state, normed=True)

    check_that_cuts_change_nothing(compute, states, tokens, threads, data)


def spaces(batch: int, tokens: int, heads: int, groups: int, width: int, states: int, dtype: torch.dtype):
    """x, dt, a, b, c, d, bias; a dt far above what a softplus changes is among them."""
    x, dt = numbers(batch, tokens, heads, width, seed=1, dtype=dtype), numbers(batch, tokens, heads, seed=2)
    dt.view(-1)[::11] += 25
    b, c = (numbers(batch, tokens, groups, states, seed=at, dtype=dtype) for at in (3, 4))
    return (x, dt.to(dtype), -numbers(heads, seed=5).exp(), b, c, numbers(heads, seed=6), numbers(heads, seed=7))


def exact_scan(x, dt, a, b, c, d, bias, state, softplus, least, most):
    dt = dt + bias.to(dt.dtype)
    dt = (F.softplus(dt) if softplus else dt).clamp(least, most)
    fold = x.shape[2] // b.shape[2]
    x, dt, a, b, c, d, state = (part.double() for part in (x, dt, a, b, c, d, state))
    b, c = (part.repeat_interleave(fold, 2) for part in (b, c))
    outs = []
    for t in range(x.shape[1]):
        added = (x[:, t] * dt[:, t, :, None])[..., None] * b[:, t, :, None]
        state = state * (dt[:, t] * a).exp()[..., None, None] + added
        outs.append(torch.einsum("bhpn,bhn->bhp", state, c[:, t]) + x[:, t] * d[:, None])
    return torch.stack(outs, 1), state


@pytest.mark.parametrize("dtype", kernels.DTYPES)
@pytest.mark.parametrize(("width", "states"), [(1, 1), (3, 5), (8, 16), (20, 130)])
def test_a_scan_is_right(width, states, dtype, instructions):
    args = spaces(2, 37, 6, 2, width, states, dtype)
    for softplus, least, most in ((True, 0.0, math.inf), (True, 0.2, 0.9), (False, -0.1, 0.4)):
        state = numbers(2, 6, width, states, seed=8)
        exact, after = exact_scan(*args, state, softplus, least, most)
        found = recurrent_kernels.scan(*args, state, softplus=softplus, least=least, most=most)
        assert found.dtype is torch.float32 and torch.allclose(found.double(), exact, rtol=1e-4, atol=1e-4)
        assert torch.allclose(state.double(), after, rtol=1e-4, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 50),
    groups=st.integers(1, 3),
    fold=st.integers(1, 3),
    width=st.integers(1, 20),
    states=st.integers(1, 140),
    half=st.booleans(),
    threads=st.integers(1, 3),
    data=st.data(),
)
def test_a_scan_is_the_same_however_it_is_cut(tokens, groups, fold, width, states, half, threads, data):
    dtype, heads = torch.bfloat16 if half else torch.float32, groups * fold
    x, dt, a, b, c, d, bias = spaces(3, tokens, heads, groups, width, states, dtype)

    def compute(sequences, tokens, state):
        x_, dt_, b_, c_ = (part[sequences, tokens] for part in (x, dt, b, c))
        return recurrent_kernels.scan(x_, dt_, a, b_, c_, d, bias, state, softplus=True, least=0.0, most=math.inf)

    check_that_cuts_change_nothing(compute, numbers(3, heads, width, states, seed=8), tokens, threads, data)


@pytest.mark.parametrize("dtype", kernels.DTYPES)
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(("channels", "taps", "more"), [(1, 1, 1), (7, 2, 0), (40, 4, 1), (600, 4, 0), (300, 16, 3)])
def test_a_convolution_is_right_and_the_same_token_by_token(channels, taps, more, silu, dtype, instructions):
    x, weight = (numbers(2, 11, channels, seed=1, dtype=dtype), numbers(channels, taps, seed=2, dtype=dtype))
    bias = numbers(channels, seed=3, dtype=dtype)
    exact = F.conv1d(
        F.pad(x.double().transpose(1, 2), (taps - 1, 0)), weight.double()[:, None], bias.double(), groups=channels
    )
    exact = F.silu(exact) if silu else exact
    found = recurrent_kernels.convolve(x.transpose(1, 2), weight, bias, None, silu=silu)
    assert found.dtype is dtype and close(found, exact, 1 + silu)
    assert torch.equal(recurrent_kernels.convolve(x.transpose(1, 2).contiguous(), weight, bias, None, silu=silu), found)
    if taps - 1 + more == 0:
        return
    state = torch.zeros(2, channels, taps - 1 + more, dtype=dtype)
    for t in range(11):
        one = recurrent_kernels.convolve(x[:, t : t + 1].transpose(1, 2), weight, bias, state, silu=silu)
        assert torch.equal(one, found[:, :, t : t + 1])
    kept = F.pad(x.transpose(1, 2), (state.shape[2], 0))[:, :, -state.shape[2] :]
    assert torch.equal(state, kept)


def test_states_of_a_batch_may_lie_anywhere():
    """Rows of a pool, among other things, in any order: as if they were gathered, and nothing else is touched."""
    rows = torch.tensor([4, 1, 3])
    calls = {
        (2, 8, 12): lambda state: recurrent_kernels.delta(
            *deltas(3, 1, 2, 8, 12, False, torch.float32), state, normed=True
        ),
        (4, 5, 9): lambda state: recurrent_kernels.scan(
            *spaces(3, 1, 4, 2, 5, 9, torch.float32), state, softplus=True, least=0.0, most=math.inf
        ),
        (300, 3): lambda state: recurrent_kernels.convolve(
            numbers(3, 300, 1, seed=1), numbers(300, 4, seed=2), None, state, silu=True
        ),
    }
    for shape, call in calls.items():
        size = math.prod(shape)
        pool = numbers(6, size + 7, seed=9)
        before, view = pool.clone(), pool[:, 5 : 5 + size].unflatten(1, shape)
        gathered = view[rows]
        expected = call(gathered)
        assert torch.equal(call(recurrent_kernels.StateRows(view, rows)), expected) and torch.equal(
            view[rows], gathered
        )
        view[rows] = before[:, 5 : 5 + size].unflatten(1, shape)[rows]
        assert torch.equal(pool, before)


def test_a_convolution_without_bias_and_what_it_refuses():
    x, weight = numbers(1, 5, 6, seed=1), numbers(5, 4, seed=2)
    nothing = recurrent_kernels.convolve(x, weight, torch.zeros(5), None, silu=True)
    assert torch.equal(recurrent_kernels.convolve(x, weight, None, None, silu=True), nothing)
    for state in (torch.zeros(1, 5, 4), torch.zeros(1, 5, 2)):
        with pytest.raises(ValueError, match="a state of all of them but one"):
            recurrent_kernels.convolve(x[..., : 6 if state.shape[2] == 4 else 1], weight, None, state, silu=True)
    with pytest.raises(ValueError, match="up to 16 taps"):
        recurrent_kernels.convolve(x, numbers(5, 17, seed=2), None, None, silu=True)
