"""Host memory for weights that a device computes from: through copies, or by reading it over the link.

Owns a few large pieces of memory and who has which of their pages: each parameter begins at a page of its own. Pieces
are pinned whole, where that is wanted, once everything is in them; only the pages that were given away are, and take
memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stowage.core.geometry import round_up
from stowage.native.memory import reserved

PIECE_BYTES: Final = 1 << 30
"""Of addresses that are asked for at a time: so that few calls pin it all."""


class HostBuffers:
    """Host memory for weights."""

    def __init__(self) -> None:
        self._pieces: list[NDArray[np.uint8]] = []
        self._used: list[int] = []
        self._pinned: list[Any] = []
        self.whole = False
        """Whether all of it is pinned."""

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return sum(self._used)

    def keep(self, values: Tensor) -> Tensor:
        """The same values, contiguous, in memory that is theirs for good."""
        nbytes = values.nbytes
        taken = round_up(nbytes)
        if not self._pieces or self._used[-1] + taken > self._pieces[-1].nbytes:
            self._pieces.append(np.frombuffer(reserved(max(taken, PIECE_BYTES)), np.uint8))
            self._used.append(0)
        begin = self._used[-1]
        self._used[-1] = begin + taken
        piece = torch.from_numpy(self._pieces[-1][begin : begin + nbytes])
        return piece.view(values.dtype).view(values.shape).copy_(values.detach())

    def pin(self, pin: Callable[[NDArray[np.uint8]], Any]) -> None:
        """Pin what was given away, by ``pin``, which returns something to ``close``, or ``None``; keep nothing more."""
        self._pinned = [pin(piece[:used]) for piece, used in zip(self._pieces, self._used, strict=True)]
        self.whole = all(pinned is not None and pinned.whole for pinned in self._pinned)

    def close(self) -> None:
        """Unpin. The memory lives as long as somebody shows it. May be called twice."""
        while self._pinned:
            pinned = self._pinned.pop()
            if pinned is not None:
                pinned.close()
        self._pieces.clear()
        self._used.clear()
        self.whole = False
