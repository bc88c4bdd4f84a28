"""The speeds of a machine that a prediction needs: measured ones, or typical ones where there are none.

Owns the numbers and their file format. ``probe`` measures, ``predict`` predicts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from math import isfinite
from typing import Any

from stowage.errors import ConfigError
from stowage.planner.model_config import ITEM_BYTES
from stowage.planner.shapes import USUAL_WIDTH

VERSION = 9
"""Of the machine's file; incremented too when kernels become quicker, so that they are measured again."""
INT8 = " with --int8-activations"
"""Ends the name of a format whose products round activations to 8 bits."""
NARROW_WIDTH = 512
_BUSY_SHARE = 0.1
"""On two quiet cores threads wait 1 to 3 % of their time, beside one program that computes 46 to 52 %."""
CPU, CUDA = "cpu", "cuda"


@dataclass(frozen=True, slots=True)
class Machine:
    """Speeds of one machine; bytes and operations per second.

    ``products``: by dtype, then rows: parameters per second of a product with this many rows, when the matrix comes
    from memory. ``attention``: by dtype: operations of causal attention over a long prompt. ``formats``: by dtype, then
    format (of ``weights.quantized.formats``, or our own), then rows: the time of a product relative to unquantized
    weights, for matrices ``USUAL_WIDTH`` wide; ``narrow``: the same for matrices ``NARROW_WIDTH`` wide, and for
    unquantized ones under the name of their dtype. ``disk_read``: by number of 1 MiB direct reads in flight.
    ``link_in``, ``link_out``: to and from a device with memory of its own; 0: there is none. ``stream_bytes_per_s``:
    weights from disk through a ring, 0 where only reads were measured. ``overlap_loss``: by rows: how much longer
    computing takes while weights are read, as a share of the time to read them (0: no longer, 1: as if one waited for
    the other). Few rows compete with the reads for memory; many hardly. ``mapped_byte_s``: extra seconds per byte of
    weights in a mapped file, compared with memory in larger pages.

    The cost of a forward besides its products: ``step_s`` per forward, ``layer_s`` per layer, ``sequence_s`` per
    further sequence, ``logit_s`` per logit that a token is drawn from, ``mixture_s`` per layer with experts,
    ``expert_s`` per expert that is used. ``attention_steps``: by sequences of a batch: operations of attention when
    decoding, without reading keys. ``elements_per_s``: activations (the widths of the model and of its inner layers,
    per token and layer) through norms, rotation and gates; 0: not known. ``waited_share``: the share of their runnable
    time that threads waited for a core during the measurement.
    """

    name: str
    kind: str
    cores: int
    products: Mapping[str, Mapping[int, float]]
    attention: Mapping[str, float]
    memcpy_one: float
    memcpy_all: float
    formats: Mapping[str, Mapping[str, Mapping[int, float]]] = field(default_factory=dict)
    narrow: Mapping[str, Mapping[str, Mapping[int, float]]] = field(default_factory=dict)
    disk_read: Mapping[int, float] = field(default_factory=dict)
    disk_read_buffered: float = 0.0
    disk_write: float = 0.0
    link_in: float = 0.0
    link_out: float = 0.0
    stream_bytes_per_s: float = 0.0
    overlap_loss: Mapping[int, float] = field(default_factory=dict)
    mapped_byte_s: float = 0.0
    step_s: float = 0.0
    layer_s: float = 0.0
    sequence_s: float = 0.0
    logit_s: float = 0.0
    attention_steps: Mapping[int, float] = field(default_factory=dict)
    mixture_s: float = 0.0
    expert_s: float = 0.0
    elements_per_s: float = 0.0
    waited_share: float = 0.0
    measured: bool = True
    key: str = ""

    def __post_init__(self) -> None:
        if self.kind not in (CPU, CUDA):
            raise ConfigError(f"the machine's kind is {self.kind!r}; it must be {CPU} or {CUDA}.")
        if not self.products or not all(self.products.values()):
            raise ConfigError("the machine's file says nothing of matrix products; measure it: stowage probe --refresh")
        if self.kind == CUDA and not self.link_in:
            raise ConfigError("the machine's file says nothing of the link to its device: link_in must be above 0.")
        speeds = [rate for rates in self.products.values() for rate in rates.values()] + [*self.attention.values()]
        for found in (self.formats, self.narrow):
            speeds += [times for each in found.values() for rates in each.values() for times in rates.values()]
        speeds += [self.memcpy_one, self.memcpy_all, *self.disk_read.values(), *self.attention_steps.values()]
        if not all(isfinite(rate) and rate > 0 for rate in speeds):
            raise ConfigError(
                "the machine's file holds a speed that is not above 0; measure it: stowage probe --refresh"
            )

    @property
    def has_device(self) -> bool:
        """Whether the device has memory of its own, behind a link."""
        return self.kind == CUDA

    @property
    def busy(self) -> bool:
        """Whether other programs used the cores during the measurement, so that the machine is faster than this."""
        return self.waited_share > _BUSY_SHARE

    @property
    def disk_bytes_per_s(self) -> float:
        """The rate of streamed weights, or else of reads at the best depth; 0 where no disk was measured."""
        return self.stream_bytes_per_s or max(self.disk_read.values(), default=0.0)

    def rates(self, dtype: str) -> tuple[float, Mapping[int, float]]:
        """Speeds of products for ``dtype``, and a divisor for them. Where the dtype was not measured, another one's,
        scaled by the bytes of an element.
        """
        if dtype in self.products:
            return 1.0, self.products[dtype]
        other = next(iter(self.products))
        return max(1.0, ITEM_BYTES[dtype] / ITEM_BYTES[other]), self.products[other]

    def multiply_s(self, dtype: str, parameters: float, rows: float) -> float:
        """Seconds to multiply ``rows`` rows with ``parameters`` parameters. Interpolates linearly between measured
        rows, extrapolates in proportion beyond the largest, and never decreases with more rows.
        """
        slower, rates = self.rates(dtype)
        points: list[tuple[int, float]] = []
        for size in sorted(rates):
            points.append((size, max(1 / rates[size], points[-1][1] if points else 0.0)))
        largest = points[-1][0]
        return parameters * _between(points, rows) * max(1.0, rows / largest) * slower

    def format_times(self, dtype: str, shares: Mapping[str, float], rows: float) -> float:
        """The time of a product relative to ``dtype``, where these ``shares`` of its parameters are in formats.
        Unmeasured formats count as 1.
        """
        known = self.formats.get(dtype, {})
        longer = (
            share * (_between(sorted(known[name].items()), rows) - 1) for name, share in shares.items() if name in known
        )
        return 1 + sum(longer)

    def narrow_times(self, dtype: str, outputs: Mapping[str, float], rows: float) -> float:
        """The fixed cost of ``outputs`` outputs (by format, unquantized under an empty name), in units of the time of
        one parameter in ``dtype``: a product takes a time per output and a time per parameter.
        """
        wide, narrow = self.formats.get(dtype, {}), self.narrow.get(dtype, {})
        longer = 0.0
        for name, count in outputs.items():
            measured = narrow.get(name or dtype)
            if measured:
                usual = _between(sorted(wide[name].items()), rows) if name else 1.0
                each = (_between(sorted(measured.items()), rows) - usual) / (1 / NARROW_WIDTH - 1 / USUAL_WIDTH)
                longer += count * max(each, 0.0)
        return longer

    def attend_step_s(self, operations: float, sequences: int) -> float:
        """Seconds of attention in a decoding step, without reading keys and values."""
        points = sorted((count, 1 / rate) for count, rate in self.attention_steps.items())
        return operations * _between(points, sequences) if points else 0.0

    def cache_bytes_per_s(self, dtype: str) -> float:
        """How fast a decoding step reads keys and values: as it reads weights."""
        slower, rates = self.rates(dtype)
        return rates[min(rates)] * ITEM_BYTES[dtype] / slower

    def overlap_loss_of(self, rows: int) -> float:
        """``overlap_loss`` for ``rows``, interpolated linearly, constant beyond the ends; 0 where not measured."""
        return _between(sorted(self.overlap_loss.items()), rows) if self.overlap_loss else 0.0

    def attend_s(self, dtype: str, operations: float) -> float:
        """Seconds of causal attention in a prompt."""
        rate = self.attention.get(dtype) or min(self.attention.values(), default=0.0)
        if rate:
            return operations / rate
        slower, rates = self.rates(dtype)
        return operations * slower / (2 * max(rates) * rates[max(rates)])

    def to_json(self) -> dict[str, Any]:
        """As ``stowage probe --json`` prints it."""
        return {"version": VERSION, **asdict(self)}


