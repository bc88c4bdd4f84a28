"""One vLLM engine in a process, told what to do in lines of JSON: a method's name and arguments in, its answer out.

Runs in a child of the nursery, or in an interpreter of its own (``python -m tests.vllm.driver SOCKET LOG``). The engine
and its worker live in this one process, so that a test can overwrite the KV cache or break a copy.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.vllm.inspection import Inspection

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # eager engines compile one function of sampling, in as long as they take to start
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
GARBAGE = 0x3C, 0x43
"""Bytes that make numbers from 0.01 to 200 in every floating type: wrong, and never NaN, which zero does not hide."""
STALL_S = 600.0
"""An engine that has not finished after so long never will."""


def warm() -> None:
    """Import vLLM, without a thread, and what it would start a process for."""
    os.environ.update(ENVIRONMENT)
    import torch

    torch.set_num_threads(1)
    import vllm.model_executor.models.registry as registry
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_model_runner
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm import LLM, SamplingParams  # noqa: F401

    # It looks at each model's class in a process of its own, since importing might begin to use a GPU: seconds, here.
    registry._run_in_subprocess = lambda function: function()


def _pretend_torchvision() -> None:
    """Qwen3.5's files import its image processor, which imports torchvision, which texts do not need."""
    from enum import Enum

    names = [
        "torchvision",
        "torchvision.transforms",
        "torchvision.transforms.v2",
        "torchvision.transforms.v2.functional",
    ]
    modules = {name: types.ModuleType(name) for name in names}
    InterpolationMode = Enum("InterpolationMode", "NEAREST BILINEAR BICUBIC BOX HAMMING LANCZOS NEAREST_EXACT")
    for name, module in modules.items():
        setattr(module, "InterpolationMode", InterpolationMode)  # noqa: B010
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(modules[parent], last, module)
    sys.modules.update(modules)


def _keep_prefix_caching() -> None:
    """vLLM switches it off for MLA where the CPU has no AMX; its cache works there nevertheless for what is decoded."""
    from vllm.platforms.cpu import CpuPlatform

    checked = CpuPlatform.check_and_update_config.__func__

    def check(cls: Any, config: Any) -> None:
        checked(cls, config)
        config.cache_config.enable_prefix_caching = True

    CpuPlatform.check_and_update_config = classmethod(check)


def _be_patient() -> None:
    """The machine may be busy: a load is waited for, however quick the tiny model would compute instead."""
    from stowage.cache import cost_model

    cost_model._DEADLINE_LEAST_S = 60.0
    cost_model.CostModel.worth_loading = lambda *_: True  # type: ignore[method-assign]


PREPARATIONS: dict[str, Callable[[], None]] = {
    "patient": _be_patient,
    "torchvision": _pretend_torchvision,
    "keep_prefix_caching": _keep_prefix_caching,
}


