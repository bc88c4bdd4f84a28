"""A transfer in progress at a tier that moves chunks one by one: which succeeded so far, and why others failed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stowage.storage.protocol import Outcome, Transfer


@dataclass(slots=True, eq=False)
class Flight:
    """One transfer in progress. `failures`: how many chunks failed, by what is said of them."""

    transfer: Transfer
    ok: NDArray[np.bool_] = field(init=False)
    masks: NDArray[np.uint64] = field(init=False)
    failures: Counter[str] = field(default_factory=Counter)
    refused: bool = False

    def __post_init__(self) -> None:
        count = len(self.transfer.keys)
        self.ok, self.masks = np.zeros(count, np.bool_), np.zeros(count, np.uint64)

    @property
    def unsettled(self) -> int:
        """Chunks of which nothing can be said yet."""
        return max(0, len(self.ok) - int(np.count_nonzero(self.ok)) - self.failures.total())

    def dropped(self) -> Outcome:
        """How it ends at a tier that takes no more."""
        if len(self.ok):
            self.failures["dropped: queue full"], self.refused = len(self.ok), True
        return self.outcome()

    def outcome(self) -> Outcome:
        text = ", ".join(f"{count} of {len(self.ok)} chunks {what}" for what, count in sorted(self.failures.items()))
        return Outcome(self.transfer.id, self.ok, self.masks, text, self.refused)
