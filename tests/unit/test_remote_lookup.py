"""How long an admission waits for what shared tiers say: a share of what it could save, and never in vain twice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stowage.cache.cost_model import CostModel
from stowage.cache.prefix_planner import PrefixRequest
from stowage.cache.remote_lookup import RemoteLookup
from stowage.storage.protocol import Probe

TIMEOUT_S = 0.5


class Shared:
    """A store with one shared tier, whose probes the test ends."""

    probes = True
    geometry = SimpleNamespace(groups=[SimpleNamespace(chunk_tokens=64), SimpleNamespace(chunk_tokens=32)])

    def __init__(self, *probes: Probe) -> None:
        self.asked: list[Any] = []
        self._probes = list(probes)

    def probe(self, wanted: Any, certain: Any) -> list[Probe]:
        self.asked.append(wanted)
        return list(self._probes)


class Keys:
    def of(self, group: int) -> list[bytes]:
        return [bytes([group, n]) for n in range(700 // (64, 32)[group])]


class Known(CostModel):
    """What computing a prompt takes is known, or not."""

    def __init__(self, seconds: float | None) -> None:
        super().__init__(TIMEOUT_S)
        self.seconds = seconds

    def recompute_s(self, tokens: int) -> float | None:
        return self.seconds


def asked(store: Shared | None, recompute_s: float | None, usable: int = 700) -> tuple[RemoteLookup, PrefixRequest]:
    """About a prompt, at second 100."""
    lookup, request = RemoteLookup(store, Known(recompute_s), TIMEOUT_S), PrefixRequest()  # type: ignore[arg-type]
    lookup.ask(request, [Keys()], usable, 100.0)
    return lookup, request


def test_without_shared_tiers_nobody_asks_or_waits() -> None:
    lookup, request = asked(None, 1.0)
    assert not lookup.asks and not lookup.pending(request, 100.0)
    disk_only = Shared(Probe())
    disk_only.probes = False
    lookup, request = asked(disk_only, 1.0)
    assert not lookup.asks and not lookup.pending(request, 100.0) and not disk_only.asked


def test_every_group_is_asked_about_up_to_what_may_be_reused() -> None:
    store = Shared(Probe())
    asked(store, 1.0, usable=299)
    ((full, sliding),) = store.asked
    assert (full[0], len(full[1]), sliding[0], len(sliding[1])) == (0, 4, 1, 9)


@pytest.mark.parametrize(
    ("recompute_s", "limit_s"),
    [(4.0, 0.2), (100.0, TIMEOUT_S), (0.001, 0.02), (None, TIMEOUT_S)],
    ids=["a share", "a long prompt", "a short prompt", "nothing is known"],
)
def test_the_wait_is_bounded(recompute_s: float | None, limit_s: float) -> None:
    lookup, request = asked(Shared(Probe(), Probe(done=True)), recompute_s)
    assert lookup.pending(request, 100.0 + 0.99 * limit_s)
    assert not lookup.pending(request, 100.0 + 1.01 * limit_s)
    assert not lookup.pending(request, 100.0), "over is over"


def test_a_caller_that_gives_less_time_waits_no_longer() -> None:
    lookup = RemoteLookup(Shared(Probe()), Known(100.0), TIMEOUT_S)  # type: ignore[arg-type]
    request = PrefixRequest(limit_s=0.1)
    lookup.ask(request, [Keys()], 700, 100.0)
    assert lookup.pending(request, 100.09) and not lookup.pending(request, 100.11)


def test_it_ends_when_all_have_answered() -> None:
    first, second = Probe(), Probe()
    lookup, request = asked(Shared(first, second), 10.0)
    first.done = True
    assert lookup.pending(request, 100.0)
    second.done = True
    assert not lookup.pending(request, 100.0)


def test_a_tier_that_lately_took_longer_is_not_waited_for() -> None:
    slow, quick = Probe(expected_s=0.3), Probe(expected_s=0.1)
    lookup, request = asked(Shared(slow, quick), 4.0)
    assert request.probes == [quick]
    lookup, request = asked(Shared(slow), 4.0)
    assert not lookup.pending(request, 100.0)
    lookup, request = asked(Shared(slow), 8.0)
    assert lookup.pending(request, 100.0), "for a longer prompt it is worth it"
