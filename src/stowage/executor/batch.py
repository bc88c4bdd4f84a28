"""The description of one forward: which tokens of which sequences, and by group the addresses of their keys and values.

Owns the arithmetic between sequences and tensors. It is rebuilt from the sequences for every forward and holds no truth
of its own, so the batch can be built anew at any time (case A).

    flattened tokens   | d0 d1 d2 | p p p p p p p | q q q q |
                         decoding   one prefill     another       (single tokens first, then runs of one sequence each)
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stowage.core.geometry import NULL_BLOCK, Group, Kind
from stowage.core.groups import GroupStrategy
from stowage.executor.block_pool import PADDING_BLOCK, BlockPool
from stowage.executor.block_table import OFFLOADED
from stowage.executor.decode_attention import Attend, Tables
from stowage.executor.kernels import NEVER, AttentionRuns
from stowage.executor.latent_weights import LatentWeights
from stowage.executor.sequence_state import SequenceState
from stowage.models.layout import visible


@dataclass(frozen=True, slots=True)
class Work:
    """Compute ``count`` tokens of ``sequence`` from position ``start``; their blocks are allocated."""

    sequence: SequenceState
    start: int
    count: int
    every_logit: bool = False

    @property
    def prompt_tokens(self) -> int:
        """How many of the tokens belong to the prompt."""
        return max(0, min(self.start + self.count, self.sequence.prompt_tokens) - self.start)


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Single tokens. ``blocks [sequences, blocks]``; ``bias [sequences, 1, 1, keys]``: 0 or -inf; None: all is seen."""

    blocks: torch.Tensor
    keys: int
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """A run of one sequence: flat tokens ``[begin, end)``, ``keys`` in ``blocks``; no ``bias``: plainly causal."""

    begin: int
    end: int
    blocks: torch.Tensor
    keys: int
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class StreamStep:
    """A run of one sequence, or a single token, some of whose keys are offloaded: flattened tokens ``[begin,
    end)``, the first at position ``start``; ``addresses`` as in ``BlockTable.addresses``, of all the sequence's blocks,
    in host memory.
    """

    begin: int
    end: int
    start: int
    addresses: torch.Tensor


@dataclass(frozen=True, slots=True)
class GroupStep:
    """One attention group's part of a step: which block each new token goes to, and at which offset in it (``blocks``,
    ``offsets``: ``[tokens]``); and what the queries read: those of ``runs`` by the kernels, the others as ``decode``
    (``Tables`` for a paged kernel or a recorded step) and ``prefills``, or as ``streams``.
    """

    pool: BlockPool
    blocks: torch.Tensor
    offsets: torch.Tensor
    decode: DecodeStep | Tables | None = None
    prefills: tuple[PrefillStep, ...] = ()
    streams: tuple[StreamStep, ...] = ()
    runs: AttentionRuns | None = None


@dataclass(slots=True)
class ForwardStep:
    """One forward. ``positions`` and ``ids`` are flat; ``logit_rows``: flattened tokens whose logits are wanted."""

    ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    decodes: int
    of_layer: dict[int, GroupStep] = field(default_factory=dict)
    kernels: bool = False
    """Whether recurrent layers are computed by them, too."""
    latent_weights: LatentWeights = field(default_factory=LatentWeights)
    rounded_from: int = NEVER
    """The position from which on attention's weights are rounded to bfloat16, where keys are."""
    furthest: int | None = None
    """The last of ``positions``, unless they are on a device."""
    written: int | None = None
    """The layer whose keys were written and not read yet."""

    def reading(self, module: Any) -> int:
        """Whose attention this is. A module may serve several layers, so the one that has just written is meant; one
        that writes nothing goes by its own number.
        """
        layer, self.written = self.written, None
        return int(module.layer_idx) if layer is None else layer


HOST = torch.device("cpu")
current: ContextVar[ForwardStep] = ContextVar("stowage_step")


def order(work: Items[Work]) -> list[Work]:
    """Single tokens first, runs after them; otherwise in the given order."""
    return sorted(work, key=lambda w: w.count > 1)


def is_decode(work: Items[Work]) -> bool:
    """Whether ``work`` is a decode step: single tokens that go on from a state, all of it on the device."""
    return all(w.count == 1 and w.start > 0 for w in work) and not any(
        table.has_offloaded for w in work for table in w.sequence.tables
    )


