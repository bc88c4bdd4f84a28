"""A tier of your own, as small as can be: chunks in a dict, the oldest go first. See docs/internals.md."""

from collections import deque

import numpy as np

from stowage.storage.protocol import Outcome, Transfer


class DictTier:
    """Implements Tier and Described. Copying some chunks takes no time worth a thread, so nothing here waits."""

    name = "dict"

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._chunks: dict[bytes, tuple[int, bytes]] = {}
        self._outcomes: deque[Outcome] = deque()
        self._evicted = 0

    def lookup(self, keys: list[bytes]) -> np.ndarray:
        return np.array([self._chunks.get(key, (0, b""))[0] for key in keys], np.uint64)

    def load(self, transfer: Transfer) -> None:
        ok = np.zeros(len(transfer.keys), np.bool_)
        masks = np.zeros(len(transfer.keys), np.uint64)
        for at, (key, buffer) in enumerate(zip(transfer.keys, transfer.buffers, strict=True)):
            mask, payload = self._chunks.get(key, (0, b""))
            if mask and len(payload) == buffer.nbytes:
                buffer[:] = payload
                ok[at], masks[at] = True, mask
        self._outcomes.append(Outcome(transfer.id, ok, masks))

    def store(self, transfer: Transfer) -> None:
        ok = np.zeros(len(transfer.keys), np.bool_)
        for at, (key, buffer) in enumerate(zip(transfer.keys, transfer.buffers, strict=True)):
            self.discard([key])
            if buffer.nbytes <= self._limit_bytes:
                self._make_room(buffer.nbytes)
                self._chunks[key] = (int(transfer.masks[at]), bytes(buffer))
                self._used_bytes += buffer.nbytes
        for at, key in enumerate(transfer.keys):  # a chunk may have made room for a later one of the same transfer
            ok[at] = key in self._chunks
        self._outcomes.append(Outcome(transfer.id, ok, transfer.masks.copy()))

    def poll(self) -> list[Outcome]:
        return [self._outcomes.popleft() for _ in range(len(self._outcomes))]

    def discard(self, keys: list[bytes]) -> None:
        for key in keys:
            _, payload = self._chunks.pop(key, (0, b""))
            self._used_bytes -= len(payload)

    def close(self, deadline_s: float) -> None:
        self._chunks.clear()
        self._used_bytes = 0

    def stats(self) -> dict[str, int | float | str]:
        return {"bytes_used": self._used_bytes, "bytes_limit": self._limit_bytes, "evicted": self._evicted}

    def _make_room(self, length: int) -> None:
        while self._used_bytes + length > self._limit_bytes:
            self.discard([next(iter(self._chunks))])
            self._evicted += 1
