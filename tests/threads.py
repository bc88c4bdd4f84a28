"""Threads: how many torch computes with, and several of a test's own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """As many of torch's, and so of the kernels'."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def together(jobs: Iterable[Callable[[], object]]) -> None:
    """Each in a thread of its own, to its end."""
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
