"""`WeightSource`: delivers a module's parameters when its forward begins, and releases them when it ends.

Owns the hooks on a model's units and everything behind them: ring, cache of experts, readers, files. One forward at a
time uses all of that (``forward_passes``). Between forwards the parameters are offloaded (``offloaded_parameter``).
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
from stowage.weights.checkpoint import Checkpoint
from stowage.weights.deliveries import Deliveries
from stowage.weights.delivery import Load, copied
from stowage.weights.device_prefetcher import Carrier
from stowage.weights.fingerprint import Fingerprint
from stowage.weights.gradients import asked_of
from stowage.weights.host_buffers import HostBuffers
from stowage.weights.mapped_files import MappedFiles
from stowage.weights.offloaded_parameter import OffloadedError, OffloadedParameter
from stowage.weights.placement import Placement
from stowage.weights.quantized.modules import is_packed
from stowage.weights.refusals import guard
from stowage.weights.saving import names
from stowage.weights.scratch_file import ScratchFile
from stowage.weights.weight_unit import Delivery

_NO_TRIAL = (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError)


class UncalledError(UnsupportedModelError):
    """The model reads the weights of ``unit`` without calling it. It can be loaded with ``unit`` resident."""

    unit = ""


class WeightSource(Deliveries):
    """Delivers ``loads`` to ``model``. Takes over ``checkpoint``, ``scratch`` and ``host_buffers``, and closes them.
    ``carrier``: copies weights to the model's device if that has memory of its own, from ``host_buffers``.
    """

    def __init__(
        self,
        model: Any,
        placement: Placement,
        loads: Sequence[Load],
        checkpoint: Checkpoint,
        scratch: ScratchFile | None,
        carrier: Carrier | None,
        host_buffers: HostBuffers | None,
    ) -> None:
        super().__init__(model, placement, loads, checkpoint, scratch, carrier, host_buffers)
        self.identity = ""
        """The digest of the weights as they were loaded, where it is known; see ``models.identity``."""
        self._fingerprint: Fingerprint | None = None
        self._own = {id(parameter): parameter for parameter in model.parameters()}
        self.offloads = any(load.delivery is not Delivery.RESIDENT for load in loads)
        """Whether there are weights that are not in memory of the model's own."""
        if self.offloads:
            model.forward = self._passes.wrap(model.forward, self._learning)
            offloaded = any(load.delivery is not Delivery.MAPPED for load in loads)
            guard(model, self.read, offloaded, self._learning, self._gradients.checkpoint, self._own)

    def name(self, identity: str) -> None:
        """Set the identity of the weights as they are now."""
        self.identity, self._fingerprint = identity, Fingerprint(self._model)

    def identity_of_now(self) -> str:
        """``identity``, or another digest if the model was changed since: a weight in memory, a layer, its config.
        Waits for the running forward, in which modules are set up otherwise.
        """
        assert self._fingerprint is not None, "offloaded weights have a name"
        with self._passes.exclusive() if self.offloads else contextlib.nullcontext():
            return self._fingerprint.identity_of(self._model, self.identity)

    @property
    def waits(self) -> bool:
        """Whether a forward waits while another thread runs one. If not, it raises ModelError."""
        return self._passes.lock.waits

    @waits.setter
    def waits(self, waits: bool) -> None:
        self._passes.lock.waits = waits

    @property
    def copies_to_device(self) -> bool:
        """Whether weights are copied to a device with memory of its own while it computes."""
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
    def scratch_bytes(self) -> int:
        """Disk that weights take in another form than the checkpoint's."""
        return self._scratch.nbytes if self._scratch is not None else 0

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
            "image_bytes": self.scratch_bytes,
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
        """Try ``part``, the model or a module in it, with one token, and with five where experts are cached: tests
        that every module gets its weights, and learns their order. ``inputs(tokens)`` gives a forward's arguments, or
        ``None`` if it cannot be tried.

        Raises UnsupportedModelError when a weight was read while it was offloaded.
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
            except _NO_TRIAL:  # it needs other inputs: reading an offloaded weight raises in real use
                return
            if not known:
                raise UnsupportedModelError(
                    f"a model of type {getattr(self._model.config, 'model_type', '?')!r} uses weights outside of the "
                    "modules that they belong to (or experts that its router did not choose, or computes NaN by "
                    "itself), so they cannot be delivered: give it more memory."
                )

    def _refuse_uncalled(self, weight: str) -> None:
        """Raise UncalledError if ``weight`` belongs to a single module, not to a layer: others read it."""
        unit = next((load.unit.name for load in self._loads if weight in load.locations), "")
        if unit and not unit.rpartition(".")[2].isdigit():
            error = UncalledError(f"{weight} is used without its module being called, so it must be resident.")
            error.unit = unit
            raise error

    def read(self, name: str) -> Tensor:
        """A copy of a parameter or buffer of the model in host memory, offloaded or not. Waits for the running forward.

        Raises ModelError for a name that the model does not have, StorageError and CheckpointError.
        """
        path, _, own = name.rpartition(".")
        try:
            values = getattr(self._model.get_submodule(path), own)
        except AttributeError:
            values = None
        if not isinstance(values, Tensor):
            raise ModelError(f"this model has no weight {name!r}: model.named_parameters() has their names.")
        with self._passes.exclusive():
            if isinstance(values, OffloadedParameter):
                return copied(self._locations[id(values)], self._readers)
            return values.detach().cpu().clone()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Copies of all parameters and persistent buffers that a checkpoint has, one at a time, by name."""
        for name in names(self._model):
            yield name, self.read(name)

    def _learning(self, given: Any = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
        """What to wrap a forward of ``given`` arguments in so that it computes gradients: for added parameters, for
        resident ones, for its inputs, or for what a hook adds. All offloaded parameters must be frozen. They are not as
        a model is loaded: then forwards compute no gradients (``None``), unless parameters were added: then this raises
        ModelError.
        """
        moving = [load for load in self._loads if load.delivery is not Delivery.RESIDENT]
        why = self._untrained(moving)
        if not asked_of(given) and not self._unfrozen():
            return None if why else self._differentiable
        free = next((n for load in moving for n, p in load.unit.parameters.items() if p.requires_grad), "")
        added = next((n for n, p in self._model.named_parameters() if p.requires_grad and id(p) not in self._own), "")
        if free:
            if added:
                raise ModelError(
                    f"{added} was added to a model with offloaded weights, and would get no gradient, because "
                    f"{free} is not frozen. Freeze its weights first: model.requires_grad_(False), as "
                    "peft.get_peft_model() does; for answers call it under torch.no_grad()."
                )
            return None
        if is_packed(self._model) and not added and not asked_of(given):  # packed parameters are loaded frozen
            return None
        if why:
            raise ModelError(f"{why}, or load the model without a budget; for answers use torch.no_grad().")
        return self._differentiable

    def _untrained(self, moving: Sequence[Load]) -> str:
        """Why weights that are delivered so have no backward pass; empty: they have."""
        if self._carrier is not None:
            return f"weights on {self.device} are not delivered to a backward pass yet. Train on the CPU"
        if any(load.delivery is Delivery.EXPERTS for load in moving):
            return "a cache of experts has no backward pass. Stream whole layers instead, weights='*=stream'"
        if is_packed(self._model):
            return "packed weights have no backward pass. Train on the checkpoint that they were made from"
        return ""

    def _differentiable(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def differentiable(*args: Any, **kwargs: Any) -> Any:
            self._passes.differentiates = True
            with self._gradients.hooks():
                return forward(*args, **kwargs)

        return differentiable

    def __deepcopy__(self, memo: Any) -> Any:
        raise ModelError("the weight source of a model cannot be copied: load the model again.")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ModelError("the weight source of a model cannot be pickled: save the model with save_pretrained(DIR).")

    def close(self) -> None:
        """Wait for the running forward, then free everything. The model cannot be used any more, unless all weights
        were resident. May be called twice. Raises ModelError inside a forward.
        """
        if self._gone:
            return
        claim = self._passes.stop(sys._getframe())
        self.hide()
        for handle in self._handles:
            handle.remove()
        self._let_go()
        self._gone = True
        self._passes.lock.release(claim)

    def __del__(self) -> None:
        if not getattr(self, "_gone", True) and not sys.is_finalizing():  # then the system frees everything
            # Garbage may be collected inside other models' forwards, whose torch modes must not apply here.
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                self.close()

    @property
    def capturable(self) -> bool:
        """Whether a whole forward can be captured and replayed, as a CUDA graph (`apart`, `join`): all weights are on
        the device or in pinned host memory, so each forward makes the same copies between the same addresses.
        """
        still = (Delivery.RESIDENT, Delivery.MAPPED, Delivery.PREFETCH)
        if not all(load.delivery in still for load in self._loads):
            return False
        return True if not self._streams else self._device_prefetcher is not None and self._host_buffers.whole

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Context: each forward starts and waits for all of its copies itself, so that it can be captured. Enter it
        before capturing, on the stream that captures. Raises ModelError when the source is not ``capturable``.
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
        """The ids of its hooks in the modules' hook tables."""
        return frozenset(handle.id for handle in self._handles)

    @property
    def moving(self) -> list[nn.Parameter]:
        """The parameters that are not in memory between forwards, or have another address in each."""
        still = (Delivery.RESIDENT, Delivery.MAPPED)
        return [load.unit.parameters[n] for load in self._loads if load.delivery not in still for n in load.locations]

    @property
    def mapped_files(self) -> MappedFiles:
        """Those that modules compute from where they lie. A module looks at its own before it computes; a change while
        the last one computes is noticed by who asks here.
        """
        return MappedFiles(self._mapped, owned=False)

    def run_recorded(self, forward: Callable[[], Tensor]) -> Tensor:
        """Replay ``forward``, a recorded forward of the whole model (``forward_passes.recorded_by``), with the lock
        held; its files are checked for changes, as in any forward. Returns its output, and raises what forwards raise.
        """

        def checked() -> Tensor:
            with self.mapped_files.unchanged():
                return forward()

        if not self.offloads:
            return forward()
        found: Tensor = self._passes.run(sys._getframe(), checked, (), {})
        return found

    def join(self) -> None:
        """Call before replaying a captured forward, which then follows the copies that other forwards have started."""
        if self._device_prefetcher is not None:
            self._device_prefetcher.join()

    def check(self) -> None:
        """Invariants, between forwards."""
        with self._passes.exclusive():
            if self._ring is not None:
                self._ring.check()
            if self._device_prefetcher is not None:
                self._device_prefetcher.check()
            if self._experts is not None:
                self._experts.check()
            assert all(isinstance(p, OffloadedParameter) for stream in self._streams for p in stream.parameters)
