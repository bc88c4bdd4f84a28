"""Replays parts of a trace in several processes, each of which is forked for a share of the parts.

Forked, so that the trace is not copied; nothing but progress and the reports comes back. A fork takes longer than to
replay a node with few prompts.
"""

from __future__ import annotations

import heapq
import multiprocessing
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from stowage.errors import StowageError
from stowage.simulator.replay import Part, Report, replay
from stowage.simulator.scenario import Scenario
from stowage.simulator.trace import Trace

Task = tuple[Scenario, Part]
_SHARES_PER_JOB = 4
"""More than one, because replaying as many prompts may take longer."""


def run(trace: Trace, tasks: Sequence[Task], jobs: int, progress: Callable[[int, int], None]) -> list[list[Report]]:
    """The reports of every task, in their order. `progress` is told prompts that have arrived, and in all.

    Raises StowageError when a process dies.
    """
    done = [0] * len(tasks)
    total = sum(len(part.prompts) for _, part in tasks)

    def note(task: int, count: int) -> None:
        done[task] = count
        progress(sum(done), total)

    if min(jobs, len(tasks)) <= 1:
        return [
            replay(trace, scenario, part, lambda count, task=task: note(task, count))  # type: ignore[misc]
            for task, (scenario, part) in enumerate(tasks)
        ]
    return _forked(trace, tasks, jobs, note)


def _forked(trace: Trace, tasks: Sequence[Task], jobs: int, note: Callable[[int, int], None]) -> list[list[Report]]:
    """At most `jobs` at a time, the longest first."""
    context = multiprocessing.get_context("fork")
    waiting = _shares(tasks, jobs * _SHARES_PER_JOB)
    running: dict[Connection, BaseProcess] = {}
    reports: dict[int, list[Report]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                share = waiting.pop()
                ours, theirs = context.Pipe(duplex=False)
                process: BaseProcess = context.Process(target=_work, args=(trace, tasks, share, theirs), daemon=True)
                process.start()
                theirs.close()
                running[ours] = process
            for connection in wait(list(running)):
                assert isinstance(connection, Connection)
                try:
                    task, news = connection.recv()
                except EOFError as error:
                    raise StowageError(
                        "A process of the simulation died; maybe memory is short: try --jobs 1."
                    ) from error
                if task is None:
                    running.pop(connection).join()
                    connection.close()
                elif isinstance(news, int):
                    note(task, news)
                else:
                    reports[task] = news
    finally:
        for connection, process in running.items():
            process.terminate()
            process.join()
            connection.close()
    return [reports[task] for task in range(len(tasks))]


def _shares(tasks: Sequence[Task], count: int) -> list[list[int]]:
    """The tasks in up to `count` shares of about as many prompts; the share with most comes last."""
    least = [(0, share) for share in range(min(count, len(tasks)))]
    shares: list[list[int]] = [[] for _ in least]
    for task in sorted(range(len(tasks)), key=lambda task: -len(tasks[task][1].prompts)):
        prompts, share = least[0]
        shares[share].append(task)
        heapq.heapreplace(least, (prompts + len(tasks[task][1].prompts), share))
    return [shares[share] for _, share in sorted(least)]


def _work(trace: Trace, tasks: Sequence[Task], share: Sequence[int], connection: Connection) -> None:
    for task in share:
        tell = partial(_tell, connection, task)
        tell(replay(trace, *tasks[task], tell))
    _tell(connection, None, None)


def _tell(connection: Connection, task: int | None, news: object) -> None:
    connection.send((task, news))