def build(
    work: Items[Work],
    pools: Items[BlockPool],
    strategies: Items[GroupStrategy],
    dtype: torch.dtype,
    *,
    native: Callable[[BlockPool, Items[Work]], bool] = lambda pool, work: False,
    paged: Attend | None = None,
    device: torch.device = HOST,
) -> ForwardStep:
    """The step that computes ``work`` (see ``order``) on ``device``, where ``pools`` lie, for those of them that are
    attention's; ``native``: whether the kernels compute it; ``paged``: what computes that of single tokens where they
    do not, without gathering keys.
    """
    decodes = sum([w.count == 1 for w in work])
    attention = [pair for pair in zip(pools, strategies, strict=True) if pair[0].group.kind is not Kind.RECURRENT]
    singles = decodes == len(work)
    if singles and device.type == "cpu" and all(native(pool, work) for pool, _ in attention):
        return _single_tokens(work, attention)
    ids = [token for w in work for token in w.sequence.tokens[w.start : w.start + w.count]]
    if singles:
        every = np.array((ids, [w.start for w in work], range(decodes)), dtype=np.int64)
        (token_ids, at, wanted), positions = _on(device, every).unbind(), every[1]
    else:
        positions = np.concatenate([np.arange(w.start, w.start + w.count) for w in work])
        ends = zip(work, accumulate(w.count for w in work), strict=True)
        rows = np.concatenate([np.arange(end - w.count if w.every_logit else end - 1, end) for w, end in ends])
        token_ids, at, wanted = (_on(device, each) for each in (np.array(ids, dtype=np.int64), positions, rows))
    step = ForwardStep(token_ids, at, wanted, decodes, furthest=max([w.start + w.count for w in work]) - 1)
    for pool, strategy in attention:
        group_step = _group_step(work, decodes, positions, pool, strategy, dtype, native, paged)
        step.of_layer.update(dict.fromkeys(pool.views, group_step))
    return step


def _single_tokens(work: Items[Work], attention: Items[tuple[BlockPool, GroupStrategy]]) -> ForwardStep:
    """The step of single tokens whose attention the kernels compute. It has little time, so its numbers are one array,
    but for the block tables.
    """
    count, starts = len(work), [w.start for w in work]
    numbers = [w.sequence.tokens[w.start] for w in work] + starts + list(range(count))
    read = []
    for pool, strategy in attention:
        group = pool.group
        tables = [w.sequence.tables[group.index] for w in work]
        blocks, offsets = zip(*[divmod(start, group.block_tokens) for start in starts], strict=True)
        written = [int(table.blocks[block]) for table, block in zip(tables, blocks, strict=True)]
        assert min(written) > PADDING_BLOCK, "a token has no block to go to"
        table, runs = _runs(work, range(count), [table.addresses for table in tables], group, strategy)
        numbers += [*written, *offsets, *chain.from_iterable(runs)]
        read.append((pool, torch.from_numpy(table)))
    sizes = [count] * 3 + [count, count, 5 * count] * len(read)
    parts = iter(torch.from_numpy(np.array(numbers, dtype=np.int64)).split_with_sizes(sizes))
    step = ForwardStep(next(parts), next(parts), next(parts), count, furthest=max(starts))
    for pool, whole in read:
        written_to, within, listed = next(parts), next(parts), next(parts).view(count, 5)
        one = GroupStep(pool, written_to, within, runs=_attention_runs(whole, listed, pool.group))
        step.of_layer.update(dict.fromkeys(pool.views, one))
    return step


def _group_step(
    work: Items[Work],
    decodes: int,
    positions: NDArray[np.int64],
    pool: BlockPool,
    strategy: GroupStrategy,
    dtype: torch.dtype,
    native: Callable[[BlockPool, Items[Work]], bool],
    paged: Attend | None,
) -> GroupStep:
    group = pool.group
    tables = [w.sequence.tables[group.index] for w in work]
    addresses = [table.addresses for table in tables]
    begins = list(accumulate((w.count for w in work), initial=0))
    places = np.array(np.divmod(positions, group.block_tokens))
    for i, table in enumerate(tables):
        blocks = places[0, begins[i] : begins[i + 1]]
        blocks[:] = table.blocks[blocks]
    assert places[0].min() > PADDING_BLOCK, "a token has no block to go to"
    device = pool.storage.device
    written, offsets = _on(device, places).unbind()
    step = partial(GroupStep, pool, written, offsets)
    if native(pool, work):
        whole, runs = _runs(work, begins, addresses, group, strategy)
        listed = torch.from_numpy(np.array(runs, dtype=np.int64))
        return step(runs=_attention_runs(torch.from_numpy(whole), listed, group))
    if any(table.has_offloaded for table in tables):
        return step(streams=tuple(_stream_step(w, b, a) for w, b, a in zip(work, begins, addresses, strict=False)))
    return step(
        decode=_decode_step(work[:decodes], addresses, group, strategy, dtype, device, paged) if decodes else None,
        prefills=tuple(
            _prefill_step(w, begins[i], addresses[i], group, strategy, dtype, device)
            for i, w in enumerate(work)
            if i >= decodes
        ),
    )


