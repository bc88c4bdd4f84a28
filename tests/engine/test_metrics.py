"""Every number of the statistics is a metric with its own value, in text for Prometheus; the docs list them all."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from docs.examples.dict_tier import DictTier
from stowage import metrics
from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.metrics import Collector, exposition
from tests.engine.conftest import greedy, random_prompt

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
ROWS = (*metrics.ENGINE, *metrics.WEIGHTS, *metrics.GRAPHS, *metrics.POOL, *metrics.STORE, *metrics.TIER)


class OwnTier(DictTier):
    def stats(self):
        return super().stats() | {"shelves": 7, "colour": "blue"}


@pytest.fixture(scope="module")
def engine(checkpoints, tmp_path_factory):
    directory = tmp_path_factory.mktemp("metrics") / "cache"
    memory = Memory(kv_cache_memory="4MiB", host_memory="4MiB", disk=f"{directory}:32MiB", snapshot_tokens=128)
    with Engine(checkpoints("gemma3"), memory, tiers=[OwnTier(1 << 20)]) as opened:
        for n in range(3):
            opened.generate([random_prompt(500, seed=n), random_prompt(300, seed=0)], greedy(4))
        assert opened.flush()
        opened.drop_device_cache()
        opened.drop_host()
        opened.forget_costs()
        opened.generate([random_prompt(500, seed=0)], greedy(4))
        assert opened.flush()
        yield opened


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def one(found, name: str, **labels: str) -> float:
    return found.pop((f"stowage_{name}", frozenset(labels.items())))


def test_every_number_comes_out_once_with_its_value(engine):
    stats = engine.stats()
    found = samples(exposition(stats))
    names = {row.stat: row.metric.removeprefix("stowage_") for row in metrics.ENGINE}
    for stat, value in stats["engine"].items():
        assert one(found, names[stat]) == value
    assert one(found, "exact") == stats["exact"] == 1
    assert one(found, "prefill_tokens_per_second") == stats["prefill_tokens_per_s"]
    names = {row.stat: row.metric.removeprefix("stowage_") for row in metrics.POOL}
    for pool in stats["pools"]:
        labels = {"group": str(pool["group"]), "kind": pool["kind"]}
        for stat in pool.keys() - {"group", "kind"}:
            assert one(found, names[stat], **labels) == pool[stat]
    store = dict(stats["store"])
    of_tier = {row.stat: row.metric.removeprefix("stowage_") for row in metrics.TIER}
    for tier in ("disk", "dict"):
        state = store.pop(f"{tier}.breaker")
        states = {s: one(found, "tier_breaker_state", tier=tier, state=s) for s in ("closed", "half-open", "open")}
        assert states == {"closed": 0, "half-open": 0, "open": 0} | {state: 1}
        assert one(found, "tier_breaker_opened_total", tier=tier) == store.pop(f"{tier}.breaker_opened")
        for name in [name for name in store if name.startswith(f"{tier}.")]:
            value = store.pop(name)
            stat = name.removeprefix(f"{tier}.")
            if stat in of_tier:
                assert one(found, of_tier[stat], tier=tier) == value
            elif isinstance(value, int | float):
                assert (tier, stat) == ("dict", "shelves"), f"the disk's {stat} has no metric of its own"
                assert one(found, "tier_stat", tier=tier, stat=stat) == value
    for tier in ("host", "disk", "dict"):
        assert one(found, "chunk_hits_total", tier=tier) == store.pop(f"hits.{tier}")
    for name in [name for name in store if name.startswith("slab")]:
        slab, _, what = name.removeprefix("slab").partition(".")
        metric = {"bytes": "host_slab_bytes", "bytes_used": "host_slab_used_bytes"}[what]
        assert one(found, metric, slab=slab) == store.pop(name)
    names = {row.stat: row.metric.removeprefix("stowage_") for row in metrics.STORE}
    for stat, value in store.items():
        assert one(found, names[stat]) == value
    assert found == {}, "metrics that no statistic explains"


def test_what_happened_shows(engine):
    found = samples(engine.metrics())
    for name, labels in (
        ("tokens_reused_total", {}),
        ("tokens_computed_total", {}),
        ("chunk_hits_total", {"tier": "disk"}),
        ("tier_chunks_written_total", {"tier": "disk"}),
        ("tier_chunks_read_total", {"tier": "disk"}),
        ("tier_used_bytes", {"tier": "disk"}),
        ("tier_evicted_chunks_total", {"tier": "dict"}),
    ):
        assert one(found, name, **labels) > 0, name
    assert one(found, "tier_limit_bytes", tier="disk") == 32 << 20


def test_a_small_pool_evicts(checkpoints):
    with Engine(checkpoints("llama"), Memory(kv_cache_memory="512KiB")) as small:
        for n in range(6):
            small.generate([random_prompt(150, seed=n)], greedy(2))
        assert one(samples(small.metrics()), "device_blocks_evicted_total", group="0", kind="full") > 0


def test_an_engine_without_host_memory_has_metrics_too(checkpoints):
    with Engine(checkpoints("llama"), Memory(kv_cache_memory="1MiB")) as small:
        small.generate([[5, 6, 7]], greedy(1))
        found = samples(small.metrics())
    assert one(found, "tokens_computed_total") > 0
    assert not [name for name, _ in found if name.startswith(("stowage_tier", "stowage_host", "stowage_chunk"))]


def test_a_registry_serves_it_over_http(engine):
    registry = prometheus_client.CollectorRegistry()
    registry.register(Collector(engine.stats))
    server, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert samples(text).keys() == samples(engine.metrics()).keys()


def test_names_follow_the_conventions():
    names = [row.metric for row in ROWS]
    assert len(set(names)) == len(names)
    for row in ROWS:
        assert row.help and row.metric.startswith("stowage_") and row.metric.islower(), row
        assert "_total_" not in row.metric and not row.metric.endswith("_count"), row


def test_the_documentation_lists_every_metric():
    text = PAGE.read_text(encoding="utf-8").partition("\n## Server\n")[0]
    assert [row.metric for row in ROWS if f"| `{row.metric}` | `{row.stat}` | {row.help} |" not in text] == []
    listed = {name.rstrip("`") for name in text.split("`") if name.startswith("stowage_") and " " not in name}
    others = {"stowage_exact", "stowage_prefill_tokens_per_second"}
    others |= {"stowage_host_slab_bytes", "stowage_host_slab_used_bytes"}
    others |= {"stowage_chunk_hits_total", "stowage_tier_breaker_state", "stowage_tier_breaker_opened_total"}
    others |= {"stowage_tier_stat", 'stowage_tier_breaker_state{state="open"}'}
    assert listed <= {row.metric for row in (*ROWS, *metrics.VLLM)} | others


@pytest.mark.parametrize(
    "event", ["tier_corrupt", "dropped", "timed_out", "breaker", "evicted", "no_room", "disk_full"]
)
def test_every_kind_of_trouble_has_a_metric(event, engine):
    assert f"stowage_{event}" in engine.metrics() or f"_{event}" in engine.metrics()
