"""Fused functions of recurrent layers, and prompts' rotary embeddings: one kernel call each, where it computes the
same.

Transformers' models call functions of their own modules, which are written in torch. A delta rule needs 25 of torch's
functions for a generated token. A scan of Mamba-2's kind makes a number for every two tokens of a chunk, head and
number of its state. A rotary embedding (``rotary``) reads and writes queries and keys seven times.

Owns which functions these are, and what their modules call while an engine is open. Outside of an engine's forward
they call their own functions. A function is replaced if it has a known name, no unknown parameters, and gives what the
kernel gives for random numbers: the same but for the order of sums.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stowage.executor.batch import current
from stowage.executor.fused import recurrent_kernels
from stowage.executor.fused.rotary import NAME as ROTARY
from stowage.executor.fused.rotary import Rotary, alike, numbers
from stowage.executor.replay.calls.recording import one_call
from stowage.models.compat import in_value_heads

Call = Callable[..., Any]

_users: dict[Any, int] = {}
_agreed: dict[Call, bool] = {}


def install(model: nn.Module) -> None:
    """Several engines may share a model, and several models their functions."""
    for name, module in _homes(model):
        key = (module.__name__, name)
        if key not in _users:
            if not _is_ours(name, module):
                continue
            setattr(module, name, _instead_of(name, vars(module)[name]))
        _users[key] = _users.get(key, 0) + 1


def uninstall(model: nn.Module) -> None:
    """Take one ``install`` back; after the last one every module has its own functions."""
    for name, module in _homes(model):
        key = (module.__name__, name)
        if key not in _users:
            continue
        _users[key] -= 1
        if not _users[key]:
            del _users[key]
            setattr(module, name, vars(module)[name].__wrapped__)


def whole_prompts(model: nn.Module) -> bool:
    """Whether prompts seem to be computed as generated tokens are: all recurrent layers' functions are ours."""
    homes = [(name, module) for name, module in _homes(model) if name != ROTARY]
    others = any(name in vars(module) for _, module in homes for name in _NOT_OURS)
    return bool(homes) and not others and all(_is_ours(name, module) for name, module in homes)


def _is_ours(name: str, module: Any) -> bool:
    """Whether the kernels compute what the module's function does."""
    function = vars(module)[name]
    if (module.__name__, name) in _users:
        return True
    if function not in _agreed:
        _agreed[function] = _agrees(name, function)
    return _agreed[function]


def _homes(model: nn.Module) -> list[tuple[str, Any]]:
    """The known functions of the modules in which the model's classes are, and the modules."""
    modules = {type(part).__module__: None for part in model.modules()}
    found = [sys.modules[module] for module in modules if module in sys.modules]
    return [(name, module) for module in found for name in _KNOWN if callable(vars(module).get(name))]


def _instead_of(name: str, own: Call) -> Call:
    takes, compute = _KNOWN[name].takes, one_call(_KNOWN[name].compute, in_place=True)

    @wraps(own)
    def function(*args: Any, **kwargs: Any) -> Any:
        step = current.get(None)
        if step is None or not step.kernels or not takes(*args, **kwargs):
            return own(*args, **kwargs)
        gate = kwargs.pop("z", None)
        found = compute(*args, **kwargs)
        return found if gate is None else found * F.silu(gate)

    return function


def _is_state(state: Tensor | None) -> bool:
    """Whether the kernels can change ``state`` where it is: each part of a batch in one piece."""
    return state is None or (state.dtype is torch.float32 and _in_one_piece(state))


def _in_one_piece(state: Tensor) -> bool:
    """Whether each part of a batch does. Asked of its form alone: what is done to tensors is recorded."""
    numbers = 1
    for size, stride in zip(reversed(state.shape[1:]), reversed(state.stride()[1:]), strict=True):
        if size != 1 and stride != numbers:
            return False
        numbers *= size
    return True