def _stream_step(work: Work, begin: int, addresses: NDArray[np.int64]) -> StreamStep:
    assert (addresses != NULL_BLOCK).all(), "a query needs a block that is nowhere"
    return StreamStep(begin, begin + work.count, work.start, torch.from_numpy(addresses.copy()))


def _runs(
    work: Items[Work], begins: Items[int], tables: list[NDArray[np.int64]], group: Group, strategy: GroupStrategy
) -> tuple[NDArray[np.int64], list[tuple[int, int, int, int, int]]]:
    """``table`` and ``runs`` of ``AttentionRuns``."""
    size = group.block_tokens
    firsts = [strategy.first_live_block(w.start) for w in work]
    seen = [
        table[first : (w.start + w.count - 1) // size + 1] for w, table, first in zip(work, tables, firsts, strict=True)
    ]
    whole = np.concatenate(seen) if len(seen) > 1 else seen[0]
    here = whole[whole.argmin()] > PADDING_BLOCK  # quicker than min
    assert here or ((whole > PADDING_BLOCK) | (whole <= OFFLOADED)).all(), "a query needs a block that is gone"
    table_begins = accumulate(map(len, seen), initial=0)
    return whole, [
        (begin, w.count, w.start, at, first * size)
        for begin, w, at, first in zip(begins, work, table_begins, firsts, strict=False)
    ]


def _attention_runs(table: torch.Tensor, runs: torch.Tensor, group: Group) -> AttentionRuns:
    return AttentionRuns(table, runs, group.kind, group.window, group.block_tokens)


def _decode_step(
    work: Items[Work],
    tables: list[NDArray[np.int64]],
    group: Group,
    strategy: GroupStrategy,
    dtype: torch.dtype,
    device: torch.device,
    paged: Attend | None,
) -> DecodeStep | Tables:
    size = group.block_tokens
    firsts = [strategy.first_live_block(w.start) for w in work]
    seen = [tables[i][first : w.start // size + 1] for i, (w, first) in enumerate(zip(work, firsts, strict=True))]
    blocks = np.full((len(work), max(map(len, seen))), PADDING_BLOCK, dtype=np.int64)
    for row, table in zip(blocks, seen, strict=True):
        row[: len(table)] = table
    positions = np.array([w.start for w in work])
    bases = np.array(firsts) * size
    if paged is not None:
        on_device = _on(device, blocks), _on(device, bases), _on(device, positions)
        return Tables(*on_device, group.kind, group.window, paged)
    keys = int((positions - bases).max()) + 1
    allowed = visible(group.kind, group.window, positions[:, None], bases[:, None] + np.arange(keys)[None])
    bias = None if allowed.all() else _bias(allowed, dtype, device)[:, None, None]
    return DecodeStep(_on(device, blocks), keys, bias)


def _prefill_step(
    work: Work,
    begin: int,
    table: NDArray[np.int64],
    group: Group,
    strategy: GroupStrategy,
    dtype: torch.dtype,
    device: torch.device,
) -> PrefillStep:
    first = strategy.first_live_block(work.start)
    end = work.start + work.count
    blocks = table[first : (end - 1) // group.block_tokens + 1]
    base = first * group.block_tokens
    keys = end - base
    bias = None
    whole = group.kind is Kind.FULL or end <= group.window  # no query of the run is too far from the first key
    if work.start > base or not whole:
        positions = np.arange(work.start, end)
        seen = visible(group.kind, group.window, positions[:, None], base + np.arange(keys)[None])
        bias = _bias(seen, dtype, device)
    assert (blocks > PADDING_BLOCK).all(), "a query needs a block that is gone"
    return PrefillStep(begin, begin + work.count, _on(device, blocks.copy()), keys, bias)


def _bias(allowed: NDArray[np.bool_], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    bias = torch.zeros(allowed.shape, dtype=dtype, device=device)
    return bias.masked_fill_(_on(device, ~allowed), float("-inf"))


def _on(device: torch.device, array: NDArray[Any]) -> torch.Tensor:
    """``array`` where the model computes; on a CPU without a copy."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device)
