"""The store's numbers in vLLM's log and among vLLM's metrics.

Owns the way there: vLLM adds up what connectors report in intervals, so counters travel as what was added since the
last report, gauges as they are. Names and help texts are those of ``stowage.metrics``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from stowage.metrics import STORE, TIER, VLLM, Row

INTERVAL_S = 0.1

_HITS = Row("hits", "stowage_chunk_hits_total", "chunks that requests took, by the tier that had them")

_SLABS = (
    Row("bytes_used", "stowage_host_slab_used_bytes", "bytes of the slab that hold chunks"),
    Row("bytes", "stowage_host_slab_bytes", "bytes of the slab"),
)


class Stats(KVConnectorStats):
    """The store's numbers in the form that vLLM passes on. ``data``: ``counters`` and ``gauges``, numbers by name."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or {})
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data: dict[str, dict[str, float]] = {"counters": {}, "gauges": {}}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.get("counters", {}).items():
            self.data["counters"][name] = self.data["counters"].get(name, 0) + value
        self.data["gauges"].update(other.data.get("gauges", {}))
        return self

    def reduce(self) -> dict[str, int | float]:
        """The line in vLLM's log: what people look for."""
        counters = self.data["counters"]
        asked, loaded = counters.get("tokens_asked", 0), counters.get("tokens_loaded", 0)
        line: dict[str, int | float] = {
            "Stowage tokens loaded": loaded,
            "of tokens asked": asked,
            "loaded MB": round(counters.get("loaded_bytes", 0) / 1e6, 1),
            "stored MB": round(counters.get("stored_bytes", 0) / 1e6, 1),
        }
        corrupt = sum(value for name, value in counters.items() if name.endswith(".corrupt"))
        if corrupt:
            line["corrupt chunks (not used)"] = corrupt
        return line

    def is_empty(self) -> bool:
        return not self.data["counters"] and not self.data["gauges"]


class Reporter:
    """Turns the numbers of ``read`` into reports, at most one per ``INTERVAL_S``. ``glance``: some of them, cheap to
    have; that they changed says that there is something to report.
    """

    def __init__(self, read: Callable[[], Mapping[str, int | float | str]], glance: Mapping[str, int]) -> None:
        self._read = read
        self._glance = glance
        self._seen: dict[str, int] = dict(glance)
        self._last: dict[str, float] = {}
        self._due_s = 0.0

    @property
    def behind(self) -> bool:
        """Whether something was not reported yet."""
        return self._seen != self._glance

    def report(self) -> Stats | None:
        """What was added since the last report; ``None`` when nothing was, or it is too early."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return None
        self._due_s = now_s + INTERVAL_S
        self._seen = dict(self._glance)
        counters: dict[str, float] = {}
        gauges: dict[str, float] = {}
        for name, value in self._read().items():
            if isinstance(value, str):
                continue
            if not _is_counter(name):
                gauges[name] = value
            elif value != self._last.get(name):  # the first report names all, so that a series is there at 0
                counters[name] = value - self._last.get(name, 0)
                self._last[name] = value
        return Stats({"counters": counters, "gauges": gauges}) if counters else None


_COUNTERS = {row.stat for row in (*VLLM, *STORE, *TIER) if row.metric.endswith("_total")}


def _is_counter(name: str) -> bool:
    first, _, last = name.rpartition(".")
    return first == "hits" or last in _COUNTERS


def _forget_series() -> None:
    """Those of an engine that this process had before: vLLM does the same to its own."""
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith("stowage_"):
            REGISTRY.unregister(collector)


class Metrics(KVConnectorPromMetrics):
    """Series ``stowage_*`` beside vLLM's own."""

    def __init__(
        self,
        config: Any,
        metric_types: Mapping[Any, Any],
        labels: list[str],
        values_of_engine: Mapping[int, list[object]],
    ) -> None:
        super().__init__(config, dict(metric_types), labels, dict(values_of_engine))
        self._values = values_of_engine
        _forget_series()
        self._series: dict[str, Any] = {}
        for row in (*VLLM, *STORE):
            self._series[row.stat] = self._make(row, labels)
        for row in (*TIER, _HITS):
            self._series[f".{row.stat}"] = self._make(row, [*labels, "tier"])
        for row in _SLABS:
            self._series[f"slab.{row.stat}"] = self._make(row, [*labels, "slab"])

    def _make(self, row: Row, labels: list[str]) -> Any:
        if row.metric.endswith("_total"):
            return self._counter_cls(name=row.metric.removesuffix("_total"), documentation=row.help, labelnames=labels)
        return self._gauge_cls(
            name=row.metric, documentation=row.help, labelnames=labels, multiprocess_mode="mostrecent"
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self._values.get(engine_idx, [])
        for name, value in transfer_stats_data.get("counters", {}).items():
            if (series := self._labelled(name, values)) is not None:
                series.inc(value)
        for name, value in transfer_stats_data.get("gauges", {}).items():
            if (series := self._labelled(name, values)) is not None:
                series.set(value)

    def _labelled(self, name: str, values: list[object]) -> Any:
        first, dot, last = name.partition(".")
        if not dot:
            stat, more = name, []
        elif first == "hits":
            stat, more = ".hits", [last]
        elif first.startswith("slab"):
            stat, more = f"slab.{last}", [first.removeprefix("slab")]
        else:
            stat, more = f".{last}", [first]
        series = self._series.get(stat)
        return None if series is None else series.labels(*values, *more)