def _between(points: Sequence[tuple[float, float]], at: float) -> float:
    """Linear interpolation between ascending ``points``, constant beyond the ends."""
    if at <= points[0][0]:
        return points[0][1]
    for (low, value), (high, next_value) in pairwise(points):
        if at < high:
            return value + (next_value - value) * (at - low) / (high - low)
    return points[-1][1]


def by_number(found: Mapping[str, float]) -> dict[int, float]:
    """With keys as integers, which JSON has as strings."""
    return {int(number): float(value) for number, value in found.items()}


def by_format(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, dict[int, float]]]:
    """The same of ``Machine.formats``."""
    return {dtype: {name: by_number(times) for name, times in each.items()} for dtype, each in found.items()}


def from_json(text: str) -> Machine:
    """The inverse of ``to_json``. Raises ``ConfigError``."""
    try:
        found = json.loads(text)
        if found.pop("version") != VERSION:
            raise ConfigError(
                "the machine's file is of another version of Stowage; measure it: stowage probe --refresh"
            )
        products = {name: by_number(rates) for name, rates in found.pop("products").items()}
        for name in ("formats", "narrow"):
            found[name] = by_format(found[name])
        for name in ("disk_read", "overlap_loss", "attention_steps"):
            found[name] = by_number(found[name])
        return Machine(products=products, **found)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            "the machine's file is not what `stowage probe --json` prints. Make one: stowage probe --json > FILE"
        ) from error


