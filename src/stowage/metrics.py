"""An engine's statistics as Prometheus metrics. docs/reference/metrics.md is made from the tables below.

Owns names, kinds and help texts; the numbers are those of `Engine.stats()`, read when somebody asks. Nothing is counted
here. A number that no table knows (a user's tier may have its own) comes out as `stowage_tier_stat`, never lost.

    Engine.metrics()                                   the text, once
    prometheus_client.REGISTRY.register(Collector(engine.stats))       beside the metrics of your own program
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector as _Collector

BREAKER_STATES: Final = ("closed", "half-open", "open")


@dataclass(frozen=True, slots=True)
class Row:
    """One number of the statistics and its metric. One whose name ends in `_total` is a counter, any other a gauge."""

    stat: str
    metric: str
    help: str


def _rows(text: str) -> tuple[Row, ...]:
    """One row per line: the number's name, the metric's name without `stowage_`, the help text."""
    parts = (line.split(maxsplit=2) for line in text.strip().splitlines())
    return tuple(Row(stat, f"stowage_{metric}", about) for stat, metric, about in parts)


ENGINE: Final = _rows("""
tokens_reused           tokens_reused_total            prompt tokens that were not computed
tokens_computed         tokens_computed_total          tokens that went through the model
prompt_tokens_computed  prompt_tokens_computed_total   of these, tokens of prompts
recompute_saved_s       recompute_saved_seconds_total  predicted time that computing the reused tokens would have taken
tiers_waited_s          waited_for_tiers_seconds_total time that sequences waited for tiers below the device
copies_failed           copies_failed_total            chunks whose copy between device and host failed
preemptions             preemptions_total              sequences that had to leave the device because it was full
preemptions_recomputed  preemptions_recomputed_total   of these, the ones that were computed again
blocks_moved_out        device_blocks_moved_out_total  blocks of long sequences that went to host and are read there
loads_refused           loads_refused_total            prefixes computed because loading would have taken longer
overlapped_loads        overlapped_loads_total         prefixes whose front was computed while a tier brought their end
""")

POOL: Final = _rows("""
blocks   device_blocks                blocks of the pool
used     device_blocks_used           blocks that running sequences hold
cached   device_blocks_cached         blocks that keep a prefix and are free to be taken
bytes    device_bytes                 memory of the pool
evicted  device_blocks_evicted_total  cached blocks that were taken for something else
""")

STORE: Final = _rows("""
lookups              chunk_lookups_total           chunks that were looked up in host and below
fetches              fetches_total                 fetches of prefixes
joined               chunk_loads_joined_total      chunks that were on their way already when they were asked for
promoted             chunks_promoted_total         chunks loaded from a lower tier into host
promoted_bytes       promoted_bytes_total          their bytes
stores               chunks_stored_total           chunks stored in host
spills               chunks_spilled_total          chunks written to a lower tier
spilled_bytes        spilled_bytes_total           their bytes
spill_failures       chunk_spill_failures_total    chunks that a lower tier did not take
load_failures        chunk_load_failures_total     chunks that a lower tier did not bring
timeouts             transfers_timed_out_total     transfers of lower tiers that passed their deadline
fetch_timeouts       fetches_timed_out_total       fetches that ended at their deadline, with what had come
stores_without_room  host_chunks_no_room_total     chunks that were not stored because host was full of pinned ones
evictions            host_chunks_evicted_total     chunks that left host for others
spills_dropped       chunk_spills_dropped_total    chunks that left host, or were given up, before they were written
spills_waiting       chunk_spills_waiting          chunks that wait to be written
transfers_under_way  transfers_under_way           transfers that no tier has reported yet
chunks_pinned        host_chunks_pinned            chunks that cannot leave host at the moment
host_bytes           host_bytes                    memory of the host arena
""")

TIER: Final = _rows("""
bytes_used           tier_used_bytes                 bytes in use, as the limit counts them
bytes_filled         tier_filled_bytes               of them, bytes that chunks were written to; the rest is set aside
bytes_limit          tier_limit_bytes                the limit
chunks               tier_chunks                     chunks that can be found
segments             tier_segments                   segment files
segment_bytes        tier_segment_bytes              length of a new segment
direct               tier_direct_io                  1: reads bypass the page cache
strangers            tier_foreign_files              files in the directory that are not Stowage's
loads_under_way      tier_loads_under_way            loads that were not reported yet
stores_under_way     tier_stores_under_way           stores that were not reported yet
reads                tier_chunks_read_total          chunks that were read and verified
read_bytes           tier_read_bytes_total           their bytes
read_calls           tier_reads_total                stretches of the disk that were read
writes               tier_chunks_written_total       chunks that were written
write_bytes          tier_written_bytes_total        their bytes
rewritten            tier_chunks_rewritten_total     hot chunks that were copied out of a segment that had to go
corrupt              tier_corrupt_chunks_total       chunks that did not verify: wrong bytes, or too few
unknown_codes        tier_unknown_codes_total        chunks that a later version had packed
packed               tier_packed_chunks_total        chunks that were packed before they were written
packed_bytes_saved   tier_packed_saved_bytes_total   bytes that packing left out of what was written
mismatched           tier_mismatched_chunks_total    chunks that have another length than asked for
vanished             tier_vanished_chunks_total      chunks that another process had reclaimed
read_errors          tier_read_errors_total          reads that the disk refused
write_errors         tier_write_errors_total         writes that the disk refused
dropped              tier_dropped_chunks_total       chunks that were not begun because the queue was full
timed_out            tier_timed_out_chunks_total     chunks that were not begun before their deadline
refused              tier_refused_chunks_total       chunks that cannot be stored: too long, or empty
backed_off           tier_backed_off_chunks_total    chunks that were not tried because the disk had just failed
evicted              tier_evicted_chunks_total       chunks that were lost when their segment was reclaimed
reclaimed_segments   tier_reclaimed_segments_total   segments that were removed to keep the limit
no_room              tier_no_room_total              times the limit was reached and nothing could go
enospc               tier_disk_full_total            times the file system was full
direct_fallbacks     tier_direct_fallbacks_total     times the file system refused to bypass the page cache
sealed_segments      tier_sealed_segments_total      segments that were finished
repaired_segments    tier_repaired_segments_total    torn segments of killed writers that were finished
removed_leftovers    tier_removed_leftovers_total    empty files of killed writers that were removed
damaged_segments     tier_damaged_segments_total     segments without a valid header or footer
unreadable_segments  tier_unreadable_segments_total  segments under another protection, or a key that is not there
removed_directories  tier_removed_directories_total  times somebody removed the directory of a running tier
faults               tier_faults_total               bugs: please report them
""")

VLLM: Final = _rows("""
requests       requests_total                    requests that were looked up
requests_hit   requests_hit_total                of these, the ones whose prefix was loaded
tokens_asked   tokens_asked_total                prompt tokens of these requests
tokens_loaded  tokens_loaded_total               of these, tokens that were not computed
loads_refused  loads_refused_total               prefixes computed because loading would have taken longer
loads_failed   device_loads_failed_total         loads into the device that failed, and were computed
stores_failed  device_stores_failed_total        copies out of the device that failed
loaded_bytes   device_loaded_bytes_total         bytes that were copied into the device, all ranks
stored_bytes   device_stored_bytes_total         bytes that were copied out of the device, all ranks
faults         faults_total                      bugs: please report them; the plugin has stopped loading and storing
""")
"""Of the plugin for vLLM, which has STORE and TIER too; each series with vLLM's labels `model_name` and `engine`."""

