"""Training of what was added to a model, LoRA matrices for example, while its own weights are offloaded.

The backward pass needs frozen weights, too, to carry gradients on to the layers below. Autograd would save views of the
memory that they were delivered in, which holds other weights by then. So autograd saves their numbers instead
(``torch.autograd.graph.saved_tensors_hooks``), and the backward pass has them delivered again, one unit at a time, by
the prefetcher of the forward, which expects the order of both:

    forward  0 1 2 ... n        backward  n ... 2 1 0        the ring's order  0 1 2 ... n n ... 2 1 0

A unit's memory is released when the next unit is needed. If a reference to it is left then (the use count of a weight's
storage tells), ModelError is raised, since the reference would read other bytes.

With gradient checkpointing the backward pass computes a layer again from its inputs, with the same random numbers: Chen
et al., "Training Deep Nets with Sublinear Memory Cost", 2016.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stowage.errors import ModelError


class _Kept(NamedTuple):
    """What autograd saves instead of a view of a weight: the numbers of its unit and parameter, and the view's form."""

    unit: int
    parameter: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class Gradients:
    """Backward passes of one model. ``bring`` delivers a unit's weights until ``give_back``; ``backward(end)`` takes
    the lock for a backward pass, if it has none yet, and has ``end`` called when it is over; ``follow`` tells the
    prefetcher the order of units. All methods are called with the lock held, or take it.
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
        self.saved = False
        """Whether autograd has saved anything in this forward, so that a backward pass may follow."""

    def hooks(self) -> Any:
        """The context for a forward that computes gradients."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    # Forwards

    def know(self, unit: int, views: Sequence[Tensor]) -> None:
        """``views`` are the weights of ``unit``, delivered now."""
        for number, view in enumerate(views):
            storage = storage_of(view)
            self._numbers[storage] = unit, number
            if storage not in self._counts:
                self._counts[storage] = torch._C._storage_Use_Count(storage)

    def check(self, unit: int, views: Sequence[Tensor]) -> None:
        """Raises ModelError when something still refers to the memory of ``views``."""
        for view in views:
            storage = storage_of(view)
            if torch._C._storage_Use_Count(storage) > self._counts.get(storage, 1 << 30):
                raise ModelError(
                    f"a module of this model (of unit {unit}) keeps a weight for its backward pass by itself, for "
                    "example with a torch.utils.checkpoint of its own, and would find other bytes there. Turn "
                    "checkpointing on with model.gradient_checkpointing_enable(), or keep the module resident "
                    "(weights=)."
                )

    def forwards(self, order: list[int]) -> None:
        """A forward that computes gradients has ended; it used units in this ``order``."""
        self._forwards = order
        if self._round[: len(order)] != order:
            self._round = [*order, *reversed(order)]
        self._follow(self._round)

    def pack(self, tensor: Tensor) -> Tensor | _Kept:
        """What autograd saves of ``tensor``."""
        self.saved = True
        numbers = self._numbers.get(storage_of(tensor))
        if numbers is None:
            return tensor.detach()  # a node that kept its own output as it is would keep itself, and never be freed
        offset = int(tensor.storage_offset())
        return _Kept(*numbers, tuple(tensor.shape), tuple(tensor.stride()), offset, tensor.dtype)

    # Backwards

    def begin(self) -> None:
        """A backward pass runs: take the lock for it."""
        self._backward(self._end)

    def lend(self, unit: int) -> Sequence[Tensor]:
        """The weights of ``unit``, valid until those of another unit are lent or the backward pass ends."""
        if self._lent is None or self._lent[0] != unit:
            self._return()
            views = self._bring(unit)
            self.know(unit, views)
            self._lent = unit, views
            self._backwards.append(unit)
        return self._lent[1]

    def reset(self) -> None:
        """Forget what a failed backward pass left behind."""
        self._lent = None
        self._forwards, self._backwards = [], []
        self._numbers.clear()

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As ``torch.utils.checkpoint.checkpoint``: compute ``function`` now, and again in the backward pass."""
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        again = _Recomputed(self, functools.partial(function, *args, **kwargs))
        with torch.autograd.graph.saved_tensors_hooks(again.number, again.value):
            return again.function()

    def unpack(self, kept: Tensor | _Kept) -> Tensor:
        """The tensor of which autograd saved ``kept``, in the backward pass."""
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


def storage_of(tensor: Tensor) -> int:
    """What names the memory that a tensor is a view of; 0: it has none of the ordinary kind, so it is no view."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


class _Recomputed:
    """A call of which autograd saves numbers only. When the first is unpacked, it is computed again."""

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
        self._gradients.saved = True
        self._count += 1
        return self._count - 1

    def value(self, number: int) -> Tensor:
        self._gradients.begin()
        if number not in self._values:  # or a retained graph asks for it a second time
            self._values = self._repeat()
        return self._gradients.unpack(self._values.pop(number))

    def _repeat(self) -> dict[int, Tensor | _Kept]:
        """Compute the call again, with gradients, the same random numbers and the same autocast."""
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


def asking(given: Any, depth: int = 6) -> Iterator[Tensor]:
    """The tensors in a module's arguments that require gradients: embeddings that another module learns to make, say,
    or a cache that begins with a learned prefix.
    """
    from transformers.cache_utils import Cache, CacheLayerMixin

    if isinstance(given, Tensor):
        if given.requires_grad:
            yield given
        return
    if isinstance(given, Cache | CacheLayerMixin):
        given = vars(given)
    if isinstance(given, Mapping):
        given = list(given.values())
    if depth > 0 and isinstance(given, list | tuple):
        for each in given:
            yield from asking(each, depth - 1)


def asked_of(given: Any) -> bool:
    """Whether a tensor in a module's arguments requires gradients."""
    return next(asking(given), None) is not None


def without(output: Any, asked: Sequence[Tensor] = ()) -> Any:
    """``output`` of a forward without gradients, with the same values; ``backward()`` from it raises ModelError, and so
    do gradients of ``asked``, tensors that went into it. For calls with gradients switched on of a model that is not
    frozen.
    """
    if isinstance(output, Tensor):
        known = output.is_floating_point() and not output.requires_grad and not output.is_inference()
        known = known and not torch._C._functorch.is_functorch_wrapped_tensor(output)
        towards = asked or [torch.zeros((), requires_grad=True)]
        return _NoBackward.apply(output, *towards) if known else output  # type: ignore[no-untyped-call]
    if isinstance(output, dict):  # Transformers' outputs are
        for name, value in list(output.items()):
            if isinstance(value, Tensor | tuple):
                output[name] = without(value, asked)
    if type(output) is tuple:
        return tuple(without(value, asked) if isinstance(value, Tensor) else value for value in output)
    return output


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, output: Tensor, *_asked: Tensor) -> Tensor:
        return output.detach()

    @staticmethod
    def backward(_ctx: Any, *_gradients: Tensor) -> Any:
        raise ModelError(
            "offloaded weights have no gradients, so there is nothing to go back to. Freeze them, "
            "model.requires_grad_(False), and what is added to the model (peft.get_peft_model) or given to it "
            "(inputs_embeds) can be trained; to train the weights themselves, load the model without a budget."
        )

    jvp = backward  # type: ignore[assignment]


def _unused(_kept: Any) -> Tensor:
    raise AssertionError("nothing differentiates the second computation")


def _arguments(function: Any) -> list[Any]:
    found: list[Any] = []
    while isinstance(function, functools.partial):
        found += [function.args, function.keywords]
        function = function.func
    return found
