"""The test that a tier must pass, ours or yours: docs/internals.md#a-tier-of-your-own says how to use it.

    class TestMyTier(TierConformance):
        def make_tier(self, directory: Path) -> Tier:
            return MyTier(...)

Needs the package hypothesis (`pip install 'stowage[testing]'`); pytest or unittest run the class, neither is imported.
Every run tries `examples` sequences of up to `steps` random steps, each on a fresh tier; a failure is shrunk to the
shortest sequence that still fails, and printed as code. The rules that are checked are those of `tiers.protocol`; what
is allowed and what is not is decided by `tier_model`.

No check depends on how quick a tier is: waits end when a tier has answered, and count as failed only after
`patience_s`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

try:
    from hypothesis import HealthCheck, settings
    from hypothesis.stateful import run_state_machine_as_test
except ImportError as error:
    raise ImportError(
        "TierConformance needs the package hypothesis, which is not installed. "
        "Install it: pip install 'stowage[testing]'"
    ) from error

from stowage.storage.protocol import Tier
from stowage.testing.tier_steps import TierSteps
from stowage.testing.watch import Watch


class TierConformance:
    """Derive, implement `make_tier`, let pytest find it. The attributes are what a tier promises, and how to test it.

    `keeps_bytes`: as long as no more payload than that was stored, nothing that was stored may be absent. 0: a tier
    that may forget anything at any time (it must keep something all the same).
    `persistent`: `make_tier` called again with the same directory, after `close`, finds what was stored.
    `lengths`: payload lengths of chunks in bytes; at least 16 each.
    `patience_s`: a method that takes longer blocks, and a transfer that is not reported by then never will be.
    """

    keeps_bytes: ClassVar[int] = 0
    persistent: ClassVar[bool] = False
    lengths: ClassVar[Sequence[int]] = (64, 4096, 5000, 20_480)
    patience_s: ClassVar[float] = 30.0
    examples: ClassVar[int] = 200
    steps: ClassVar[int] = 50

    def make_tier(self, directory: Path) -> Tier:
        """A tier, which will be closed. `directory` is its own: empty, or left by an earlier tier if `persistent`."""
        raise NotImplementedError("a TierConformance needs make_tier")

    def test_it_keeps_its_word_through_random_steps(self) -> None:
        """Stores, loads, look-ups, discards, reopenings and closings in any order."""
        limits = settings(
            max_examples=self.examples,
            stateful_step_count=self.steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        watch = Watch(type(self).__name__, self.patience_s)
        # The signature asks for a class; anything that makes a machine is taken.
        make: Any = lambda: TierSteps(self, watch)  # noqa: E731
        watch.run(lambda: run_state_machine_as_test(make, settings=limits))

    def test_it_keeps_something(self) -> None:
        """A tier that never has anything breaks no promise and is of no use."""
        watch = Watch(type(self).__name__, self.patience_s)
        watch.run(lambda: _keeps_something(TierSteps(self, watch)))


def _keeps_something(steps: TierSteps) -> None:
    try:
        for number in range(12):
            steps.store([number], bits=1, late=False, shifted=False)
            steps.settle()
            steps.load([number], late=False, shifted=False)
            steps.settle()
        if not steps.chunks_loaded:
            steps.fail("it keeps nothing: chunks were stored one by one, and none could be loaded right after")
    finally:
        steps.teardown()
