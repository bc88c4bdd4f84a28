"""Finds the placement of weights and KV with the most tokens per second within given budgets. Pure arithmetic.

What fits stays resident, the rest is fetched for each forward: no eviction policy does better against a cyclic scan.
Layers become resident whole, with all their experts, in one fixed order of which every prefix is spread evenly over the
model. So a larger budget only adds to what a smaller one holds, and a prediction never gets slower with more memory.
Embedding and output layer, which are larger than a layer in some models and whose reads cost nothing or much, are tried
in every tier.

The device holds the KV of the whole batch, a forward's working memory, small weights, the ring for fetched weights, and
resident weights. A device without memory of its own reads host memory directly, without a ring.

Alternatively the experts of a mixture have a cache on the device, and everything else is resident. Then more memory
never gives fewer tokens per second, but the first token of a prompt, which uses all experts, may come later than with
whole layers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from stowage.config.memory import format_size
from stowage.errors import BudgetError
from stowage.planner.cached_experts import Cached
from stowage.planner.machine import Machine
from stowage.planner.predict import BLOCK_TOKENS, Offloaded, Prediction, Workload, inner_parameters, predict
from stowage.planner.shapes import Model
from stowage.weights.placement import RING_SLOTS, RING_SLOTS_LEAST
from stowage.weights.weight_unit import Delivery

DEVICE, HOST, DISK = "device", "host", "disk"
TIERS = (DEVICE, HOST, DISK)
_SLOT_MARGIN_BYTES = 128 << 10
"""Extra size of a ring slot: weights keep their offset within a page of the file."""
_STEP_TOKENS_LEAST, _SNAPSHOT_TOKENS = 16, 512
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes that may be used. ``disk_bytes`` covers stored prefixes and the weights that are read from disk, although
    their file exists in any case.
    """

    device_bytes: int
    host_bytes: int = 0
    disk_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Placed:
    """One part of the weights. ``layer``: its number, -1 for embedding and output layer."""

    name: str
    layer: int
    tier: str
    delivery: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Solution:
    """A placement and its predicted speeds. ``small_bytes``: weights that are always resident; ``kv_bytes``: of the
    whole batch; ``working_bytes``: temporary memory of a forward.
    """

    model: Model
    machine: Machine
    workload: Workload
    budgets: Budgets
    placed: tuple[Placed, ...]
    small_bytes: int
    kv_bytes: int
    working_bytes: int
    ring_slots: int
    slot_bytes: int
    offloaded: Offloaded
    prediction: Prediction
    cache_bytes: int = 0
    """Of the cache of experts."""

    @property
    def ring_bytes(self) -> int:
        """Device memory of the ring, which weights are fetched into."""
        return self.ring_slots * self.slot_bytes

    def weights_bytes(self, tier: str) -> int:
        """Bytes of the weights that lie in ``tier``, without the small ones."""
        return sum(part.nbytes for part in self.placed if part.tier == tier)

    @property
    def device_bytes(self) -> int:
        """Device memory of everything: weights, KV of the whole batch, working memory, ring and cache of experts."""
        fixed = self.small_bytes + self.kv_bytes + self.working_bytes + self.ring_bytes + self.cache_bytes
        return fixed + self.weights_bytes(DEVICE)

    def used_bytes(self, tier: str) -> int:
        """Bytes that the placement takes of ``tier``."""
        return self.device_bytes if tier == DEVICE else self.weights_bytes(tier)

    def left_bytes(self, tier: str) -> int:
        """What is left of the budget for ``tier``."""
        limits = {DEVICE: self.budgets.device_bytes, HOST: self.budgets.host_bytes, DISK: self.budgets.disk_bytes}
        return limits[tier] - self.used_bytes(tier)

    def prefix_tokens(self, tier: str) -> int:
        """Tokens of stored prefixes that fit into the rest of the tier."""
        context = self.workload.context_tokens
        each = self.model.stored_bytes_per_token(_SNAPSHOT_TOKENS)
        if tier == DEVICE:
            each = self.model.sequence_bytes(context, BLOCK_TOKENS) / context
        return int(self.left_bytes(tier) / each) if each else 0

    def check(self) -> None:
        assert all(self.left_bytes(tier) >= 0 for tier in TIERS)
        placed = sum(part.nbytes for part in self.placed)
        assert placed + self.small_bytes == self.model.total_bytes
        assert (self.ring_slots > 0) == (self.slot_bytes > 0)


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another placement: the device memory that it needs, and its predicted speeds."""

    name: str
    device_bytes: int
    prediction: Prediction


def solve(model: Model, machine: Machine, budgets: Budgets, workload: Workload) -> Solution:
    """The placement with the most predicted tokens per second, and of equal ones that with the shortest TTFT. Raises
    ``BudgetError`` where none fits, with the least budget that would do.
    """
    placements = Placements(model, machine, workload)
    if (best := placements.best(budgets)) is None:
        raise BudgetError(placements.refusal(budgets))
    best.check()
    return best


@dataclass(frozen=True, slots=True)
class _Choice:
    """The tiers of embedding and output layer, and the size of the ring (without slots, all layers must be resident).
    ``cached``: experts have a cache, and the rest of each layer is resident on the device.
    """

    embedding: str
    head: str
    slots: int
    slot_bytes: int
    cached: bool = False


class Placements:
    """All placements of one model on one machine for one workload. ``order``: the layers in the order in which they
    become resident; ``filled[n]``: bytes of the first n.
    """

    def __init__(self, model: Model, machine: Machine, workload: Workload) -> None:
        self.model, self.machine, self.workload = model, machine, workload
        self.order = spread_order(len(model.layers))
        self.filled = [0, *accumulate(model.layers[at].total_bytes for at in self.order)]
        table = model.embedding_bytes * model.vocab * model.hidden // max(1, model.embedding) if model.tied else 0
        self.head_bytes = table + model.head_bytes
        self.embedding_bytes = model.embedding_bytes - table
        self.kv_bytes = workload.batch * model.sequence_bytes(workload.context_tokens, BLOCK_TOKENS)
        self.working_bytes = working_bytes(model, workload)
        self.experts = Cached.of(model)

    @cached_property
    def choices(self) -> tuple[_Choice, ...]:
        largest = max((layer.total_bytes for layer in self.model.layers), default=0)
        found = []
        for embedding in (DEVICE, DISK) if self.embedding_bytes else (DEVICE,):
            for head in TIERS:
                ringed = head == DISK or (head == HOST and self.machine.has_device)
                if not ringed:
                    found.append(_Choice(embedding, head, 0, 0))
                    if self.experts.nbytes and not self.machine.has_device:
                        found.append(_Choice(embedding, head, 0, 0, cached=True))
                slot = max(largest, self.head_bytes if ringed else 0) + _SLOT_MARGIN_BYTES
                found += [_Choice(embedding, head, slots, slot) for slots in (RING_SLOTS, RING_SLOTS_LEAST)]
        return tuple(found)

    def fixed_bytes(self, choice: _Choice, tier: str) -> int:
        """Bytes in ``tier`` that do not depend on the placement of layers."""
        ends = self.embedding_bytes * (choice.embedding == tier) + self.head_bytes * (choice.head == tier)
        if choice.cached:
            on_device = self.filled[-1] - self.experts.nbytes + self.experts.least_bytes
            ends += {DEVICE: on_device, HOST: 0, DISK: self.experts.nbytes}[tier]
        if tier != DEVICE:
            return ends
        return ends + self.model.rest_bytes + self.kv_bytes + self.working_bytes + choice.slots * choice.slot_bytes

    def best(self, budgets: Budgets) -> Solution | None:
        """The fastest placement by prediction; ``None`` where none fits."""
        found = []
        for choice in self.choices:
            if (cut := self._cut(choice, budgets)) is None:
                continue
            cache_bytes = self._cache_bytes(choice, budgets)
            offloaded = self._offloaded(choice, *cut, cache_bytes)
            if choice.slots and not (offloaded.link_bytes or offloaded.disk_bytes):  # all is resident without a ring
                continue
            prediction = predict(self.model, self.machine, self.workload, offloaded)
            fixed_bytes = self.fixed_bytes(choice, DEVICE)
            rank = (prediction.decode.total_s, prediction.ttft_s, choice.cached, -choice.slots, fixed_bytes)
            found.append((rank, choice, cut, cache_bytes, offloaded, prediction))
        if not found:
            return None
        _, choice, cut, cache_bytes, offloaded, prediction = min(found, key=lambda one: one[0])
        return Solution(
            model=self.model,
            machine=self.machine,
            workload=self.workload,
            budgets=budgets,
            placed=(*self._ends(choice), *(self._split() if choice.cached else self._layers(*cut))),
            small_bytes=self.model.rest_bytes,
            kv_bytes=self.kv_bytes,
            working_bytes=self.working_bytes,
            ring_slots=choice.slots,
            slot_bytes=choice.slot_bytes,
            offloaded=offloaded,
            prediction=prediction,
            cache_bytes=cache_bytes,
        )

    def _cache_bytes(self, choice: _Choice, budgets: Budgets) -> int:
        """The size of the expert cache: all that is left of the device, up to all experts."""
        if not choice.cached:
            return 0
        left_bytes = budgets.device_bytes - self.fixed_bytes(choice, DEVICE)
        return min(self.experts.least_bytes + left_bytes, self.experts.most_bytes)

    def _cut(self, choice: _Choice, budgets: Budgets) -> tuple[int, int] | None:
        """The most layers of the order that fit into the device, and into device and host together."""
        device_left = budgets.device_bytes - self.fixed_bytes(choice, DEVICE)
        host_left = budgets.host_bytes - self.fixed_bytes(choice, HOST)
        if device_left < 0 or host_left < 0:
            return None
        if choice.cached:
            return (len(self.order),) * 2 if self.fixed_bytes(choice, DISK) <= budgets.disk_bytes else None
        device = bisect_right(self.filled, device_left) - 1
        host = bisect_right(self.filled, self.filled[device] + host_left) - 1
        offloaded = self.filled[-1] - self.filled[host] + self.fixed_bytes(choice, DISK)
        in_memory = device if self.machine.has_device else host
        return (device, host) if in_memory >= self._unringed(choice) and offloaded <= budgets.disk_bytes else None

    def _unringed(self, choice: _Choice) -> int:
        """How many layers must not need the ring: all where there is none."""
        return 0 if choice.slots else len(self.order)

    def _offloaded(self, choice: _Choice, device: int, host: int, cache_bytes: int) -> Offloaded:
        """What a forward fetches, with ``device`` layers in the device and ``host`` in device and host together."""
        if choice.cached:
            return Offloaded(missed_share=1 - self.experts.held_share(cache_bytes))
        on_host = self.filled[host] - self.filled[device] + self.head_bytes * (choice.head == HOST)
        on_disk = self.filled[-1] - self.filled[host] + self.head_bytes * (choice.head == DISK)
        if self.machine.has_device:
            return Offloaded(on_host + on_disk, on_disk)
        return Offloaded(0, on_disk, mapped_bytes=on_host)

    def _ends(self, choice: _Choice) -> Iterator[Placed]:
        if self.embedding_bytes:
            delivery = Delivery.RESIDENT if choice.embedding == DEVICE else Delivery.ROWS
            yield Placed("embedding", -1, choice.embedding, delivery.value, self.embedding_bytes)
        if self.head_bytes:
            name = "lm_head and embedding" if self.model.tied else "lm_head"
            yield Placed(name, -1, choice.head, self._delivery(choice.head), self.head_bytes)

    def _delivery(self, tier: str) -> str:
        on_host = Delivery.PREFETCH if self.machine.has_device else Delivery.MAPPED
        return {DEVICE: Delivery.RESIDENT, HOST: on_host, DISK: Delivery.STREAM}[tier].value

    def _layers(self, device: int, host: int) -> Iterator[Placed]:
        """Each layer with its tier, in the model's order."""
        for rank, at in sorted(enumerate(self.order), key=lambda one: one[1]):
            tier = DEVICE if rank < device else HOST if rank < host else DISK
            yield Placed(f"layers.{at}", at, tier, self._delivery(tier), self.model.layers[at].total_bytes)

    def _split(self) -> Iterator[Placed]:
        """Each layer without its experts, which are cached."""
        for layer in self.model.layers:
            yield Placed(f"layers.{layer.index}", layer.index, DEVICE, Delivery.RESIDENT.value, layer.dense_bytes)
            if layer.experts:
                name, nbytes = f"layers.{layer.index}.experts", layer.experts * layer.expert_bytes
                yield Placed(name, layer.index, DISK, Delivery.EXPERTS.value, nbytes)

    def least_device_bytes(self, host_bytes: int, disk_bytes: int) -> int:
        """The least device budget that works beside these budgets."""
        return min(self._needs(choice, host_bytes, disk_bytes) for choice in self.choices)

    def _needs(self, choice: _Choice, host_bytes: int, disk_bytes: int) -> int:
        """Device bytes that ``choice`` needs; a huge number where it cannot work."""
        host_left = host_bytes - self.fixed_bytes(choice, HOST)
        disk_left = disk_bytes - self.fixed_bytes(choice, DISK)
        if host_left < 0 or disk_left < 0:
            return 1 << 62
        if choice.cached:
            return self.fixed_bytes(choice, DEVICE)
        device = self._unringed(choice)
        if not self.machine.has_device:
            device = self._first_device(device, host_left)
        in_both = bisect_left(self.filled, self.filled[-1] - disk_left)
        return self.fixed_bytes(choice, DEVICE) + self.filled[max(device, self._first_device(in_both, host_left))]

    def _first_device(self, together: int, host_left: int) -> int:
        """The fewest layers in the device with which ``together`` layers fit into device and host."""
        return bisect_left(self.filled, self.filled[together] - host_left)

    def least_host_bytes(self, device_bytes: int, disk_bytes: int) -> int | None:
        """The least host budget that works beside these; ``None`` where none does."""
        return _least(lambda size: self.least_device_bytes(size, disk_bytes) <= device_bytes, self.model.total_bytes)

    def least_disk_bytes(self, device_bytes: int, host_bytes: int) -> int | None:
        """The least disk budget that works beside these; ``None`` where none does."""
        return _least(lambda size: self.least_device_bytes(host_bytes, size) <= device_bytes, self.model.total_bytes)

    def largest_batch(self, budgets: Budgets) -> int:
        """How many sequences at once would fit; 0 where not even one does."""

        def fits(batch: int) -> bool:
            room = Placements(self.model, self.machine, replace(self.workload, batch=batch))
            return room.least_device_bytes(budgets.host_bytes, budgets.disk_bytes) <= budgets.device_bytes

        return bisect_left(range(1, self.workload.batch + 1), True, key=lambda batch: not fits(batch))

    def largest_step(self, budgets: Budgets) -> int:
        """The largest forward in tokens that fits, found by halving; 0 where none does."""
        step = self.workload.piece // 2
        while step >= max(self.workload.batch, _STEP_TOKENS_LEAST):
            room = Placements(self.model, self.machine, replace(self.workload, step_tokens=step))
            if room.least_device_bytes(budgets.host_bytes, budgets.disk_bytes) <= budgets.device_bytes:
                return step
            step //= 2
        return 0

    def alternatives(self, budgets: Budgets) -> list[Alternative]:
        """Other placements with more and with less device memory, to compare."""
        names = {
            "everything in device memory": (0, 0),
            "nothing from the disk": (budgets.host_bytes, 0),
            "as little device memory as can be": (budgets.host_bytes, budgets.disk_bytes),
        }
        found = []
        for name, (host_bytes, disk_bytes) in names.items():
            needs = self.least_device_bytes(host_bytes, disk_bytes)
            solution = solve(self.model, self.machine, Budgets(needs, host_bytes, disk_bytes), self.workload)
            found.append(Alternative(name, needs, solution.prediction))
        return found

    def refusal(self, budgets: Budgets) -> str:
        """The error message for budgets that do not suffice, with the least of each that would, in whole MiB."""
        least = self.least_device_bytes(budgets.host_bytes, budgets.disk_bytes)
        outs = [f"a device memory of {_mib(least)}"]
        host = self.least_host_bytes(budgets.device_bytes, budgets.disk_bytes)
        if host is not None:
            outs.append(f"a host memory of {_mib(host)}")
        disk = self.least_disk_bytes(budgets.device_bytes, budgets.host_bytes)
        if disk is not None:
            outs.append(f"a disk of {_mib(disk)}")
        if batch := self.largest_batch(budgets):
            outs.append(f"a batch of {batch}")
        if step := self.largest_step(budgets):
            outs.append(f"forwards of {step} tokens (--max-num-batched-tokens)")
        return (
            f"{self.model.family} with {format_size(self.model.total_bytes)} of weights does not fit: device memory of "
            f"{format_size(budgets.device_bytes)}, host memory of {format_size(budgets.host_bytes)}, disk of "
            f"{format_size(budgets.disk_bytes)}. The device must hold the KV of {self.workload.batch} x "
            f"{self.workload.context_tokens:,} tokens ({format_size(self.kv_bytes)}) and what a forward of "
            f"{self.workload.piece:,} tokens works with ({format_size(self.working_bytes)}). Each of these alone would "
            f"be enough: {', '.join(outs)}."
        )


def _least(works: Callable[[int], bool], most: int) -> int | None:
    """The least size up to ``most`` that works, if larger ones work whenever smaller ones do."""
    return bisect_left(range(most + 1), True, key=works) if works(most) else None


def _mib(nbytes: int) -> str:
    return f"{-(-nbytes // _MIB)}MiB"  # rounded up, so that what is written works


def spread_order(count: int) -> list[int]:
    """All numbers below ``count`` in bit-reversed order, of which every prefix is spread evenly."""
    bits = max(1, (count - 1).bit_length())
    return [at for n in range(1 << bits) if (at := int(f"{n:0{bits}b}"[::-1], 2)) < count]


def working_bytes(model: Model, workload: Workload) -> int:
    """Temporary memory of the largest forward: some rows of the model, its widest inner rows, float32 logits."""
    widest = max((inner_parameters(layer) for layer in model.layers), default=0) // max(1, model.hidden)
    rows = workload.piece * (6 * model.hidden + widest) * model.item_bytes
    return rows + 8 * workload.batch * model.vocab
