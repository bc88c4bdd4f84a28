"""How long an admission waits for what shared tiers say: a share of what it could save, and never in vain twice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stowage.cache.cost_model import CostModel
from stowage.engine.remote_lookup import RemoteLookup
from stowage.storage.protocol import Probe

TIMEOUT_S = 0.5


class Shared:
    """A store with one shared tier, whose probes the test ends."""

    probes = True
    geometry = SimpleNamespace(groups=[SimpleNamespace(chunk_tokens=64), SimpleNamespace(chunk_tokens=32)])

    def __init__(self, *probes: Probe) -> None:
        self.asked: list[Any] = []
        self._probes = list(probes)

    def probe(self, wanted: Any) -> list[Probe]:
        self.asked.append(wanted)
        return list(self._probes)


class Keys:
    def __init__(self) -> None:
        self.length = 0

    def extend(self, tokens: list[int], end: int) -> None:
        self.length = end

    def of(self, group: int) -> list[bytes]:
        return [bytes([group, n]) for n in range(self.length // (64, 32)[group])]


def sequence(tokens: int = 700, reusable: int = 0) -> Any:
    return SimpleNamespace(
        tokens=[0] * tokens, reusable_tokens=reusable or tokens, keys=Keys(), probes=[], probes_until_s=0.0
    )


class Known(CostModel):
    """What computing a prompt takes is known, or not."""

    def __init__(self, seconds: float | None) -> None:
        super().__init__(TIMEOUT_S)
        self.seconds = seconds

    def recompute_s(self, tokens: int) -> float | None:
        return self.seconds


def asked(store: Shared | None, recompute_s: float | None, one: Any = None) -> tuple[RemoteLookup, Any, list[float]]:
    now_s = [100.0]
    made = RemoteLookup(store, Known(recompute_s), lambda: now_s[0], TIMEOUT_S)  # type: ignore[arg-type]
    one = one or sequence()
    made.ask(one)
    return made, one, now_s


def test_without_shared_tiers_nobody_asks_or_waits() -> None:
    made, one, _ = asked(None, 1.0)
    assert not made.open(one) and one.keys.length == 0
    disk_only = Shared(Probe())
    disk_only.probes = False
    made, one, _ = asked(disk_only, 1.0)
    assert not made.open(one) and not disk_only.asked


def test_every_group_is_asked_about_up_to_what_may_be_reused() -> None:
    store = Shared(Probe())
    asked(store, 1.0, sequence(700, reusable=300))
    ((full, sliding),) = store.asked
    assert (full[0], len(full[1]), sliding[0], len(sliding[1])) == (0, 4, 1, 9)


@pytest.mark.parametrize(
    ("recompute_s", "limit_s"),
    [(4.0, 0.2), (100.0, TIMEOUT_S), (0.001, 0.02), (None, TIMEOUT_S)],
    ids=["a share", "a long prompt", "a short prompt", "nothing is known"],
)
def test_the_wait_is_bounded(recompute_s: float | None, limit_s: float) -> None:
    made, one, now_s = asked(Shared(Probe(), Probe(done=True)), recompute_s)
    now_s[0] += 0.99 * limit_s
    assert made.open(one)
    now_s[0] += 0.02 * limit_s
    assert not made.open(one)
    now_s[0] -= limit_s
    assert not made.open(one), "over is over"


def test_it_ends_when_all_have_answered() -> None:
    first, second = Probe(), Probe()
    made, one, _ = asked(Shared(first, second), 10.0)
    first.done = True
    assert made.open(one)
    second.done = True
    assert not made.open(one)


def test_a_tier_that_lately_took_longer_is_not_waited_for() -> None:
    slow, quick = Probe(expected_s=0.3), Probe(expected_s=0.1)
    made, one, _ = asked(Shared(slow, quick), 4.0)
    assert one.probes == [quick]
    made, one, _ = asked(Shared(slow), 4.0)
    assert not made.open(one)
    made, one, _ = asked(Shared(slow), 8.0)
    assert made.open(one), "for a longer prompt it is worth it"
