"""Replays parts of a trace in several processes, each part in a process of its own that is forked for it.

Forked, so that the trace is not copied; nothing but progress and the reports comes back.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from stowage.errors import StowageError
from stowage.simulator.replay import Part, Report, replay
from stowage.simulator.scenario import Scenario
from stowage.simulator.trace import Trace

Task = tuple[Scenario, Part]


def run(
    trace: Trace, tasks: Sequence[Task], jobs: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[list[Report]]:
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
    waiting = sorted(range(len(tasks)), key=lambda task: len(tasks[task][1].prompts))
    running: dict[Connection, tuple[int, BaseProcess]] = {}
    reports: dict[int, list[Report]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                task = waiting.pop()
                ours, theirs = context.Pipe(duplex=False)
                process: BaseProcess = context.Process(target=_work, args=(trace, *tasks[task], theirs), daemon=True)
                process.start()
                theirs.close()
                running[ours] = task, process
            for connection in wait(list(running)):
                assert isinstance(connection, Connection)
                task, process = running[connection]
                try:
                    news = connection.recv()
                except EOFError as error:
                    raise StowageError(
                        "A process of the simulation died; maybe memory is short: try --jobs 1."
                    ) from error
                if isinstance(news, int):
                    note(task, news)
                    continue
                reports[task] = news
                del running[connection]
                connection.close()
                process.join()
    finally:
        for connection, (_, process) in running.items():
            process.terminate()
            process.join()
            connection.close()
    return [reports[task] for task in range(len(tasks))]


def _work(trace: Trace, scenario: Scenario, part: Part, connection: Connection) -> None:
    connection.send(replay(trace, scenario, part, connection.send))
