"""The state that the dashboard and `stowage top` show: the engine, the tiers, the requests and the last hour.

Owns the history, and when the engine's statistics are read: once for all clients that wait meanwhile. The numbers are
those of /metrics: `Engine.stats()` and the server's metrics; nothing is counted here. docs/serving.md lists the state.

Memory is bounded: history and requests are ring buffers.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from stowage import __version__
from stowage.server import dashboard_state
from stowage.server.async_engine import AsyncEngine
from stowage.server.auth import Tenant
from stowage.server.metrics import ServerMetrics
from stowage.server.request_history import RequestHistory

EVERY_S: Final = 5.0
KEPT_S: Final = 3600.0
_PATIENCE_S: Final = 1.0
"""Statistics cannot be read while the engine computes a step; a client that waited this long gets the last ones."""
Stats = Mapping[str, Any]


class History:
    """Samples of the last `KEPT_S`, oldest first. `names`: of a sample's numbers; an unknown number is None."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self._samples: deque[tuple[float, list[float | None]]] = deque(maxlen=int(KEPT_S / EVERY_S))

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, at_s: float, numbers: Mapping[str, float | None]) -> None:
        self._samples.append((at_s, [numbers.get(name) for name in self.names]))

    def after(self, after_s: float) -> list[list[float | None]]:
        """Samples taken at `after_s` or later: the time first, then the numbers."""
        return [[round(at_s, 3), *numbers] for at_s, numbers in self._samples if at_s >= after_s]


class Monitor:
    """Collects one server's state. Its event loop's thread calls; all times are seconds since it began."""

    def __init__(self, async_engine: AsyncEngine, metrics: ServerMetrics) -> None:
        self._async_engine = async_engine
        self._metrics = metrics
        self._began_s = time.monotonic()
        self._started_at = time.time()
        self.request_history = RequestHistory(self._began_s)
        self.history = History(dashboard_state.sample_names(async_engine.engine))
        self._memory_layout = dashboard_state.MemoryLayout(async_engine.engine)
        self._seen: tuple[float, Stats] | None = None
        self._looking: asyncio.Future[Stats] | None = None

    async def state(self, tenant: Tenant, after_s: float) -> dict[str, Any]:
        """The state for one client, with the history and the ended requests from `after_s` on."""
        seen_s, stats = await self._look()
        numbers, now_s = self._metrics.totals(), self._now_s()
        async_engine = self._async_engine
        return {
            "server": {
                "model": async_engine.name,
                "version": __version__,
                "started_at": self._started_at,
                "now_s": round(now_s, 6),
                "age_s": round(now_s - seen_s, 6),
                "stopping": async_engine.stopping,
                "alive": async_engine.status in ("ok", "stopping", "hanging"),
                "max_model_len": async_engine.tokens_max,
                "choices_open": async_engine.choices_open,
                "choices_limit": async_engine.max_choices,
                "max_num_seqs": async_engine.max_num_seqs,
            },
            "totals": dashboard_state.totals(stats, numbers),
            "memory": self._memory_layout.memory(stats),
            "transfers": dashboard_state.transfers(stats),
            "requests": self.request_history.described(tenant, after_s),
            "history": {
                "every_s": EVERY_S,
                "names": ["at_s", *self.history.names],
                "samples": self.history.after(after_s),
            },
        }

    async def sample_for_ever(self) -> None:
        """Take a sample now and every `EVERY_S`, until it is cancelled."""
        while True:
            _, stats = await self._look(None)
            numbers = dashboard_state.sample(stats, self._metrics.totals(), self._async_engine.choices_open)
            self.history.add(self._now_s(), numbers)
            await asyncio.sleep(EVERY_S)

    async def _look(self, patience_s: float | None = _PATIENCE_S) -> tuple[float, Stats]:
        """The engine's statistics and when they were read. Old ones after `patience_s`, where there are any."""
        if self._looking is None or self._looking.done():
            self._looking = self._async_engine.look(self._async_engine.stats)
            self._looking.add_done_callback(self._see)  # also where no client waited for it
        looking = self._looking
        await asyncio.wait({looking}, timeout=patience_s if self._seen is not None else None)
        if looking.done():
            looking.result()
            self._see(looking)
        assert self._seen is not None
        return self._seen

    def _see(self, looking: asyncio.Future[Stats]) -> None:
        if looking.cancelled() or looking.exception() is not None:
            return
        if self._seen is None or self._seen[1] is not looking.result():
            self._seen = self._now_s(), looking.result()

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s
