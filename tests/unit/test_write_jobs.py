"""Jobs that several threads do: what comes out in which order, and what is left when one fails."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial

import pytest

from stowage.storage.disk.write_jobs import (
    COMPUTING,
    FEW,
    PAGE,
    REQUEST,
    Job,
    JobRunner,
    Kind,
    ParallelJobs,
    SerialJobs,
)

PATIENCE_S = 60.0

KINDS = (REQUEST, COMPUTING, PAGE)


@pytest.fixture
def run_parallel() -> Iterator[ParallelJobs]:
    with closing(ParallelJobs()) as jobs:
        yield jobs


def giving(number: int, kind: Kind = REQUEST) -> Job[int]:
    return Job(kind, lambda: number)


def test_results_come_in_the_order_of_the_jobs_whichever_ends_first(run_parallel: ParallelJobs) -> None:
    last_is_done = threading.Event()

    def work(number: int) -> int:
        if number == 3:
            last_is_done.set()
        assert last_is_done.wait(PATIENCE_S), "the jobs are not done at the same time"
        return number * number

    assert list(run_parallel([Job(REQUEST, partial(work, number)) for number in range(4)])) == [0, 1, 4, 9]


def test_each_kind_has_its_places_and_waits_for_no_other(run_parallel: ParallelJobs) -> None:
    """All kinds at a time, as many of each as may be; results of the others come before that of the first request."""
    total = sum(kind.at_a_time for kind in KINDS)
    begun = threading.Barrier(total)
    taken = threading.Event()

    def work(number: int) -> int:
        begun.wait(PATIENCE_S)
        if number == 0:
            assert taken.wait(PATIENCE_S), "nobody takes what others have done"
        return number

    jobs = [Job(kind, partial(work, 100 * at + n)) for at, kind in enumerate(KINDS) for n in range(kind.at_a_time)]
    found = []
    with closing(run_parallel(jobs)) as results:
        for result in results:
            found.append(result)
            if len(found) == total - REQUEST.at_a_time:
                taken.set()
    assert all(one >= 100 for one in found[: total - REQUEST.at_a_time])
    for at, kind in enumerate(KINDS):
        assert [one - 100 * at for one in found if one // 100 == at] == list(range(kind.at_a_time))


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_no_more_is_asked_for_than_can_be_done_soon(run_parallel: ParallelJobs, kind: Kind) -> None:
    asked = 0
    held = threading.Event()

    def jobs() -> Iterator[Job[int]]:
        nonlocal asked
        for _ in range(100):
            asked += 1
            yield Job(kind, held_back)

    def held_back() -> int:
        assert held.wait(PATIENCE_S)
        return 0

    threading.Timer(0.2, held.set).start()
    with closing(run_parallel(jobs())) as results:
        next(results)
        assert asked <= 2 * kind.at_a_time


def test_what_comes_one_or_two_at_a_time_needs_no_thread(run_parallel: ParallelJobs) -> None:
    here = threading.get_ident()

    def jobs() -> Iterator[Job[bool] | None]:
        for _ in range(3):
            yield from [Job(REQUEST, lambda: threading.get_ident() == here)] * FEW
            yield None

    assert list(run_parallel(jobs())) == [True] * 3 * FEW


@pytest.mark.parametrize("runner", [SerialJobs, ParallelJobs])
def test_where_there_is_nothing_now_it_is_asked_again_after_each_result(runner: Callable[[], JobRunner]) -> None:
    taken: list[int] = []

    def jobs() -> Iterator[Job[int] | None]:
        yield giving(1)
        yield None  # nothing is under way: asked again once the result was taken
        assert taken == [1]
        yield giving(2)
        yield giving(3, PAGE)
        yield giving(4)
        while len(taken) < 4:
            yield None
        yield giving(5)

    with closing(runner()) as run_jobs, closing(run_jobs(jobs())) as results:
        for result in results:
            taken.append(result)
    assert sorted(taken) == [1, 2, 3, 4, 5] and taken[-1] == 5


def test_who_has_nothing_while_nothing_is_under_way_is_done(run_parallel: ParallelJobs) -> None:
    asked = []

    def jobs() -> Iterator[Job[int] | None]:
        for job in (giving(1), giving(2), giving(3), None, None, None, None, giving(4)):
            asked.append(job)
            yield job

    assert list(run_parallel(jobs())) == [1, 2, 3]
    assert asked[3:] and not any(asked[3:]), "results may have been taken at once"


@pytest.mark.parametrize("fails", [True, False], ids=["a failure", "closed by the caller"])
def test_nothing_is_being_worked_on_when_it_ends(run_parallel: ParallelJobs, fails: bool) -> None:
    begun, working = threading.Barrier(3), []
    lock = threading.Lock()

    def work(number: int) -> int:
        if number < 3:
            begun.wait(PATIENCE_S)
        if number == 0:
            if fails:
                raise OSError(errno.EIO, "no")
            return 0
        with lock:
            working.append(number)
        time.sleep(0.05)  # long enough to be seen by whoever does not wait for it
        with lock:
            working.remove(number)
        return number

    jobs = [Job(PAGE if number > 4 and number % 2 else REQUEST, partial(work, number)) for number in range(50)]
    with closing(run_parallel(jobs)) as results:
        if fails:
            with pytest.raises(OSError, match="no"):
                next(results)
        else:
            assert next(results) == 0
    assert not working


@pytest.mark.parametrize("before", [0, 3], ids=["by the caller", "in a thread"])
def test_a_failure_of_any_kind_is_raised(run_parallel: ParallelJobs, before: int) -> None:
    def fails() -> int:
        raise OSError(errno.EIO, "no")

    with pytest.raises(OSError, match="no"):
        list(run_parallel([*[giving(1)] * before, Job(PAGE, fails), None]))


def test_threads_are_kept_for_the_next_jobs_and_end_when_they_are_closed() -> None:
    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("stowage-disk-request")}

    together = threading.Barrier(REQUEST.at_a_time)

    def work() -> int:
        return together.wait(PATIENCE_S)

    with closing(ParallelJobs()) as run_jobs:
        for _ in range(3):
            assert sorted(run_jobs([Job(REQUEST, work)] * REQUEST.at_a_time)) == list(range(REQUEST.at_a_time))
            assert len(threads()) == REQUEST.at_a_time
    assert not threads()


def test_what_a_job_lends_is_given_back_when_it_has_been_done(run_parallel: ParallelJobs) -> None:
    memory = bytearray(10)
    list(run_parallel([Job(REQUEST, partial(len, memoryview(memory))) for _ in range(20)]))
    for _ in range(1000):  # a thread that has told of its last job may not be back yet
        with suppress(BufferError):
            memory.append(1)
            return
        time.sleep(0.01)
    pytest.fail("an idle thread keeps it")
