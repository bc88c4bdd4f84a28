"""What shared tiers are asked about a prompt, from the moment it is queued, and how long its admission waits for them.

Never slower than not having it: an admission waits no longer than a small share of the time that the prompt would take
to compute, and not at all for a tier that lately took longer than that. What is answered later serves the next prompt.
"""

from __future__ import annotations

from collections.abc import Callable

from stowage.cache.cost_model import CostModel
from stowage.cache.store import TieredStore
from stowage.engine.sequence import Sequence

__all__ = ["RemoteLookup"]


class RemoteLookup:
    """``timeout_s``: the longest wait for answers, however long the prompt."""

    def __init__(
        self, store: TieredStore | None, cost_model: CostModel, clock: Callable[[], float], timeout_s: float
    ) -> None:
        self._store = store if store is not None and store.probes else None
        self._cost_model = cost_model
        self._clock = clock
        self._timeout_s = timeout_s

    def ask(self, sequence: Sequence) -> None:
        """Start to ask about the prompt of ``sequence``, which has just been queued."""
        if self._store is None:
            return
        length = sequence.reusable_tokens
        sequence.keys.extend(sequence.tokens, len(sequence.tokens))
        sizes = [group.chunk_tokens for group in self._store.geometry.groups]
        wanted = [(index, sequence.keys.of(index)[: length // size]) for index, size in enumerate(sizes)]
        sequence.probes = self._store.probe(wanted)
        if sequence.probes:
            limit_s = self._cost_model.lookup_limit_s(length, self._timeout_s)
            sequence.probes_until_s = self._clock() + limit_s
            sequence.probes = [probe for probe in sequence.probes if probe.expected_s <= limit_s]

    def open(self, sequence: Sequence) -> bool:
        """Whether an admission of ``sequence`` should wait for answers still."""
        if sequence.probes and (self._clock() >= sequence.probes_until_s or all(p.done for p in sequence.probes)):
            sequence.probes = []
        return bool(sequence.probes)