WEIGHTS: Final = _rows("""
resident_bytes  weights_resident_bytes             weights that stay in device memory, norms and the like apart
small_bytes     weights_small_bytes                norms, biases and buffers, which always stay
ring_bytes      weights_ring_bytes                 device buffers that are filled ahead
mapped_bytes    weights_mapped_bytes               weights that are views over the mapped checkpoint
prefetch_bytes  weights_prefetch_bytes             weights that are copied from host memory for every forward
stream_bytes    weights_stream_bytes               weights that are read from disk for every forward
rows_bytes      weights_rows_bytes                 embeddings whose rows are read as they are asked for
image_bytes     weights_image_bytes                disk that weights take in another form than the checkpoint's
experts_bytes   weights_experts_bytes              experts that are read when the router chooses them
cache_bytes     weights_cache_bytes                device memory of the cache of experts
cache_experts   weights_cache_experts              how many experts the cache holds
expert_hits     weights_expert_hits_total          chosen experts that were in the cache
expert_misses   weights_expert_misses_total        chosen experts that were read
expert_read_bytes  weights_expert_read_bytes_total bytes that were read for them
passes          weights_passes_total               forwards of the whole model
read_bytes      weights_read_bytes_total           bytes that were read for them
stall_s         weights_stall_seconds_total        time that forwards waited for weights
forward_s       weights_forward_seconds_total      time of those forwards
""")

