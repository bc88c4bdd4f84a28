"""When chunks are packed and when they are left raw, as a clock that is told tells; and what a byte took."""

from __future__ import annotations

import pytest

from stowage.storage.disk.packing_rates import JUDGED_BYTES, PROBE_BYTES, PROBED_BYTES, Meter, PackingRates

MIB = 1 << 20
SHARE = 0.7


class Machine:
    """A disk and cores, by the seconds that a MiB takes, and the choice that is made for chunks of 1 MiB."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.rates = PackingRates(lambda: self.now_s)

    def take(self, meter: Meter, mib: float, seconds: float, packed: bool = True) -> None:
        """Alone."""
        begun = meter.begin(round(mib * MIB))
        self.now_s += seconds
        meter.end(begun, round(mib * MIB), packed)

    def load(self, mib: int, *, packed: bool, read_s: float = 1.0, unpack_s: float = 0.0) -> None:
        for _ in range(mib):
            self.take(self.rates.reading, SHARE if packed else 1, read_s * (SHARE if packed else 1), packed)
            if packed:
                self.take(self.rates.unpacking, 1, unpack_s)

    def store(self, mib: int, *, is_late: bool = False, pack_s: float = 0.1) -> list[bool]:
        """Which chunks are packed."""
        chosen = []
        for _ in range(mib):
            chosen.append(self.rates.wants(MIB, round(SHARE * MIB), is_late))
            if chosen[-1]:
                self.take(self.rates.packing, 1, pack_s)
            self.take(self.rates.writing, SHARE if chosen[-1] else 1, SHARE if chosen[-1] else 1)
        return chosen


@pytest.fixture
def machine() -> Machine:
    return Machine()


PROBED, PROBE, JUDGED = PROBED_BYTES // MIB, PROBE_BYTES // MIB, JUDGED_BYTES // MIB


def test_a_short_read_that_waits_for_a_batch_of_long_ones_does_not_seem_slow(machine: Machine) -> None:
    """It was booked with all of its wait, so that packing seemed to make a byte ten times as slow."""
    meter = machine.rates.reading
    lengths = [(4 * MIB, False)] * 12 + [(MIB, True)]
    begun = [meter.begin(nbytes) for nbytes, _ in lengths]
    machine.now_s += 49
    for at, (nbytes, packed) in zip(begun, lengths, strict=True):
        meter.end(at, nbytes, packed)
    assert meter.seconds(True) == pytest.approx(1 / MIB) and meter.seconds(False) == pytest.approx(1 / MIB)


def test_a_byte_takes_what_it_does_in_any_order_in_which_reads_end(machine: Machine) -> None:
    meter = machine.rates.reading
    machine.now_s = 7.0
    lengths = [3 * MIB, MIB, 2 * MIB]
    begun = [meter.begin(nbytes) for nbytes in lengths]
    for at, nbytes in zip(begun, lengths, strict=True):
        machine.now_s += nbytes / MIB
        meter.end(at, nbytes)
    machine.now_s += 1000  # nothing is in flight
    machine.take(meter, 1, 1.0)
    assert meter.seconds() == pytest.approx(1 / MIB) and meter.measured_bytes() == 7 * MIB


def test_what_is_both_or_takes_no_time_says_nothing_and_takes_its_share(machine: Machine) -> None:
    meter = machine.rates.reading
    mixed = meter.begin(MIB)
    machine.take(meter, 1, 2.0)
    meter.end(mixed, MIB, None)
    machine.take(meter, 1, 0.0, packed=False)
    assert meter.seconds() == pytest.approx(1 / MIB) and not meter.measured_bytes(False) and not meter.seconds(False)


def test_packing_goes_on_until_enough_loads_say_that_it_does_not_pay(machine: Machine) -> None:
    assert all(machine.store(1000)), "nothing was loaded"
    machine.load(JUDGED - 1, packed=True, unpack_s=1.3)
    assert all(machine.store(10)), "too little to tell"
    machine.load(1, packed=True, unpack_s=1.3)
    assert not any(machine.store(10)), "1.3 s instead of 1"


def test_a_slow_start_is_outweighed(machine: Machine) -> None:
    machine.load(JUDGED // 4, packed=True, unpack_s=2.0)
    machine.load(JUDGED, packed=True, unpack_s=0.5)
    assert all(machine.store(100))


@pytest.mark.parametrize("unpack_s, raw_read_s, pays", [(0.9, 1.0, True), (0.1, 0.6, False), (0.9, 5.0, True)])
def test_loads_of_either_form_are_compared(machine: Machine, unpack_s: float, raw_read_s: float, pays: bool) -> None:
    machine.load(50, packed=False, read_s=raw_read_s)
    machine.load(JUDGED, packed=True, unpack_s=unpack_s)
    assert machine.store(1) == [pays]


def test_a_slow_time_of_the_disk_does_not_make_packing_look_good(machine: Machine) -> None:
    machine.load(50, packed=False, read_s=9.0)
    machine.load(JUDGED, packed=True, unpack_s=1.3)
    assert not any(machine.store(1))


def test_left_raw_one_stretch_in_32_is_packed_and_no_more_while_that_takes_longer(machine: Machine) -> None:
    machine.load(JUDGED, packed=True, unpack_s=1.3)
    for _ in range(5):
        assert machine.store(PROBED) == [False] * (PROBED - PROBE) + [True] * PROBE
        machine.load(PROBED - PROBE, packed=False)
        machine.load(PROBE, packed=True, unpack_s=1.3)


def test_packing_comes_back_by_what_was_packed_to_see(machine: Machine) -> None:
    machine.load(JUDGED, packed=True, unpack_s=50.0)
    machine.store(PROBED)
    machine.load(PROBED - PROBE, packed=False)
    machine.load(PROBE, packed=True, unpack_s=0.5)
    assert all(machine.store(2 * PROBED)), "how slow it was before does not count"
    machine.load(JUDGED, packed=True, unpack_s=50.0)
    assert not any(machine.store(PROBED - PROBE)), "and back again"


def test_packing_comes_back_by_what_lies_packed_from_before(machine: Machine) -> None:
    machine.load(JUDGED, packed=True, unpack_s=1.3)
    assert not any(machine.store(10))
    machine.load(JUDGED, packed=True, unpack_s=0.5)
    assert all(machine.store(10))


def test_only_what_stores_wait_for_is_left_raw_where_packing_is_slower_than_the_disk(machine: Machine) -> None:
    machine.store(JUDGED, pack_s=2.0)
    assert all(machine.store(JUDGED // 2, pack_s=2.0)), "nothing waits"
    assert machine.store(PROBED, is_late=True, pack_s=2.0) == [False] * (PROBED - PROBE) + [True] * PROBE
    machine.store(PROBED, is_late=True, pack_s=0.5)
    assert all(machine.store(100, is_late=True)), "it keeps up now"
