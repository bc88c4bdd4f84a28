"""One tier under test, as a state machine: random steps, and what is checked after each. Used by `conformance`.

What a tier may answer is decided by `TierModel`; `TransferBuffers` sees what happens to memory, `Watch` a
call that hangs.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, NoReturn, Protocol

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from stowage.storage.protocol import Described, Outcome, Tier, Transfer, Waitable
from stowage.testing.tier_model import TierModel, TransferBuffers, Version, key_of
from stowage.testing.watch import NonConformance, Watch

NEVER_S: Final = 1e18
PAST_S: Final = 3600.0
MEMORY_CHECKED: Final = 8
"""How many of the transfers that were reported last are looked at after every step; all are at the end."""


class Promises(Protocol):
    """How to make the tier, and what it promises; see `TierConformance`."""

    keeps_bytes: ClassVar[int]
    persistent: ClassVar[bool]
    lengths: ClassVar[Sequence[int]]

    def make_tier(self, directory: Path) -> Tier: ...


class _Flight:
    """A transfer and what is known of it. `versions`: of a store; `expected`: what a load must bring, if anything."""

    def __init__(self, transfer: Transfer, lent: TransferBuffers, numbers: list[int], began: int) -> None:
        self.transfer = transfer
        self.lent = lent
        self.numbers = numbers
        self.began = began
        self.versions: list[Version] = []
        self.expected: list[Version | None] = [None] * len(numbers)
        self.is_load = True
        self.is_odd = False
        self._keys = list(transfer.keys)
        self._masks = transfer.masks.copy()

    def __str__(self) -> str:
        what = "load" if self.is_load else "store"
        return f"transfer {self.transfer.id} ({what} of keys {self.numbers})"

    def is_changed(self) -> bool:
        """Whether the tier wrote in what the caller goes on using."""
        return self.transfer.keys != self._keys or not np.array_equal(self.transfer.masks, self._masks)


_numbers = st.integers(0, 11)
_some = st.lists(_numbers, min_size=1, max_size=6, unique=True)
_bits = st.builds(lambda a, b: 1 << a | 1 << b, st.integers(0, 63), st.integers(0, 63))
_rarely = st.sampled_from([False, False, False, True])


class TierSteps(RuleBasedStateMachine):
    """One tier under test. No step depends on what the tier answered, so that a sequence of steps can be replayed."""

    def __init__(self, suite: Promises, watch: Watch) -> None:
        super().__init__()
        self._suite = suite
        self._watch = watch
        self._watch.story = []
        self._patience = watch.patience
        self._lengths = list(suite.lengths)
        self._model = TierModel(suite.keeps_bytes)
        self._flights: dict[int, _Flight] = {}
        self._ended: list[_Flight] = []
        self._ids: set[int] = set()
        self._broken = False
        self._in_peace = True
        self._directory = tempfile.TemporaryDirectory(prefix="stowage-conformance-", ignore_cleanup_errors=True)
        watch.tidy_up = self._directory.cleanup
        self._woken = threading.Event()
        self.chunks_loaded = 0
        try:
            self._tier = self._open()
        except BaseException:
            self._directory.cleanup()
            raise

    # Calling

    def fail(self, text: str) -> NoReturn:
        self._broken = True
        raise NonConformance(f"{type(self._suite).__name__}: {text}")

    def _open(self) -> Tier:
        made: Tier = self._call("make_tier", lambda: self._suite.make_tier(Path(self._directory.name)))
        if not isinstance(made.name, str) or not made.name:
            self.fail(f"name is {made.name!r}; it must be text")
        if isinstance(made, Waitable):
            made.wake = self._woken.set
        return made

    def _call(self, what: str, call: Callable[[], Any], extra_s: float = 0.0) -> Any:
        try:
            return self._watch.call(what, call, extra_s)
        except Exception as error:  # whatever it is, it is the finding
            self._broken = True
            raise NonConformance(
                f"{type(self._suite).__name__}: {what} raised {error!r}: no method raises for an operating error, "
                "it reports an outcome that is not ok"
            ) from error

    def _begin(self, flight: _Flight) -> None:
        self._flights[flight.transfer.id] = flight
        self._ids.add(flight.transfer.id)
        self._watch.story.append(str(flight))
        if flight.is_load:
            self._call("load", lambda: self._tier.load(flight.transfer))
        else:
            self._call("store", lambda: self._tier.store(flight.transfer))
        self._check_memory()

    def _flight(self, numbers: list[int], lengths: list[int], masks: list[int], late: bool, shifted: bool) -> _Flight:
        lent = TransferBuffers(lengths, shifted)
        deadline_s = time.monotonic() - PAST_S if late else NEVER_S
        keys = [key_of(number) for number in numbers]
        transfer = Transfer(len(self._ids) + 1, keys, list(lent.buffers), np.array(masks, np.uint64), deadline_s)
        return _Flight(transfer, lent, numbers, self._model.now)

    def _length(self, number: int) -> int:
        return self._lengths[number % len(self._lengths)]

    # Steps

    @initialize(in_peace=st.booleans())
    def choose_the_end(self, in_peace: bool) -> None:
        """Whether the tier will be given time to close."""
        self._in_peace = in_peace

    @rule(numbers=_some, bits=_bits, late=_rarely, shifted=_rarely)
    def store(self, numbers: list[int], bits: int, late: bool, shifted: bool) -> None:
        masks = {number: self._model.next_mask(number, bits) for number in numbers}
        numbers = [number for number in numbers if masks[number]]
        lengths = [self._length(number) for number in numbers]
        flight = self._flight(numbers, lengths, [masks[number] for number in numbers], late, shifted)
        flight.is_load = False
        flight.versions = [
            self._model.begin_store(n, masks[n], length) for n, length in zip(numbers, lengths, strict=True)
        ]
        flight.lent.fill([version.content for version in flight.versions])
        self._begin(flight)

    @rule(numbers=_some, late=_rarely, shifted=_rarely)
    def load(self, numbers: list[int], late: bool, shifted: bool) -> None:
        lengths = [self._length(number) for number in numbers]
        flight = self._flight(numbers, lengths, [0] * len(numbers), late, shifted)
        if not late:
            flight.expected = [self._model.certain(number) for number in numbers]
        self._begin(flight)

    @rule(number=_numbers)
    def load_with_another_length(self, number: int) -> None:
        """A load that cannot be exact. The tier may forget the chunk, or keep it."""
        flight = self._flight([number], [self._length(number) + 16], [0], False, False)
        flight.is_odd = True
        self._model.begin_odd_load(number)
        self._begin(flight)

    @rule(is_load=st.booleans())
    def transfer_nothing(self, is_load: bool) -> None:
        flight = self._flight([], [], [], False, False)
        flight.is_load = is_load
        self._begin(flight)

    @rule(numbers=_some)
    def discard(self, numbers: list[int]) -> None:
        self._watch.story.append(f"discard keys {numbers}")
        self._call("discard", lambda: self._tier.discard([key_of(number) for number in numbers]))
        self._model.discard(numbers)
        self._lookup(numbers)

    @rule(numbers=st.lists(_numbers, max_size=12))
    def lookup(self, numbers: list[int]) -> None:
        self._lookup(numbers)

    @rule()
    def poll(self) -> None:
        self._woken.clear()  # before the tier is asked, as the store does
        for outcome in self._call("poll", lambda: self._tier.poll()):
            self._end(outcome)
        self._check_memory()

    @rule()
    def settle(self) -> None:
        """Wait until every transfer was reported, as the store does: asleep until it is woken or a deadline is due."""
        if any(flight.transfer.deadline_s < NEVER_S for flight in self._flights.values()):
            self.poll()
        pause_s = 0.0001
        while self._flights:
            if isinstance(self._tier, Waitable):
                self._wait_to_be_woken()
            elif pause_s > self._patience.seconds:
                self._never_reported()
            else:
                time.sleep(pause_s)
                pause_s *= 1.5
            self.poll()
        self._lookup(list(range(12)))
        self._check_parts()

    @precondition(lambda self: self._suite.persistent)
    @rule()
    def reopen(self) -> None:
        self._watch.story.append("close and open again")
        self._close(self._patience.seconds)
        self._model.reopen()
        self._tier = self._open()
        self._lookup(list(range(12)))

    def teardown(self) -> None:
        """Close at once or in peace: either way each transfer is reported once, and memory stays as it is."""
        try:
            if not self._broken:
                self._close(self._patience.seconds if self._in_peace else 0.0)
                self._check_memory(all_of_them=True)
        finally:
            self._directory.cleanup()

    # Answers

    def _lookup(self, numbers: list[int]) -> None:
        masks = self._call("lookup", lambda: self._tier.lookup([key_of(number) for number in numbers]))
        if not isinstance(masks, np.ndarray) or masks.dtype != np.uint64 or masks.shape != (len(numbers),):
            self.fail(f"lookup of {len(numbers)} keys must return that many numbers of type uint64, not {masks!r}")
        for number, mask in zip(numbers, masks.tolist(), strict=True):
            allowed = self._model.masks(number)
            if mask and mask not in allowed:
                known = " or ".join(hex(one) for one in sorted(allowed)) or "absent"
                self.fail(f"lookup says that key {number} has the valid blocks {mask:#x}; it should be {known}")
            certain = self._model.certain(number)
            if certain is not None and not mask:
                self.fail(f"lookup does not find key {number}, although {certain} was reported as kept")

    def _end(self, outcome: Outcome) -> None:
        flight = self._flights.pop(outcome.id, None)
        if flight is None:
            why = "a second time" if outcome.id in self._ids else "although nobody started it"
            self.fail(f"poll reports transfer {outcome.id} {why}: there is exactly one outcome per transfer")
        count = len(flight.numbers)
        if outcome.ok.shape != (count,) or outcome.ok.dtype != np.bool_:
            self.fail(f"ok of {flight} must be {count} booleans, not {outcome.ok!r}")
        if outcome.masks.shape != (count,) or outcome.masks.dtype != np.uint64:
            self.fail(f"masks of {flight} must be {count} numbers of type uint64, not {outcome.masks!r}")
        if flight.is_changed():
            self.fail(f"keys or masks of {flight} were changed: they are the caller's")
        damage = flight.lent.damage(buffers_too=not flight.is_load)
        if damage:
            self.fail(f"{flight} wrote {damage}, which was not lent to be written")
        if flight.is_load:
            self._check_load(flight, outcome)
        for version, ok in zip(flight.versions, outcome.ok.tolist(), strict=False):
            self._model.end_store(version, ok)
        if flight.is_odd:
            self._model.end_odd_load(flight.numbers[0])
        flight.lent.poison()
        self._ended.append(flight)

    def _check_load(self, flight: _Flight, outcome: Outcome) -> None:
        for at, number in enumerate(flight.numbers):
            expected, mask = flight.expected[at], int(outcome.masks[at])
            if not outcome.ok[at]:
                if expected is not None and expected is self._model.certain(number) and not outcome.refused:
                    why = f" ({outcome.error})" if outcome.error else ""
                    self.fail(f"{flight} did not bring key {number}, although {expected} was reported as kept{why}")
                continue
            data = bytes(flight.lent.buffers[at])
            versions = self._model.loadable(number, flight.began)
            found = next((version for version in versions if version.content == data), None)
            if found is None:
                why = "" if self._model.versions.get(number) else ", a key that was never stored"
                self.fail(
                    f"{flight} is ok for key {number}{why}, but its {len(data)} bytes are not those of a store that "
                    f"counts: {self._model.explain(data, number)}"
                )
            if mask != found.mask:
                self.fail(
                    f"{flight} brought {found} with the valid blocks {mask:#x}; it was stored with {found.mask:#x}"
                )
            self.chunks_loaded += 1

    def _check_memory(self, all_of_them: bool = False) -> None:
        for flight in self._ended if all_of_them else self._ended[-MEMORY_CHECKED:]:
            damage = flight.lent.damage(buffers_too=True)
            if damage:
                self.fail(f"{flight} changed {damage}, after it was reported: from then on the tier may not touch it")
        for flight in self._flights.values():
            damage = flight.lent.damage(buffers_too=not flight.is_load)
            if damage:
                self.fail(f"{flight} wrote {damage}, which was not lent to be written")

    def _check_parts(self) -> None:
        tier = self._tier
        if isinstance(tier, Described):
            stats = self._call("stats", tier.stats)
            wrong = {k: v for k, v in stats.items() if not isinstance(k, str) or not isinstance(v, int | float | str)}
            if wrong:
                self.fail(f"stats must give numbers or texts by name, not {wrong}")
        check = getattr(tier, "check", None)
        if check is not None:
            self._call("check", check)

    # Waiting

    def _wait_to_be_woken(self) -> None:
        if self._woken.wait(self._patience.seconds):
            return
        before = len(self._flights)
        self.poll()
        self._patience.lose()
        if len(self._flights) < before:
            self.fail("an outcome lay ready and wake was not called: the store would have slept on")
        self._never_reported()

    def _never_reported(self) -> NoReturn:
        self._patience.lose()
        names = ", ".join(map(str, self._flights.values()))
        self.fail(f"never reported: {names}. Every transfer has an outcome, also one that failed or came too late")

    def _close(self, seconds: float) -> None:
        for flight in self._flights.values():
            flight.expected = [None] * len(flight.numbers)  # what has not begun may be given up
        deadline_s = time.monotonic() + seconds
        self._call("close", lambda: self._tier.close(deadline_s), extra_s=seconds)
        self.poll()
        if self._flights and seconds:
            names = ", ".join(map(str, self._flights.values()))
            self.fail(f"close returned before its deadline, and these were not reported: {names}")
        self._flights.clear()  # given no time, a tier may keep what a worker is busy with