GRAPHS: Final = _rows("""
captured_steps  graphs_steps_total        decode steps that were replayed as CUDA graphs
plain_steps     graphs_plain_steps_total  decode steps that were not, while shapes are recorded or where they cannot be
recorded        graphs                    CUDA graphs that are recorded
refused         graphs_refused_total      shapes that were given up: the log says why
bytes           graphs_bytes              device memory of CUDA graphs and their inputs
limit_bytes     graphs_limit_bytes        what of the KV budget they may take
""")

_CHUNK_HITS: Final = "stowage_chunk_hits_total", "chunks that requests took, by the tier that had them"
_BREAKER: Final = "stowage_tier_breaker_state", "1 for the state that the tier's breaker is in"
_OPENED: Final = "stowage_tier_breaker_opened_total", "times the tier was left alone because it kept failing"
_SLAB_USED: Final = "stowage_host_slab_used_bytes", "bytes of the slab that hold chunks"
_SLAB: Final = "stowage_host_slab_bytes", "bytes of the slab"
_EXACT: Final = ("stowage_exact", "1: answers are the same to the bit from every tier, in every batch; 0: not so")
_PREFILL: Final = "stowage_prefill_tokens_per_second", "measured speed of computing prompts; 0: not measured yet"
_OTHER: Final = "stowage_tier_stat", "a number of a tier that has no metric of its own"


class Collector(_Collector):
    """For a `prometheus_client` registry. `stats` is `Engine.stats`, called for every scrape."""

    def __init__(self, stats: Callable[[], Mapping[str, Any]]) -> None:
        self._stats = stats

    def describe(self) -> list[Metric]:
        """Nothing: a registry would call `collect` to find out, and the engine may be busy."""
        return []

    def collect(self) -> Iterator[Metric]:
        families = _Families()
        families.add_engine(self._stats())
        yield from families.by_name.values()


def exposition(stats: Mapping[str, Any]) -> str:
    """The statistics in the text format that Prometheus reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(lambda: stats))
    return generate_latest(registry).decode()


def tiers_in(store: Mapping[str, Any]) -> list[str]:
    """The names of the tiers that have numbers in a store's statistics."""
    return [name.removesuffix(".breaker") for name in store if name.endswith(".breaker")]


class _Families:
    """Metrics by name, in the order of the tables."""

    def __init__(self) -> None:
        self.by_name: dict[str, Metric] = {}

    def _add(self, name: str, about: str, value: float, **labels: str) -> None:
        family = self.by_name.get(name)
        if family is None:
            make = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = self.by_name[name] = make(name, about, labels=list(labels))
        assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
        family.add_metric(list(labels.values()), value)

    def _add_rows(self, rows: tuple[Row, ...], numbers: Mapping[str, Any], **labels: str) -> None:
        for row in rows:
            if row.stat in numbers:
                self._add(row.metric, row.help, numbers[row.stat], **labels)

    def add_engine(self, stats: Mapping[str, Any]) -> None:
        self._add_rows(ENGINE, stats["engine"])
        self._add(*_EXACT, float(stats["exact"]))
        self._add(*_PREFILL, stats["prefill_tokens_per_s"] or 0.0)
        for pool in stats["pools"]:
            self._add_rows(POOL, pool, group=str(pool["group"]), kind=pool["kind"])
        if stats.get("weights") is not None:
            self._add_rows(WEIGHTS, stats["weights"])
        if stats.get("graphs") is not None:
            self._add_rows(GRAPHS, stats["graphs"])
        if stats["store"] is not None:
            self._add_store(stats["store"])

    def _add_store(self, store: Mapping[str, Any]) -> None:
        self._add_rows(STORE, store)
        for name, value in store.items():
            first, dot, last = name.partition(".")
            if first == "hits":
                self._add(*_CHUNK_HITS, value, tier=last)
            elif dot and first.startswith("slab"):
                self._add(*(_SLAB_USED if last == "bytes_used" else _SLAB), value, slab=first.removeprefix("slab"))
        for tier in tiers_in(store):
            prefix = tier + "."
            self._add_tier(tier, {n.removeprefix(prefix): v for n, v in store.items() if n.startswith(prefix)})

    def _add_tier(self, tier: str, numbers: Mapping[str, Any]) -> None:
        for state in BREAKER_STATES:
            self._add(*_BREAKER, float(numbers["breaker"] == state), tier=tier, state=state)
        self._add(*_OPENED, numbers["breaker_opened"], tier=tier)
        self._add_rows(TIER, numbers, tier=tier)
        known = {row.stat for row in TIER} | {"breaker", "breaker_opened"}
        for name, value in numbers.items():
            if name not in known and isinstance(value, int | float):
                self._add(*_OTHER, value, tier=tier, stat=name)
