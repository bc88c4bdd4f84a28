"""The scheduler: continuous batching under a token budget, with chunked prefill and preemption.

Owns the queues. A step takes one token of each decoding sequence first, then pieces of prefills, then admits waiting
sequences while the budget lasts. When blocks run out, sequences larger than the device offload some of theirs
(``long_context``); else the youngest sequence is preempted, so the oldest always proceeds and every request ends. After
a forward that raised, its sequences are computed one by one past that point, to find the one at fault. The scheduler
never waits for a tier: a sequence whose prefix is loading is simply not ready yet.
"""

from __future__ import annotations

import sys
from collections import deque

from stowage.core.geometry import Kind
from stowage.engine.admission import Admissions
from stowage.engine.kv_manager import KVManager
from stowage.engine.overlapped_loads import OverlappedLoads
from stowage.engine.sequence import Phase, Sequence, recurrent_cuts, sequence_of
from stowage.engine.swap.long_context import LongContextSwap
from stowage.engine.swap.preemption import PreemptionSwap
from stowage.errors import StowageError, TransferError
from stowage.executor.batch import Work
from stowage.executor.determinism.pieces import Pieces

STUCK_MAX = 8
"""Steps in a row in which the oldest sequence could not proceed, although nothing was in flight."""
LOGITS_BYTES_MAX = 64 << 20
"""Size limit of one step's float32 logits, for requests with ``prompt_logprobs``."""


