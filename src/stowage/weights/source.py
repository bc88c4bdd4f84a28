"""`WeightSource`: gives each module its parameters when its forward begins, and takes them back when it ends.

Owns the hooks on a model's units and everything behind them: ring, cache of experts, readers, files. One forward at a
time has all of that (``passes``). Between forwards what comes and goes is offloaded (``offloaded_parameter``).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from stowage.errors import ModelError, UnsupportedModelError
from stowage.weights.changes import AsNamed
from stowage.weights.checkpoint import Checkpoint
from stowage.weights.deliveries import Deliveries
from stowage.weights.delivery import Load, copied
from stowage.weights.device_prefetcher import Carrier
from stowage.weights.gradients import asked_of
from stowage.weights.host_buffers import HostBuffers
from stowage.weights.offloaded_parameter import OffloadedError, OffloadedParameter
from stowage.weights.placement import Delivery, Placement
from stowage.weights.quantized.modules import is_packed
from stowage.weights.refusals import guard
from stowage.weights.repacked import Image
from stowage.weights.saving import names

__all__ = ["Load", "UncalledError", "WeightSource"]

_NO_TRIAL = (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError)


class UncalledError(UnsupportedModelError):
    """The model uses the weights of ``unit`` without calling it: kept resident, it can be loaded."""

    unit = ""


class WeightSource(Deliveries):
    """Delivers ``loads`` to ``model``. Takes over ``checkpoint``, ``image`` and ``host_buffers``, and closes them.
    ``carrier``: brings weights to the model's device, if that is another memory; ``host_buffers``: the host memory from
    which it does.
    """

    def __init__(
        self,
        model: Any,
        placement: Placement,
        loads: Sequence[Load],
        checkpoint: Checkpoint,
        image: Image | None,
        carrier: Carrier | None = None,
        host_buffers: HostBuffers | None = None,
    ) -> None:
        super().__init__(model, placement, loads, checkpoint, image, carrier, host_buffers)
        self.identity = ""
        """Names the weights as they were loaded, where they have a name."""
        self._named: AsNamed | None = None
        self._own = {id(parameter): parameter for parameter in model.parameters()}
        self._comes_and_goes = any(load.delivery is not Delivery.RESIDENT for load in loads)
        if self._comes_and_goes:
            model.forward = self._passes.around(model.forward, self._learning)
            offloaded = any(load.delivery is not Delivery.MAPPED for load in loads)
            guard(model, self.read, offloaded, self._learning, self._gradients.checkpoint)

    def name(self, identity: str) -> None:
        """The weights are called ``identity``, as they are now."""
        self.identity, self._named = identity, AsNamed(self._model)

    def identity_of_now(self) -> str:
        """``identity``, or another one where somebody has changed the model since: a weight in memory, a layer, its
        config.
        """
        assert self._named is not None, "offloaded weights have a name"
        return self._named.name(self._model, self.identity)

    @property
    def waits(self) -> bool:
        """Whether a forward waits for its turn while another thread is in one; else it is refused."""
        return self._passes.turn.waits

    @waits.setter
    def waits(self, waits: bool) -> None:
        self._passes.turn.waits = waits

    @property
    def crosses(self) -> bool:
        """Whether weights are copied to another memory than the host's, beside what computes."""
        return self._carrier is not None

    @property
    def ring_bytes(self) -> int:
        """Device memory that the ring takes."""
        if self._device_prefetcher is not None:
            return self._device_prefetcher.nbytes
        return self._ring.nbytes if self._ring is not None else 0

    @property
    def cache_bytes(self) -> int:
        """Device memory that the cache of experts takes."""
        return self._experts.nbytes if self._experts is not None else 0

    @property
    def image_bytes(self) -> int:
        """Disk that weights take in another form than the checkpoint's."""
        return self._image.nbytes if self._image is not None else 0

    def stats(self) -> dict[str, float]:
        """Bytes by delivery, and what was done since the start: ``passes`` of the whole model in ``forward_s``, of
        which they waited ``stall_s`` for weights; ``read_bytes`` from disk or host memory; how often an expert was in
        the cache, or not. Cheap.
        """
        ring, experts, placement = self._ring, self._experts, self.placement
        reading = [part for part in (ring, experts) if part is not None]
        direct_bytes = self._device_prefetcher.direct_bytes if self._device_prefetcher is not None else 0
        return {
            **{f"{delivery.value}_bytes": placement.nbytes(delivery) for delivery in Delivery},
            "small_bytes": placement.small_bytes,
            "ring_bytes": self.ring_bytes,
            "image_bytes": self.image_bytes,
            "pass_bytes": placement.pass_bytes,
            "passes": self._passes.passes,
            "read_bytes": self._row_bytes + direct_bytes + sum(part.read_bytes for part in reading),
            "stall_s": sum(part.stall_s for part in reading),
            "cache_bytes": self.cache_bytes,
            "cache_experts": experts.frames if experts is not None else 0,
            "expert_hits": experts.hits if experts is not None else 0,
            "expert_misses": experts.misses if experts is not None else 0,
            "expert_read_bytes": experts.read_bytes if experts is not None else 0,
            "forward_s": self._passes.forward_s,
        }

    @torch.no_grad()
    def prove(self, part: Any, inputs: Callable[[int], Mapping[str, Any] | None]) -> None:
        """Compute one token with ``part``, which is the model or in it, and some more where experts are cached: every
        module must have got its weights, and the order in which they ask is learned. ``inputs``: of so many tokens, for
        a forward; ``None``: it cannot be tried.

        Raises UnsupportedModelError when a weight was used that was offloaded.
        """
        for tokens in (1, 5) if self._experts is not None else (1,):
            given = inputs(tokens)
            if given is None:
                return
            try:
                out = part(**given)
                values = next((v for v in out.values() if isinstance(v, Tensor)), None)
                known = values is None or not bool(torch.isnan(values).any())
            except OffloadedError as error:
                self._refuse_uncalled(error.weight)
                known = False
            except _NO_TRIAL:  # it wants other inputs: what is offloaded when it is read says so then
                return
            if not known:
                raise UnsupportedModelError(
                    f"a model of type {getattr(self._model.config, 'model_type', '?')!r} uses weights outside of the "
                    "modules that they belong to (or experts that its router did not choose, or computes NaN by "
                    "itself), so they cannot be delivered: give it more memory."
                )

    def _refuse_uncalled(self, weight: str) -> None:
        """Raise UncalledError for a module whose ``weight`` is read by others. A whole layer is no such module."""
        unit = next((load.unit.name for load in self._loads if weight in load.locations), "")
        if unit and not unit.rpartition(".")[2].isdigit():
            error = UncalledError(f"{weight} is used without its module being called, so it must be resident.")
            error.unit = unit
            raise error

    def read(self, name: str) -> Tensor:
        """A copy of a parameter or buffer of the model in host memory, also of one that is offloaded. Takes its turn.

        Raises ModelError for a name that the model does not have, StorageError and CheckpointError.
        """
        path, _, own = name.rpartition(".")
        try:
            values = getattr(self._model.get_submodule(path), own)
        except AttributeError:
            values = None
        if not isinstance(values, Tensor):
            raise ModelError(f"this model has no weight {name!r}: model.named_parameters() has their names.")
        with self._passes.own():
            if isinstance(values, OffloadedParameter):
                return copied(self._locations[id(values)], self._readers)
            return values.detach().cpu().clone()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Copies of all parameters and persistent buffers that a checkpoint has, one at a time, by name."""
        for name in names(self._model):
            yield name, self.read(name)

    def _learning(self, given: Any = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
        """What a forward of ``given`` arguments is wrapped in from which something learns: parameters that were added,
        or that stay in memory, or what makes its inputs, while all that come and go are frozen. Where these are not, as
        they are loaded, it gets answers without gradients (``None``); but who added something to train is told.
        """
        if not asked_of(given) and not self._unfrozen():
            return None
        moving = [load for load in self._loads if load.delivery is not Delivery.RESIDENT]
        free = next((n for load in moving for n, p in load.unit.parameters.items() if p.requires_grad), "")
        added = next((n for n, p in self._model.named_parameters() if p.requires_grad and id(p) not in self._own), "")
        if free:
            if added:
                raise ModelError(
                    f"{added} was added to a model whose weights come and go, and would get no gradient, because "
                    f"{free} is not frozen. Freeze its weights first: model.requires_grad_(False), as "
                    "peft.get_peft_model() does; for answers call it under torch.no_grad()."
                )
            return None
        if is_packed(self._model) and not added and not asked_of(given):  # codes are frozen as they are loaded
            return None
        self._refuse_to_train(moving)
        return self._differentiable

    def _refuse_to_train(self, moving: Sequence[Load]) -> None:
        why = ""
        if self._carrier is not None:
            why = f"weights that cross over to {self.device} are not brought backwards yet. Train on the CPU"
        elif any(load.delivery is Delivery.EXPERTS for load in moving):
            why = "a cache of experts has no backward pass. Let whole layers come and go, weights='*=stream'"
        elif is_packed(self._model):
            why = "packed weights have no backward pass. Train on the checkpoint that they were made from"
        if why:
            raise ModelError(f"{why}, or load the model without a budget; for answers use torch.no_grad().")

    def _differentiable(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def differentiable(*args: Any, **kwargs: Any) -> Any:
            with self._gradients.hooks():
                return forward(*args, **kwargs)

        return differentiable

    def __deepcopy__(self, memo: Any) -> Any:
        raise ModelError("what delivers the weights of a model cannot be copied: load the model again.")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ModelError("what delivers the weights of a model cannot be pickled: save it with save_pretrained(DIR).")

    def close(self) -> None:
        """Stop delivering, when the forward that runs has ended. The model cannot be used any more, unless everything
        was resident. May be called twice. Raises ModelError inside of a forward.
        """
        if self._gone:
            return
        claim = self._passes.end(sys._getframe())
        self.hide()
        for handle in self._handles:
            handle.remove()
        self._let_go()
        self._gone = True
        self._passes.turn.give_back(claim)

    def __del__(self) -> None:
        if not getattr(self, "_gone", True) and not sys.is_finalizing():  # then the process gives everything back
            # Garbage is collected anywhere, also under modes of other people's forwards: they are not about this one.
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                self.close()

    @property
    def capturable(self) -> bool:
        """Whether a whole forward can be captured, as a CUDA graph is, and done again (`apart`, `join`): all weights
        are on the device or in pinned host memory, so each pass makes the same copies between the same addresses.
        """
        still = (Delivery.RESIDENT, Delivery.MAPPED, Delivery.PREFETCH)
        if not all(load.delivery in still for load in self._loads):
            return False
        return True if not self._streams else self._device_prefetcher is not None and self._host_buffers.whole

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Forwards in here begin and join all of their copies by themselves, so that each can be captured. To be
        entered before capturing, by the stream that will. Raises ModelError when the source is not ``capturable``.
        """
        if not self.capturable:
            raise ModelError("weights that are read as they are asked for cannot be part of a captured step.")
        if self._device_prefetcher is not None:
            self._device_prefetcher.begin_apart()
        try:
            yield
        finally:
            if self._device_prefetcher is not None:
                self._device_prefetcher.end_apart()

    @property
    def hooks(self) -> frozenset[int]:
        """The ids of its hooks, by which modules have them."""
        return frozenset(handle.id for handle in self._handles)

    @property
    def moving(self) -> list[nn.Parameter]:
        """What is not in memory for good, or is somewhere else in each forward."""
        still = (Delivery.RESIDENT, Delivery.MAPPED)
        return [load.unit.parameters[n] for load in self._loads if load.delivery not in still for n in load.locations]

    def again(self, forward: Callable[[], Tensor]) -> Tensor:
        """What ``forward`` gives: a forward of the whole model that was written down (``passes.written_by``). It is
        done in its turn, and of files that did not change meanwhile, as any other. Raises what those raise.
        """

        def checked() -> Tensor:
            for file in self._mapped:
                file.check()
            found = forward()
            for file in self._mapped:
                file.check()
            return found

        if not self._comes_and_goes:
            return forward()
        found: Tensor = self._passes.run(sys._getframe(), checked, (), {})
        return found

    def join(self) -> None:
        """Before a captured forward is done again: it comes after all copies that other forwards have begun."""
        if self._device_prefetcher is not None:
            self._device_prefetcher.join()

    def check(self) -> None:
        """Invariants, between forwards."""
        with self._passes.own():
            if self._ring is not None:
                self._ring.check()
            if self._device_prefetcher is not None:
                self._device_prefetcher.check()
            if self._experts is not None:
                self._experts.check()
            assert all(isinstance(p, OffloadedParameter) for stream in self._streams for p in stream.parameters)
