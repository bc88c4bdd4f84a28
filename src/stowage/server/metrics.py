"""The server's Prometheus metrics: its own counters of requests, and the engine's statistics.

Owns a registry of its own, so that two servers in one process do not mix. Label values come from fixed tables, never
from a client. docs/reference/metrics.md lists all metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector as _Collector
from prometheus_client.samples import Sample

from stowage.engine.request import Completion
from stowage.metrics import Collector
from stowage.server.apis.generation_request import GenerationRequest

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
MESSAGES: Final = "/v1/messages"
RESPONSES: Final = "/v1/responses"
GENERATION: Final = (COMPLETIONS, CHAT, MESSAGES, RESPONSES)
CLIENT_LEFT: Final = 499
"""Counted as the status where the client disconnected before there was one."""
_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_PER_TOKEN_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_TOKENS: Final = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)


class ServerMetrics:
    """Counters and histograms of one server."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry(auto_describe=False)
        self.requests = Counter(
            "stowage_http_requests", "requests that have ended, by status (499: the client left)",
            ["route", "status"], registry=registry,
        )  # fmt: skip
        self.seconds = Histogram(
            "stowage_http_request_seconds", "from the request's head to the last byte of the answer",
            ["route"], buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.first_token = Histogram(
            "stowage_time_to_first_token_seconds", "from the request's head to the first piece of its answer",
            ["route"], buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.per_token = Histogram(
            "stowage_time_per_token_seconds", "between tokens of a choice, on average",
            ["route"], buckets=_PER_TOKEN_SECONDS, registry=registry,
        )  # fmt: skip
        self.prompt_tokens = Histogram(
            "stowage_request_prompt_tokens", "tokens of prompts of a request", ["route"],
            buckets=_TOKENS, registry=registry,
        )  # fmt: skip
        self.answer_tokens = Counter("stowage_answer_tokens", "tokens of answers", ["route"], registry=registry)
        self.cached_tokens = Counter(
            "stowage_cached_prompt_tokens", "tokens of prompts that were not computed, by where they came from",
            ["tier"], registry=registry,
        )  # fmt: skip
        self.choices = Counter(
            "stowage_choices", "choices that have ended, by why", ["route", "reason"], registry=registry
        )
        ProcessCollector(registry=registry)

    def watch(self, stats: Callable[[], Any], **gauges: tuple[str, Callable[[], float]]) -> None:
        """Add the engine's statistics, and gauges that are read on each scrape: name, help and function of each."""
        self.registry.register(Collector(stats))
        for name, (about, read) in gauges.items():
            Gauge(f"stowage_{name}", about, registry=self.registry).set_function(read)

    def text(self) -> bytes:
        """The page for Prometheus. Waits for the engine's lock, so not on the event loop."""
        return generate_latest(_WithoutCreation(self.registry))

    def observe_request(self, route: str, status: int, seconds: float) -> None:
        self.requests.labels(route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)

    def totals(self) -> dict[str, float]:
        """The counters that the dashboard shows, summed over all routes."""
        asked = [s for s in _samples(self.requests) if s.labels.get("route") in GENERATION]
        return {
            "requests": _sum(asked, "_total"),
            "answer_tokens": _sum(_samples(self.answer_tokens), "_total"),
            "first_tokens": _sum(_samples(self.first_token), "_count"),
            "first_token_s": _sum(_samples(self.first_token), "_sum"),
        }

    def observe_choice(self, route: str, request: GenerationRequest, choice: int, completion: Completion) -> None:
        """One choice has its completion."""
        self.choices.labels(route, completion.finish_reason).inc()
        self.answer_tokens.labels(route).inc(0 if request.silent else len(completion.token_ids))
        if completion.decode_tokens_per_s:
            self.per_token.labels(route).observe(1 / completion.decode_tokens_per_s)
        if choice % request.n == 0:
            for tier, tokens in completion.reused_tokens.items():
                self.cached_tokens.labels(tier).inc(tokens)


def _samples(metric: Counter | Histogram) -> list[Sample]:
    return [sample for family in metric.collect() for sample in family.samples]


def _sum(samples: Iterable[Sample], suffix: str) -> float:
    return sum(sample.value for sample in samples if sample.name.endswith(suffix))


class _WithoutCreation(_Collector):
    """A registry's metrics without their `_created` times, which would double the length of the page."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._whole = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._whole.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            if family.samples:
                yield family


def tasks(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """Counts the event loop's tasks, from any thread."""
    return lambda: float(len(asyncio.all_tasks(loop)))