class Scheduler:
    """Queues of sequences and the choice of each step's work."""

    def __init__(
        self,
        kv_manager: KVManager,
        admissions: Admissions,
        overlapped_loads: OverlappedLoads,
        preemption_swap: PreemptionSwap,
        long_context: LongContextSwap,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        pieces: Pieces,
    ) -> None:
        self._kv_manager = kv_manager
        self._admissions = admissions
        self._overlapped_loads = overlapped_loads
        self._preemption_swap = preemption_swap
        self._long_context = long_context
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._pieces = pieces
        self._logit_rows_max = max(pieces.grid, LOGITS_BYTES_MAX // (4 * kv_manager.layout.vocab))
        self._logit_rows = 0
        """What is left of ``_logit_rows_max`` in the step that is being scheduled."""
        self.failed: list[tuple[Sequence, StowageError]] = []
        """Sequences that cannot proceed, for the loop to end; ``finish`` takes them out of the queues."""
        self._stuck = 0
        self._isolated_until: dict[int, int] = {}
        """Sequences that are computed alone, by id, until so many of their tokens are computed."""
        self._isolation_batch_max = max_num_seqs
        self._just_preempted: set[int] = set()
        """By id. They may have work in this step on blocks that they just lost, so they are not resumed before the
        next one."""

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running or len(self._admissions))

    @property
    def loading(self) -> bool:
        """Whether some sequence waits for a tier."""
        return bool(len(self._admissions) or len(self._overlapped_loads))

    def add(self, sequence: Sequence) -> None:
        self._admissions.announce(sequence)
        self.waiting.append(sequence)

    def schedule(self) -> list[Work]:
        """The next step's work; empty when every sequence waits for a tier, or there is none."""
        self._poll_loads()
        self._just_preempted.clear()
        work: list[Work] = []
        budget = self._max_num_batched_tokens
        self._logit_rows = self._logit_rows_max
        apart = self._next_isolated()
        for sequence in apart or list(self.running):
            if sequence.phase is Phase.RUNNING and len(sequence.tokens) - sequence.computed == 1:
                budget -= self._schedule_sequence(sequence, 1, work)
        for sequence in apart or list(self.running):
            if sequence.phase is Phase.RUNNING and len(sequence.tokens) - sequence.computed > 1 and budget > 0:
                budget -= self._schedule_sequence(sequence, budget, work)
        while budget > 0 and not apart and (admitted := self._admit()) is not None:
            if admitted.phase is Phase.RUNNING and admitted.id not in self._isolated_until:
                budget -= self._schedule_sequence(admitted, budget, work)
        work = [w for w in work if sequence_of(w).phase is Phase.RUNNING][: self._isolation_batch_max]
        self._notice_stuck(work)
        self._admissions.forwards += bool(work)
        return work

    def isolate(self, work: list[Work]) -> None:
        """A forward of ``work`` raised: recompute its sequences, since their blocks may be damaged, one by one until
        they are past that point. In case none is at fault (the batch was too large), later batches are half as large.
        """
        for item in reversed(work):
            sequence = sequence_of(item)
            self.running.remove(sequence)
            self._overlapped_loads.drop(sequence)
            self._preemption_swap.recompute(sequence)
            self.waiting.appendleft(sequence)
            self._isolated_until[sequence.id] = item.start + item.count
        self._isolation_batch_max = max(1, len(work) // 2)

    def end_isolation(self) -> None:
        """A sequence that was computed alone was at fault: others can be batched again."""
        self._isolation_batch_max = self._max_num_seqs

    def _next_isolated(self) -> list[Sequence]:
        """The first running sequence that must be computed alone, if there is one."""
        for sequence in self.running:
            if sequence.computed >= self._isolated_until.get(sequence.id, sys.maxsize):
                del self._isolated_until[sequence.id]
        return [sequence for sequence in self.running if sequence.id in self._isolated_until][:1]

    def _notice_stuck(self, work: list[Work]) -> None:
        """The oldest sequence always proceeds, unless its blocks cannot be copied to host memory, again and again."""
        store = self._kv_manager.store
        under_way = len(self._admissions) or len(self._kv_manager.async_copies)
        if work or not self.running or under_way or store is None or not store.idle:
            self._stuck = 0
            return
        self._stuck += 1
        if self._stuck > STUCK_MAX:
            error = TransferError(
                "this sequence is larger than the device KV budget, and its blocks could not be copied to host memory."
            )
            self.failed.append((self.running[0], error))
            self._stuck = 0

    def finish(self, sequence: Sequence) -> None:
        """Take ``sequence`` out of every queue and free its memory, in whatever phase it is."""
        if sequence.phase is Phase.LOADING:
            self._admissions.cancel(sequence)
        elif sequence.phase is Phase.PREEMPTED:
            self._preemption_swap.drop(sequence)
        elif sequence.phase is Phase.RUNNING:
            self._overlapped_loads.drop(sequence)
            self._kv_manager.drop(sequence)
        self._isolated_until.pop(sequence.id, None)
        if sequence in self.running:
            self.running.remove(sequence)
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.phase = Phase.FINISHED

    def _poll_loads(self) -> None:
        for sequence in self._admissions.poll():
            if sequence.phase is Phase.RUNNING:
                self.running.append(sequence)
            else:
                self.waiting.appendleft(sequence)
        for sequence in self._overlapped_loads.poll():
            self.running.remove(sequence)
            self.waiting.appendleft(sequence)

    def _admit(self) -> Sequence | None:
        """Move the first waiting sequence on, if there is room; later ones never overtake it."""
        if not self.waiting or len(self.running) + len(self._admissions) >= self._max_num_seqs:
            return None
        sequence = self.waiting[0]
        if sequence.id in self._just_preempted:
            return None
        alone = not self.running and not len(self._admissions)
        if sequence.phase is Phase.PREEMPTED:
            headroom = 0 if alone else 1 + len(self.running)
            admitted = self._preemption_swap.swap_in(sequence, headroom, self.running)
        else:
            admitted = self._admissions.begin(sequence, self.running, others_wait=len(self.waiting) > 1)
        if not admitted:
            return None
        if sequence.phase is not Phase.WAITING:  # WAITING again: a load failed, it is retried without that chunk
            self.waiting.popleft()
        if sequence.phase is Phase.RUNNING:
            self.running.append(sequence)
        return sequence

    def _schedule_sequence(self, sequence: Sequence, budget: int, work: list[Work]) -> int:
        """Add a piece of ``sequence`` to ``work``, preempting younger ones for room if needed; return its tokens."""
        count = min(
            budget, len(sequence.tokens) - sequence.computed, self._snapshot_limit(sequence) - sequence.computed
        )
        if sequence.scoring:
            count = min(count, self._logit_rows)
        if self._long_context.is_long(sequence):  # smaller pieces, before others are preempted
            count = min(count, max(self._long_context.room(sequence), self._pieces.grid))
        count = self._pieces.cut(sequence, self._overlapped_loads.tokens(sequence, count))
        if not count:
            return 0
        while not self._kv_manager.extend(sequence, sequence.computed + count):
            missing = self._kv_manager.missing_blocks(sequence, sequence.computed + count)
            if self._long_context.make_room(missing, [sequence, *self.running]):
                continue
            victim = self.running[-1]
            if victim is not sequence:
                self._preempt(victim)
            elif smaller := self._pieces.cut(sequence, count // 2):
                count = smaller  # preempting itself would not help: it would be resumed to the same shortage
            elif len(self.running) > 1:
                self._preempt(sequence)
                return 0
            elif not self._preemption_swap.drop_newest():  # swapped sequences fill host memory
                return 0
        work.append(Work(sequence, sequence.computed, count, sequence.scoring))
        self._logit_rows -= count if sequence.scoring else 0
        return count

    def _snapshot_limit(self, sequence: Sequence) -> int:
        """The position at which prefill must stop for the next snapshot of recurrent state."""
        recurrent = self._kv_manager.layout.recurrent
        if recurrent is None:
            return len(sequence.tokens)
        return recurrent_cuts(sequence, recurrent.group, self._kv_manager.snapshot_tokens)

    def _preempt(self, sequence: Sequence) -> None:
        self._just_preempted.add(sequence.id)
        self.running.remove(sequence)
        self._overlapped_loads.drop(sequence)
        self._preemption_swap.swap_out(sequence)
        self.waiting.appendleft(sequence)

    def check(self) -> None:
        """Assert that every sequence is in exactly one queue, that of its phase, and that only they hold blocks."""
        assert all(s.phase is Phase.RUNNING for s in self.running)
        assert all(s.phase in (Phase.WAITING, Phase.PREEMPTED) for s in self.waiting)
        everyone = [*self.running, *self.waiting, *self._admissions.sequences]
        assert len({s.id for s in everyone}) == len(everyone), "a sequence is in two queues"
        self._long_context.check(everyone)
        assert len(self._preemption_swap) == sum(1 for s in self.waiting if s.phase is Phase.PREEMPTED)
        if not len(self._admissions):
            self._kv_manager.check(everyone)
        for pool in self._kv_manager.pools:
            assert pool.group.kind is not Kind.RECURRENT or all(
                len(s.table(pool.group.index)) == 1 for s in self.running
            )