class _Delta:
    """Qwen3-Next's and its likes', and Kimi-Linear's: there each key decays by itself."""

    parameters = frozenset(
        "query key value g beta chunk_size initial_state output_final_state use_qk_l2norm_in_kernel kwargs".split()
    )

    @staticmethod
    def takes(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *rest: Any, **more: Any) -> bool:
        grouped = query.shape[:3] == key.shape[:3] and key.shape[2] > 0 and value.shape[2] % key.shape[2] == 0
        heads = grouped and value.shape[:3] == beta.shape == g.shape[:3] and key.shape[:2] == value.shape[:2]
        if rest:
            return False
        if more.get("initial_state") is not None and not more.get("output_final_state", False):
            return False  # a state that is to stay as it is
        return heads and g.dim() in (3, 4) and alike(query, key, value) and _is_state(more.get("initial_state"))

    @staticmethod
    def compute(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **more: Any) -> Any:
        query, key = in_value_heads(query, key, value)
        state = more.get("initial_state")
        if state is None:
            state = torch.zeros((query.shape[0], query.shape[2], query.shape[3], value.shape[3]))
        normed = more.get("use_qk_l2norm_in_kernel", False)
        out = recurrent_kernels.delta(query, key, value, g, beta, state, normed=normed)
        return out, state if more.get("output_final_state", False) else None

    @staticmethod
    def agrees(own: Call) -> bool:
        more: dict[str, Any] = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        agreed = False
        kinds = ((1, False, 2), (70, False, 2), (1, True, 2), (70, True, 2), (1, False, 4), (70, False, 4))
        for tokens, keys, heads in kinds:
            args = [numbers(2, tokens, 2, 8, seed=at) for at in range(2)] + [numbers(2, tokens, heads, 12, seed=2)]
            decay = -numbers(2, tokens, heads, *([8] if keys else []), seed=3).abs()
            args += [decay, numbers(2, tokens, heads, seed=4).sigmoid()]
            state = numbers(2, heads, 8, 12, seed=5)
            try:
                expected = own(*args, initial_state=state.clone(), **more)
            except (RuntimeError, ValueError, TypeError, IndexError):  # not this kind of decay, or of heads
                continue
            agreed = _same(expected, _Delta.compute(*args, initial_state=state.clone(), **more))
            if not agreed:
                return False
        return agreed


class _Update:
    """A generated token of a state space with one decay per head: ``dt``, ``A``, ``D`` and ``dt_bias`` are the heads'
    own, expanded. ``state`` is changed in place. What comes out is float32, as of a prompt; ``z``, which is applied to
    it afterwards, is of a prompt's tokens by the model itself.
    """

    parameters = frozenset("state hidden_states dt A B C D dt_bias dt_softplus z kwargs".split())

    @staticmethod
    def takes(
        state: Tensor, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *rest: Any, **more: Any
    ) -> bool:
        if len(rest) > 1 or state.dim() != 4 or B.dim() != 3:
            return False
        parts = [part for part in (*rest, more.get("D"), more.get("dt_bias")) if part is not None]
        alone = dt.stride(-1) == 0 and A.stride()[1:] == (0, 0) and all(part.stride(-1) == 0 for part in parts)
        return alone and alike(hidden_states, dt, B, C) and _is_state(state)

    @staticmethod
    def compute(
        state: Tensor, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *rest: Any, **more: Any
    ) -> Tensor:
        skip, bias = (*rest, more.get("D"))[0], more.get("dt_bias")
        out = recurrent_kernels.scan(
            *(hidden_states[:, None], dt[:, None, :, 0], A[:, 0, 0].float().contiguous(), B[:, None], C[:, None]),
            d=_of_heads(None if skip is None else skip[:, 0], A),
            bias=_of_heads(None if bias is None else bias[:, 0], A),
            state=state,
            softplus=more.get("dt_softplus", False),
            least=float("-inf"),
            most=float("inf"),
        )
        return out[:, 0]

    @staticmethod
    def agrees(own: Call) -> bool:
        state, (x, dt, a, b, c, d, bias) = numbers(2, 4, 3, 8, seed=9), _space(1)
        args = (x[:, 0], dt.transpose(1, 2).expand(-1, -1, 3), a[:, None, None].expand(-1, 3, 8), b[:, 0], c[:, 0])
        more: dict[str, Any] = {
            "D": d[:, None].expand(-1, 3),
            "dt_bias": bias[:, None].expand(-1, 3),
            "dt_softplus": True,
        }
        states = state.clone(), state.clone()
        found = [compute(at, *args, **more) for compute, at in zip((own, _Update.compute), states, strict=True)]
        return _same((found[0], states[0]), (found[1], states[1]))


class _Scan:
    """A prompt of such a state space."""

    parameters = frozenset(
        "hidden_states dt A B C chunk_size D z dt_bias initial_states dt_softplus dt_limit return_final_states "
        "kwargs".split()
    )

    @staticmethod
    def takes(hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *rest: Any, **more: Any) -> bool:
        if more.get("z") is not None or len(rest) > 1 or dt.dim() != 3 or A.dim() != 1 or B.dim() != 4:
            return False
        heads = [part.dim() == 1 for part in (more.get("D"), more.get("dt_bias")) if part is not None]
        return all(heads) and alike(hidden_states, dt, B, C) and _is_state(more.get("initial_states"))

    @staticmethod
    def compute(hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *rest: Any, **more: Any) -> Any:
        state = more.get("initial_states")
        if state is None:
            batch, _, heads, width = hidden_states.shape
            state = torch.zeros((batch, heads, width, B.shape[3]))
        least, most = more.get("dt_limit", (0.0, float("inf")))
        out = recurrent_kernels.scan(
            *(hidden_states, dt, A.float().contiguous(), B, C),
            d=_of_heads(more.get("D"), A),
            bias=_of_heads(more.get("dt_bias"), A),
            state=state,
            softplus=more.get("dt_softplus", False),
            least=least,
            most=most,
        )
        return (out, state) if more.get("return_final_states", False) else out

    @staticmethod
    def agrees(own: Call) -> bool:
        x, dt, a, b, c, d, bias = _space(20)
        limited: dict[str, Any] = {"dt_limit": (0.3, 0.9)}
        for limits in ({}, limited):
            more: dict[str, Any] = limits | {"D": d, "dt_bias": bias, "dt_softplus": True, "return_final_states": True}
            states = [numbers(2, 4, 3, 8, seed=9) for _ in range(2)]
            expected = own(x, dt, a, b, c, 16, initial_states=states[0], **more)
            if not _same(expected, _Scan.compute(x, dt, a, b, c, 16, initial_states=states[1], **more)):
                return False
        return True


