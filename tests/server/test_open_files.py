"""The limit of open files: raised as far as may be, and told once where it is reached."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket

import pytest

from stowage.engine.sampling import Sampler
from stowage.engine.sampling_params import SamplingParams
from stowage.server.serve import OutOfFiles, allow_files

NO_LIMIT = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ((1024, 524288), [(3072, 524288)]),
        ((1024, 2000), [(2000, 2000)]),
        ((1024, NO_LIMIT), [(3072, NO_LIMIT)]),
        ((4096, 4096), []),
        ((NO_LIMIT, NO_LIMIT), []),
    ],
)
def test_room_for_all_connections(limits: tuple[int, int], expected: list, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: given.append(wanted))
    allow_files(1024)
    assert given == expected


def test_connections_that_wait_are_told_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio tells of 512 tries a second, each with a traceback: half a megabyte."""
    now_s = 0.0
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(OutOfFiles(lambda: now_s))
    with socket.socket() as listening:
        for error in [OSError(errno.EMFILE, os.strerror(errno.EMFILE))] * 512:
            loop.call_exception_handler({"message": "out of resource", "exception": error, "socket": listening})
    assert [record.exc_info for record in caplog.records] == [None]
    assert "Too many open files" in caplog.text and "max_connections" in caplog.text
    now_s = 61.0
    loop.call_exception_handler({"message": "", "exception": OSError(errno.EMFILE, ""), "socket": listening})
    assert len(caplog.records) == 2
    loop.call_exception_handler({"message": "another failure", "exception": ZeroDivisionError()})
    assert "another failure" in caplog.text
    loop.close()


def test_a_request_needs_no_descriptor() -> None:
    """With none left, requests without a seed failed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        one, other = (Sampler(SamplingParams(temperature=1.0))._generator.initial_seed() for _ in range(2))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert one != other
