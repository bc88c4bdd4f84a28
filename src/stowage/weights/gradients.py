"""Training of what was added to a model, LoRA matrices for example, while its own weights come and go.

A weight that does not learn is still needed backwards, to carry gradients on to the layers below. Autograd would keep
views of the memory that it was delivered in, which others have by then. So what it keeps of a weight is its number
(``torch.autograd.graph.saved_tensors_hooks``), and backwards the weights are brought again, one unit at a time, by the
prefetcher that brought them forwards: it learns the order of both ways as one round.

    forwards  0 1 2 ... n        backwards  n ... 2 1 0        the ring's order  0 1 2 ... n n ... 2 1 0

A unit's memory is given back when the next one is asked for. Whether something else still looks at it then is counted
(of the storage of each weight, who has it), so what would compute from other bytes raises instead.

With gradient checkpointing a layer is computed again, backwards, from what came into it, with the random numbers of the
first time: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stowage.errors import ModelError

__all__ = ["Gradients", "asked_of", "without"]


class _Kept(NamedTuple):
    """A view of a weight, as autograd keeps it: of a unit by number, and of its parameter."""

    unit: int
    parameter: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class Gradients:
    """The way back of one model. ``bring`` gives a unit's weights until ``give_back``; ``backward(end)`` begins a
    backward pass, or does nothing in one, and calls ``end`` when it is over. Everything here runs in the turn that
    this takes, or in that of a forward that asks for gradients.
    """

    def __init__(
        self,
        bring: Callable[[int], Sequence[Tensor]],
        give_back: Callable[[int], None],
        backward: Callable[[Callable[[], None]], None],
        follow: Callable[[list[int]], None],
    ) -> None:
        self._bring, self._give_back, self._backward, self._follow = bring, give_back, backward, follow
        self._numbers: dict[int, tuple[int, int]] = {}
        self._counts: dict[int, int] = {}
        self._lent: tuple[int, Sequence[Tensor]] | None = None
        self._forwards: list[int] = []
        self._backwards: list[int] = []
        self._round: list[int] = []

    def hooks(self) -> Any:
        """What a forward runs in that gradients are asked of."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    # Forwards

    def know(self, unit: int, views: Sequence[Tensor]) -> None:
        """``views`` are the weights of ``unit`` now."""
        for number, view in enumerate(views):
            storage = view.untyped_storage()._cdata
            self._numbers[storage] = unit, number
            if storage not in self._counts:
                self._counts[storage] = torch._C._storage_Use_Count(storage)

    def check(self, unit: int, views: Sequence[Tensor]) -> None:
        """Nothing looks at ``views`` any more. Raises ModelError."""
        for view in views:
            storage = view.untyped_storage()._cdata
            if torch._C._storage_Use_Count(storage) > self._counts.get(storage, 1 << 30):
                raise ModelError(
                    f"a module of this model (of unit {unit}) keeps a weight for its backward pass by itself, for "
                    "example with a torch.utils.checkpoint of its own, and would find other bytes there. Turn "
                    "checkpointing on with model.gradient_checkpointing_enable(), or keep the module resident "
                    "(weights=)."
                )

    def forwards(self, order: list[int]) -> None:
        """A forward that gradients are asked of has ended: it asked for units in this ``order``."""
        self._forwards = order
        if self._round[: len(order)] != order:
            self._round = [*order, *reversed(order)]
        self._follow(self._round)

    def pack(self, tensor: Tensor) -> Tensor | _Kept:
        """What autograd keeps of ``tensor``."""
        try:
            storage = tensor.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):  # it has no memory of the usual kind, so none of a weight's
            return tensor
        numbers = self._numbers.get(storage)
        if numbers is None:
            return tensor
        offset = int(tensor.storage_offset())
        return _Kept(*numbers, tuple(tensor.shape), tuple(tensor.stride()), offset, tensor.dtype)

    # Backwards

    def begin(self) -> None:
        """A backward pass is under way, from now on in its turn."""
        self._backward(self._end)

    def lend(self, unit: int) -> Sequence[Tensor]:
        """The weights of ``unit``, until those of another one are asked for, or the backward pass is over."""
        if self._lent is None or self._lent[0] != unit:
            self._return()
            views = self._bring(unit)
            self.know(unit, views)
            self._lent = unit, views
            self._backwards.append(unit)
        return self._lent[1]

    def reset(self) -> None:
        """Whatever a backward pass left behind that did not end."""
        self._lent = None
        self._forwards, self._backwards = [], []
        self._numbers.clear()

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As ``torch.utils.checkpoint.checkpoint``: ``function`` is computed now, and again backwards."""
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        again = _Again(self, functools.partial(function, *args, **kwargs))
        with torch.autograd.graph.saved_tensors_hooks(again.number, again.value):
            return again.function()

    def unpack(self, kept: Tensor | _Kept) -> Tensor:
        """What it kept, backwards."""
        if isinstance(kept, Tensor):
            return kept
        self.begin()
        with torch.no_grad():
            view = self.lend(kept.unit)[kept.parameter]
            return view.view(kept.dtype).as_strided(kept.size, kept.stride, kept.offset)

    def _return(self) -> None:
        if self._lent is not None:
            (unit, views), self._lent = self._lent, None
            self.check(unit, views)
            self._give_back(unit)

    def _end(self) -> None:
        self._return()
        self._round, self._backwards = [*self._forwards, *self._backwards], []
        self._follow(self._round)


class _Again:
    """A call of which autograd keeps numbers only. The first that is asked for has it computed again."""

    def __init__(self, gradients: Gradients, function: Callable[[], Any]) -> None:
        self.function = function
        self._gradients = gradients
        self._count = 0
        self._values: dict[int, Tensor | _Kept] = {}
        self._random = torch.get_rng_state()
        self._cast = (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        )
        given = pytree.tree_leaves(_arguments(function))
        self._versions = [
            (leaf, leaf._version) for leaf in given if isinstance(leaf, Tensor) and not leaf.is_inference()
        ]

    def number(self, _tensor: Tensor) -> int:
        self._count += 1
        return self._count - 1

    def value(self, number: int) -> Tensor:
        self._gradients.begin()
        if number not in self._values:  # or it was asked for before, of a graph that is kept
            self._values = self._repeat()
        return self._gradients.unpack(self._values.pop(number))

    def _repeat(self) -> dict[int, Tensor | _Kept]:
        """With gradients, and as it was the first time."""
        if any(tensor._version != version for tensor, version in self._versions):
            raise ModelError(
                "what goes into a layer was changed in place after it was computed, so it cannot be computed again for "
                "its gradients: train without gradient checkpointing."
            )
        found: list[Tensor | _Kept] = []
        enabled, dtype, cache = self._cast
        cast = torch.autocast("cpu", dtype=dtype, enabled=enabled, cache_enabled=cache)
        keep = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: found.append(self._gradients.pack(tensor.detach())), _unused
        )
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), keep, cast:
            torch.set_rng_state(self._random)
            self.function()
        assert len(found) == self._count, "a layer computes the same each time"
        return dict(enumerate(found))


def asked_of(given: Any, depth: int = 6) -> bool:
    """Whether gradients are asked of a tensor in what a module is given: of pictures or embeddings that something
    learns to make, or of a cache that begins with what was learned.
    """
    from transformers.cache_utils import Cache, CacheLayerMixin

    if isinstance(given, Tensor):
        return given.requires_grad
    if isinstance(given, Cache | CacheLayerMixin):
        given = vars(given)
    if isinstance(given, Mapping):
        given = list(given.values())
    return depth > 0 and isinstance(given, list | tuple) and any(asked_of(each, depth - 1) for each in given)


def without(output: Any) -> Any:
    """``output`` of a forward that computed no gradients, though it was asked with gradients switched on, of weights
    that are not frozen: it is what it was, and ``backward()`` from it says so.
    """
    if isinstance(output, Tensor):
        known = output.is_floating_point() and not output.requires_grad and not output.is_inference()
        return _Without.apply(torch.zeros((), requires_grad=True), output) if known else output  # type: ignore[no-untyped-call]
    if isinstance(output, dict):  # Transformers' outputs are
        for name, value in list(output.items()):
            if isinstance(value, Tensor | tuple):
                output[name] = without(value)
    if type(output) is tuple:
        return tuple(without(value) if isinstance(value, Tensor) else value for value in output)
    return output


class _Without(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, _anchor: Tensor, output: Tensor) -> Tensor:
        return output.detach()

    @staticmethod
    def backward(_ctx: Any, *_gradients: Tensor) -> Any:
        raise ModelError(
            "weights that come and go have no gradients, so there is nothing to go back to. Freeze them, "
            "model.requires_grad_(False), and what is added to the model (peft.get_peft_model) or given to it "
            "(inputs_embeds) can be trained; to train the weights themselves, load the model without a budget."
        )


def _unused(_kept: Any) -> Tensor:
    raise AssertionError("nobody goes back through what was computed again")


def _arguments(function: Any) -> list[Any]:
    found: list[Any] = []
    while isinstance(function, functools.partial):
        found += [function.args, function.keywords]
        function = function.func
    return found