class _Convolve:
    """A prompt's convolution, with nothing before it."""

    parameters = frozenset("hidden_states weight bias activation kwargs".split())

    @staticmethod
    def takes(hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any, **more: Any) -> bool:
        known = not rest and more.get("activation") in (None, "silu", "swish") and weight.dim() == 2
        taps = known and weight.is_contiguous() and weight.shape[1] <= recurrent_kernels.TAPS_MAX
        return taps and alike(hidden_states, weight, bias)

    @staticmethod
    def compute(hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, **more: Any) -> Tensor:
        return recurrent_kernels.convolve(hidden_states, weight, bias, None, silu=more.get("activation") is not None)

    @staticmethod
    def agrees(own: Call) -> bool:
        x, weight, bias = numbers(2, 20, 9, seed=1), numbers(20, 4, seed=2), numbers(20, seed=3)
        cases: list[tuple[Any, Any]] = [(None, None), (bias, "silu")]
        return all(
            _same((own(x, weight, b, activation=act),), (_Convolve.compute(x, weight, b, activation=act),))
            for b, act in cases
        )


class _ConvolveOne:
    """A generated token's, which is put into what came before."""

    parameters = frozenset("hidden_states conv_state weight bias activation".split())

    @staticmethod
    def takes(
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> bool:
        there = hidden_states.shape[2] == 1 and _in_one_piece(conv_state)
        known = there and conv_state.shape[2] >= weight.shape[-1] - 1 and alike(hidden_states, conv_state)
        return known and _Convolve.takes(hidden_states, weight, bias, activation=activation)

    @staticmethod
    def compute(
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        return recurrent_kernels.convolve(hidden_states, weight, bias, conv_state, silu=activation is not None)

    @staticmethod
    def agrees(own: Call) -> bool:
        x, weight, bias = numbers(2, 20, 1, seed=1), numbers(20, 4, seed=2), numbers(20, seed=3)
        for before in (3, 4):
            states = [numbers(2, 20, before, seed=4) for _ in range(2)]
            expected = own(x, states[0], weight, bias, "silu"), states[0]
            if not _same(expected, (_ConvolveOne.compute(x, states[1], weight, bias, "silu"), states[1])):
                return False
        return True


_KNOWN: dict[str, Any] = {
    "torch_chunk_gated_delta_rule": _Delta,
    "torch_recurrent_gated_delta_rule": _Delta,
    "chunk_kimi_delta_attention": _Delta,
    "recurrent_kimi_delta_attention": _Delta,
    "mamba2_selective_state_update": _Update,
    "mamba2_chunk_scan": _Scan,
    "causal_conv1d_fn": _Convolve,
    "causal_conv1d_update": _ConvolveOne,
    ROTARY: Rotary,
}

_NOT_OURS = ("mamba_selective_scan", "mamba_selective_state_update")
"""Functions of state spaces in which every number of a state decays by itself."""


def _of_heads(numbers: Tensor | None, like: Tensor) -> Tensor:
    """A number of float32 for each head; 0 where there are none."""
    return torch.zeros(like.shape[0]) if numbers is None else numbers.float().contiguous()


@torch.inference_mode()
def _agrees(name: str, own: Call) -> bool:
    known = set(inspect.signature(own).parameters) <= _KNOWN[name].parameters
    try:
        return known and bool(_KNOWN[name].agrees(own))
    except (RuntimeError, ValueError, TypeError, IndexError):  # it is called otherwise than those that are known
        return False


def _same(expected: Any, found: Any) -> bool:
    return len(expected) == len(found) and all(
        a.shape == b.shape and a.dtype is b.dtype and torch.allclose(a, b, rtol=1e-4, atol=1e-5)
        for a, b in zip(expected, found, strict=True)
    )


def _space(tokens: int) -> tuple[Tensor, ...]:
    """Numbers of a state space with 4 heads of 3 in 2 groups, and 8 states: x, dt, a, b, c, d and a bias of dt."""
    x, dt = numbers(2, tokens, 4, 3), numbers(2, tokens, 4, seed=1)
    b, c = numbers(2, tokens, 2, 8, seed=2), numbers(2, tokens, 2, 8, seed=3)
    return x, dt, -numbers(4, seed=4).exp(), b, c, numbers(4, seed=5), numbers(4, seed=6)
