"""vLLM's own engine core over the four ranks of ``ranks``, and what can go wrong with one of them.

vLLM's: the configuration, the division of the cache into groups and stages, the scheduler, the queue of batches that
are in flight, what a rank does around a forward, and how the ranks' reports become one. Stowage's: both sides of the
connector, made by vLLM. Not real are the ranks' processes and their model.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from stowage.plugins.vllm.messages import Report
from tests.vllm.child import KEPT
from tests.vllm.oracle import connector, prompt
from tests.vllm.ranks import BLOCK, STAGES, TENSOR, VOCAB, Rank, Ranks, answer

STALL_S = 300.0


class Engine:
    """vLLM's engine core with these ranks. ``kinds``: ``full`` or ``sliding`` by layer, half of them on each stage.
    ``machines``: where the ranks say that they are. ``division``: how many stages of how many tensor ranks.
    ``kv_heads``: of each layer. ``options``: vLLM's; ``extra``: the connector's.
    """

    def __init__(
        self,
        directory: Path,
        kinds: Sequence[str],
        blocks: int = 200,
        *,
        machines: Sequence[str] = (),
        division: tuple[int, int] = (STAGES, TENSOR),
        kv_heads: int = 4,
        options: Mapping[str, Any] | None = None,
        **extra: Any,
    ) -> None:
        model = directory / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(
            json.dumps(_CONFIG | {"num_hidden_layers": len(kinds), "num_key_value_heads": kv_heads}), encoding="utf-8"
        )
        (model / "model.safetensors").write_bytes(b"of the ranks")  # else what is stored serves one engine alone
        Ranks.kinds, Ranks.machines = kinds, machines
        config = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            block_size=BLOCK,
            max_model_len=512,
            max_num_seqs=8,
            max_num_batched_tokens=96,
            num_gpu_blocks_override=blocks,
            pipeline_parallel_size=division[0],
            tensor_parallel_size=division[1],
            distributed_executor_backend=Ranks,
            enable_prefix_caching=True,
            disable_log_stats=False,
            kv_transfer_config=connector(**extra),
            **(options or {}),
        ).create_engine_config()
        self.core = EngineCore(config, Ranks, log_stats=True)
        self.executor: Ranks = self.core.model_executor
        self.ranks = self.executor.ranks
        self.side = self.core.scheduler.connector._scheduler
        self.said: dict[str, list[int]] = {}
        self.external: dict[str, int] = {}
        self.preemptions = 0
        preempt = self.core.scheduler._preempt_request

        def counting(*arguments: Any, **named: Any) -> Any:
            self.preemptions += 1
            return preempt(*arguments, **named)

        self.core.scheduler._preempt_request = counting

    def add(self, name: str, tokens: list[int], count: int = 8) -> None:
        """Queue a request."""
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        params.update_from_generation_config({}, eos_token_id=None)
        self.said[name] = []
        self.core.add_request(Request(name, list(tokens), params, None, block_hasher=self.core.request_block_hasher))

    def step(self) -> None:
        """One of the core's, which may have several batches in flight."""
        outputs, _ = self.core.step_fn()
        for told in (outputs or {}).values():
            for output in told.outputs:
                self.said[output.request_id] += output.new_token_ids
                if output.prefill_stats is not None:
                    self.external[output.request_id] = output.prefill_stats.num_external_cached_tokens

    def step_until(self, condition: Callable[[], bool]) -> None:
        until_s = time.monotonic() + STALL_S
        while not condition():
            assert time.monotonic() < until_s, f"it stalls: {self.states()}"
            self.step()

    def finish(self) -> None:
        """Until nothing is left to do."""
        scheduler, queue = self.core.scheduler, self.core.batch_queue
        self.step_until(lambda: not scheduler.has_requests() and not queue)

    def ask(self, name: str, tokens: list[int], count: int = 8) -> int:
        """One request by itself, answered rightly; how many tokens came from the connector."""
        self.add(name, tokens, count)
        self.finish()
        self.assert_right(name, tokens, count)
        return self.external[name]

    def assert_comes_back(self, tokens: list[int]) -> None:
        """Of 400 tokens, asked before: each rank reads its part, of all that is kept and of a beginning."""
        self.forget()
        before = [rank.read for rank in self.ranks]
        assert self.ask("again", tokens) == KEPT
        assert all(rank.read > read for rank, read in zip(self.ranks, before, strict=True)) and not self.wrong()
        self.forget()
        assert self.ask("middle", tokens[:300] + prompt(100, seed=1)) == 256

    def assert_right(self, name: str, tokens: list[int], count: int = 8) -> None:
        assert self.said[name] == answer(tokens, count), f"{name}: wrong bytes were read on {self.wrong()}"

    def wrong(self) -> dict[tuple[int, int], list[str]]:
        return {rank.rank: rank.wrong for rank in self.ranks if rank.wrong}

    def states(self) -> dict[str, str]:
        return {name: str(request.status) for name, request in self.core.scheduler.requests.items()}

    def loading(self, name: str) -> bool:
        return self.states().get(name, "").endswith("WAITING_FOR_REMOTE_KVS")

    def free(self) -> int:
        free: int = self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return free

    def forget(self) -> None:
        """The ranks hold nothing any more: the prefix cache is reset, and every byte overwritten."""
        assert self.core.reset_prefix_cache()
        for rank in self.ranks:
            rank.scribble()

    def assert_idle(self, blocks: int) -> None:
        """No request, no block that is held, nothing pinned, and the store's invariants."""
        assert not self.states()
        assert self.free() == blocks - 1, "all but the null block"
        assert self.side.stats()["chunks_pinned"] == 0
        assert self.side.counts["faults"] == 0
        self.side.check()

    def close(self) -> None:
        self.core.shutdown()


@contextmanager
def broken(rank: Rank, **ways: Callable[[], None]) -> Iterator[None]:
    """Let ``rank`` do something else before each copy: ``load`` or ``store``."""
    worker = rank.connector._worker
    real = worker._copies
    assert real is not None, "the arena is mapped with the first store"

    class Copies:
        def load(self, plan: Any) -> int:
            ways.get("load", lambda: None)()
            return int(real.load(plan))

        def store(self, plan: Any) -> int:
            ways.get("store", lambda: None)()
            return int(real.store(plan))

        def digests(self, plan: Any) -> dict[int, bytes]:
            return dict(real.digests(plan))

    worker._copies = Copies()
    yield
    worker._copies = real


@contextmanager
def held_reports(rank: Rank, lost: bool = False) -> Iterator[None]:
    """What ``rank`` has to report is kept until the end, and told then; or never, when ``lost``."""
    real = rank.connector.build_connector_worker_meta
    kept: list[Report] = []

    def keep() -> None:
        report = real()
        if report is not None:
            kept.append(report)

    def tell() -> Report | None:
        report = real()
        for one in kept:
            report = one if report is None else report.aggregate(one)
        kept.clear()
        return report

    rank.connector.build_connector_worker_meta = keep
    yield
    rank.connector.build_connector_worker_meta = real if lost else tell


_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}