class Driver(Inspection):
    """Its public methods are what can be asked for."""

    def __init__(self) -> None:
        self._prefilled: dict[str, Any] = {}
        self._results: dict[str, dict[str, Any]] = {}
        self._internal: dict[str, str] = {}
        self._held = threading.Event()
        self._real: dict[str, Any] = {}

    def prepare(self, names: list[str]) -> None:
        """Before the start."""
        for name in names:
            PREPARATIONS[name]()

    def mount(self, path: str, mebibytes: int) -> bool:
        """A file system of that size, which ends with the process; False without the right to make one."""
        command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m,mode=0700", "none", path]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def start(self, model: str, options: dict[str, Any]) -> None:
        """Build the engine."""
        from vllm import LLM

        self._started = model, options
        self._llm = LLM(model, **options)
        self._engine = self._llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        self._runner = self._core.model_executor.driver_worker.worker.model_runner
        made = self._core.scheduler.connector
        ours = [child for child in getattr(made, "sub_connectors", []) if type(child).__name__ == "StowageConnector"]
        self._connector = ours[0] if ours else made
        client, get_output = self._engine.engine_core, self._engine.engine_core.get_output

        def noting() -> Any:
            outputs = get_output()
            for output in outputs.outputs:
                if output.prefill_stats is not None:
                    self._prefilled[output.request_id] = output.prefill_stats
            return outputs

        client.get_output = noting
        self._drafts: list[list[list[int]]] = []
        take = self._runner.take_draft_token_ids

        def taking() -> Any:
            taken = take()
            if taken is not None:
                self._drafts.append([list(row) for row in taken.draft_token_ids])
            return taken

        self._runner.take_draft_token_ids = taking

    def close_engine(self) -> None:
        """End the engine, not the process."""
        self._engine.engine_core.shutdown()

    def start_again(self) -> None:
        """Another engine of the same settings."""
        self.start(*self._started)

    # Requests

    def add(self, name: str, prompt: list[int], new_tokens: int, logprobs: int, salt: str | None) -> None:
        """Queue a request."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        asked = TokensPrompt(prompt_token_ids=prompt)
        if salt is not None:
            asked["cache_salt"] = salt
        params = SamplingParams(
            temperature=0, max_tokens=new_tokens, ignore_eos=True, logprobs=logprobs, detokenize=False
        )
        self._internal[name] = self._engine.add_request(name, asked, params)

    def step(self, count: int) -> None:
        """So many steps of the engine, or fewer if it has nothing to do."""
        for _ in range(count):
            if not self._engine.has_unfinished_requests():
                break
            for output in self._engine.step():
                if output.finished:
                    self._results[output.request_id] = self._told(output)

    def _told(self, output: Any) -> dict[str, Any]:
        (completion,) = output.outputs
        prefilled = self._prefilled.pop(self._internal[output.request_id], None)
        rows = [sorted((token, value.logprob) for token, value in row.items()) for row in completion.logprobs or ()]
        return {
            "tokens": list(completion.token_ids),
            "logprobs": [[value for _, value in row] for row in rows],
            "tops": [[token for token, _ in row] for row in rows],
            "finish": completion.finish_reason,
            "local": prefilled.num_local_cached_tokens if prefilled else 0,
            "external": prefilled.num_external_cached_tokens if prefilled else 0,
        }

    def finish(self) -> dict[str, Any]:
        """Step until nothing is left to do. What has finished since the last call, by name."""
        until_s = time.monotonic() + STALL_S
        while self._engine.has_unfinished_requests():
            assert time.monotonic() < until_s, f"the engine stalls: {self.queues()}"
            self.step(1)
        results, self._results = self._results, {}
        return results

    def drafts(self) -> list[list[list[int]]]:
        """What was drafted since the last call: by step and request."""
        drafts, self._drafts = self._drafts, []
        return drafts

    def abort(self, name: str) -> None:
        self._engine.abort_request([name])

    def idle_steps(self, count: int) -> None:
        """Steps of an engine that has no request."""
        for _ in range(count):
            self._engine.step()

    def queues(self) -> dict[str, Any]:
        """What the scheduler still knows of, and how many blocks are free."""
        scheduler = self._core.scheduler
        return {
            "requests": {name: str(request.status) for name, request in scheduler.requests.items()},
            "free_blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            "usage": scheduler.kv_cache_manager.usage,
        }

    # The cache

    def reset(self, connector: bool) -> bool:
        """Forget what the device holds, and what the connector holds if asked for."""
        return bool(self._llm.reset_prefix_cache(reset_connector=connector))

    def reload(self, path: str) -> None:
        """Put the weights of that checkpoint in the place of the model's own."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": path})

    def scribble(self) -> int:
        """Overwrite the KV cache, every byte of it; how many."""
        import torch

        storages = {}
        for cache in self._runner.kv_caches:
            for tensor in [cache] if isinstance(cache, torch.Tensor) else cache:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage
        for storage in storages.values():
            torch.empty(0, dtype=torch.uint8).set_(storage).random_(*GARBAGE)
        return sum(storage.nbytes() for storage in storages.values())

    def layout(self) -> dict[str, Any]:
        """How vLLM has laid out its cache."""
        config = self._core.scheduler.kv_cache_config
        return {
            "blocks": config.num_blocks,
            "hit_tokens": self._core.scheduler.block_size,
            "prefix_caching": self._engine.vllm_config.cache_config.enable_prefix_caching,
            "groups": [
                (type(group.kv_cache_spec).__name__, group.kv_cache_spec.block_size) for group in config.kv_cache_groups
            ],
        }

    # The connector

    def stats(self) -> dict[str, Any]:
        """The connector's numbers, with all that workers have reported."""
        return dict(self._settled().stats())

    def check(self) -> None:
        """Its invariants."""
        self._connector._scheduler.check()

    def flush(self) -> bool:
        """Wait until lower tiers have what they can have."""
        return bool(self._settled()._store.flush(60.0))

    def _settled(self) -> Any:
        """The connector's scheduler side, when its thread has looked at what was reported."""
        scheduler, until_s = self._connector._scheduler, time.monotonic() + 60
        while scheduler.behind and time.monotonic() < until_s:
            time.sleep(0.001)
        return scheduler

    def metrics(self) -> dict[str, float]:
        """What a scrape of this process would show, of vLLM's and the connector's."""
        from prometheus_client import REGISTRY

        return {
            f"{sample.name}{{{','.join(f'{k}={v}' for k, v in sorted(sample.labels.items()))}}}": sample.value
            for family in REGISTRY.collect()
            for sample in family.samples
            if sample.name.startswith(("vllm:", "stowage_"))
        }

    def fault(self, kind: str, count: int | None) -> None:
        """Break the next ``count`` copies, all when ``None``, none more when 0. ``kind``: ``zero``, ``fail`` or
        ``hold``, which waits for ``release``; and ``load`` or ``store``, such as ``zero_load``.
        """
        from stowage.plugins.vllm.memory import Copies

        what, _, way = kind.partition("_")
        real = self._real.setdefault(way, getattr(Copies, way))
        left = [count]
        self._held.clear()

        def broken(copies: Any, plan: Any) -> Any:
            if left[0] == 0:
                return real(copies, plan)
            if left[0] is not None:
                left[0] -= 1
            if what == "fail":
                raise OSError("a copy that the test broke")
            if what == "hold":
                assert self._held.wait(STALL_S)
                return real(copies, plan)
            nbytes = real(copies, plan)
            for run in copies._groups[plan.group].runs:
                run[plan.blocks] = 0
            return nbytes

        setattr(Copies, way, broken)

    def release(self) -> None:
        """Let copies go on that are held."""
        self._held.set()

    # The process

    def close(self) -> None:
        """End the engine as vLLM does when it is told to stop, and the process, whose garbage nobody needs to find."""
        gc.unfreeze = lambda: None  # vLLM looks through all that is imported, several times
        self.close_engine()


def run(path: str, log: str) -> None:
    """Serve the test that listens at ``path``, until it asks to close."""
    sys.stdout.flush()
    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    driver = Driver()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        stream = connection.makefile("rw", encoding="ascii", newline="\n")
        asked: dict[str, Any] = {}
        while asked.get("do") != "close" and (line := stream.readline()):
            asked = json.loads(line)
            try:
                answer = {"answer": getattr(driver, asked["do"])(**asked["with"])}
            except Exception as error:  # noqa: BLE001  told to the test, whatever it was
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
            stream.write(json.dumps(answer) + "\n")
            stream.flush()
    sys.stderr.flush()


if __name__ == "__main__":
    warm()
    run(sys.argv[1], str(Path(sys.argv[2])))