TYPICAL_CPU = Machine(
    name="typical figures of a desktop without a GPU, not measured",
    kind=CPU,
    cores=8,
    products={
        "bfloat16": {1: 10e9, 8: 8e9, 32: 5e9, 128: 2e9, 512: 0.6e9},
        "float16": {1: 8e9, 8: 5e9, 32: 2e9, 128: 0.6e9, 512: 0.2e9},
        "float32": {1: 6e9, 8: 5e9, 32: 4e9, 128: 1.5e9, 512: 0.4e9},
    },
    attention={"bfloat16": 2e11, "float32": 1.5e11},
    memcpy_one=8e9,
    memcpy_all=16e9,
    disk_read={1: 1.5e9, 4: 2.0e9, 8: 2.0e9},
    disk_read_buffered=1.0e9,
    disk_write=1.0e9,
    layer_s=0.5e-3,
    measured=False,
)
TYPICAL_GPU = Machine(
    name="typical figures of a desktop with a 24 GB GPU, not measured",
    kind=CUDA,
    cores=8,
    products={
        "bfloat16": {1: 300e9, 8: 300e9, 32: 280e9, 128: 180e9, 512: 60e9},
        "float16": {1: 300e9, 8: 300e9, 32: 280e9, 128: 180e9, 512: 60e9},
        "float32": {1: 150e9, 8: 140e9, 32: 120e9, 128: 50e9, 512: 13e9},
    },
    attention={"bfloat16": 3e13, "float16": 3e13, "float32": 8e12},
    memcpy_one=8e9,
    memcpy_all=16e9,
    disk_read={1: 1.5e9, 4: 2.0e9, 8: 2.0e9},
    disk_read_buffered=1.0e9,
    disk_write=1.0e9,
    link_in=20e9,
    link_out=20e9,
    layer_s=0.2e-3,
    measured=False,
)
TYPICAL: Mapping[str, Machine] = {"typical-cpu": TYPICAL_CPU, "typical-gpu": TYPICAL_GPU}
"""By the name that ``--machine`` takes."""
