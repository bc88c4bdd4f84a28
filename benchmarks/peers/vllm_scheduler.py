"""vLLM's scheduler with one connector and no model: what the connector takes of a step. In the peers' environment.

Commands in lines of JSON: `{"steps": N}` lets every request that runs compute one token N times; the answer has the
microseconds of each step that were spent in the connector's methods, those of the whole step, and those that other
threads of the process took meanwhile. The requests run from the start on. Workers are told by: each copy has ended when
the next step is built.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
_ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what others print is no answer

# ruff: noqa: E402
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK, VOCAB, BLOCKS, TOKENS_MAX = 16, 32_000, 400_000, 4096
SETTINGS: dict[str, dict[str, Any]] = {
    "stowage": {
        "kv_connector": "StowageConnector",
        "kv_connector_module_path": "stowage.plugins.vllm",
        "kv_connector_extra_config": {"host_memory": "512MiB"},
    },
    "offloading": {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30}},
    "offloading_128": {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30, "block_size": 128},
    },
    "lmcache": {"kv_connector": "LMCacheConnectorV1"},
}
METHODS = (
    "on_new_request get_num_new_matched_tokens update_state_after_alloc build_connector_meta update_connector_output "
    "request_finished request_finished_all_groups take_events has_pending_push_work get_kv_connector_stats"
).split()


def settings_of(connector: str) -> Any:
    if connector == "lmcache":
        os.environ |= {"LMCACHE_CHUNK_SIZE": "128", "LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.5"}
        os.environ["LMCACHE_LOG_LEVEL"] = "ERROR"
    return {"kv_role": "kv_both"} | SETTINGS[connector]


class Running:
    """`count` requests that all run, with a cache of `groups` groups."""

    def __init__(self, connector: str, count: int, groups: int, directory: Path) -> None:
        (directory / "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
        config = EngineArgs(
            model=str(directory),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            block_size=BLOCK,
            max_model_len=TOKENS_MAX,
            max_num_seqs=count,
            max_num_batched_tokens=8192,
            num_gpu_blocks_override=BLOCKS,
            enable_prefix_caching=True,
            disable_hybrid_kv_cache_manager=False if groups > 1 else None,
            kv_transfer_config=settings_of(connector),
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = BLOCKS
        cache = _cache(groups)
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=True,
        )
        self.spent_ns = 0
        self._connector = self.scheduler.connector
        if connector == "stowage":
            self._open(groups)
        elif connector == "lmcache":  # which would ask a worker, and wait for it
            self._connector._lmcache_engine.lookup_client.lookup = lambda *_, **__: 0
        for name in filter(functools.partial(hasattr, self._connector), METHODS):
            setattr(self._connector, name, self._timed(getattr(self._connector, name)))
        init_none_hash(sha256)
        hasher = get_request_block_hasher(BLOCK, sha256)
        chance = random.Random(0)
        for number in range(count):
            params = SamplingParams(temperature=0, max_tokens=TOKENS_MAX - 300, ignore_eos=True)
            params.update_from_generation_config({}, eos_token_id=None)
            prompt = [chance.randrange(VOCAB) for _ in range(chance.randrange(128, 256))]
            self.scheduler.add_request(Request(f"r{number}", prompt, params, None, block_hasher=hasher))
        while any(not request.output_token_ids for request in self.scheduler.requests.values()):
            self.step()

    def _open(self, groups: int) -> None:
        """What the workers' handshake would do."""
        from stowage.plugins.vllm.division import Piece
        from stowage.plugins.vllm.messages import Part
        from stowage.plugins.vllm.worker import machine

        part = Part(machine(), BLOCKS, tuple((Piece(f"layer {number}", 512, ""),) for number in range(groups)))
        self._connector.set_xfer_handshake_metadata_pp_aware({(0, 0): part})

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*arguments: Any, **named: Any) -> Any:
            began_ns = time.thread_time_ns()
            try:
                return method(*arguments, **named)
            finally:
                self.spent_ns += time.thread_time_ns() - began_ns

        return timed

    def step(self) -> tuple[float, float, float]:
        """Microseconds in the connector, of all, and in other threads."""
        self.spent_ns, began_ns, process_ns = 0, time.thread_time_ns(), time.process_time_ns()
        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in names]
        tokens = [
            [(11 * at + request.num_tokens) % VOCAB] if request.num_computed_tokens >= request.num_tokens else []
            for at, request in enumerate(requests)
        ]
        told = KVConnectorOutput(kv_connector_worker_meta=_report(output.kv_connector_metadata))
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=tokens,
            kv_connector_output=told,
        )
        self.scheduler.update_from_output(output, result)
        self.scheduler.has_requests()
        step_ns, process_ns = time.thread_time_ns() - began_ns, time.process_time_ns() - process_ns
        return self.spent_ns / 1000, step_ns / 1000, max(0, process_ns - step_ns) / 1000


def _report(step: Any) -> Any:
    """Of a worker that has ended all that it was told."""
    kind = type(step).__name__
    if kind == "Step":
        from stowage.plugins.vllm.messages import Report

        return Report(step.number, {store.number: 1 for store in step.stores})
    if kind == "OffloadingConnectorMetadata":
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata

        return OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(step.store_jobs, 1))
    return None


def _cache(groups: int) -> KVCacheConfig:
    """The first group has full attention, the others a window."""
    plain = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
    specs = [FullAttentionSpec(**plain), *[SlidingWindowSpec(**plain, sliding_window=1024)] * (groups - 1)]
    made = [KVCacheGroupSpec([f"model.layers.{number}.self_attn.attn"], spec) for number, spec in enumerate(specs)]
    page = specs[0].page_size_bytes
    tensors = [
        KVCacheTensor(size=BLOCKS * page, layers=[one.layer_names[0]], layer_stride=BLOCKS * page, block_stride=page)
        for one in made
    ]
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=made)


_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": TOKENS_MAX,
    "torch_dtype": "float32",
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("connector", choices=list(SETTINGS))
    parser.add_argument("--running", type=int, required=True)
    parser.add_argument("--groups", type=int, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stowage-bench-") as directory:
        running = Running(options.connector, options.running, options.groups, Path(directory))
        print(json.dumps({"ready": True}), file=_ANSWERS, flush=True)
        for line in sys.stdin:
            taken = [running.step() for _ in range(json.loads(line)["steps"])]
            answer = dict(zip(("connector_us", "step_us", "others_us"), zip(*taken, strict=True), strict=True))
            print(json.dumps(answer), file=_ANSWERS, flush=True)


if __name__ == "__main__":
    main()
