"""Ranks for vLLM's engine core that compute nothing, two pipeline stages of two tensor ranks or others, and their
executor.

What a rank writes for a token is made from the tokens up to it, by layer and KV head, and a step reads all that its
queries see. One wrong byte anywhere, and the token is a wrong one. The KV cache is vLLM's, and so is what happens
around a forward.

    batch    stage 0 runs when it is submitted, stage 1 when its result is asked for:
             stage 0   | batch 0 | batch 1 |         | batch 2 |
             stage 1             |         | batch 0 |         | batch 1 |
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin as Around
from vllm.v1.worker.utils import allocate_kv_cache
from vllm.v1.worker.worker_base import CompilationTimes

from stowage.plugins.vllm import adapter

STAGES = TENSOR = 2
RANKS = [(stage, tensor) for stage in range(STAGES) for tensor in range(TENSOR)]
VOCAB = 50_000
WINDOW = 40
BLOCK = 16
_CHANCE = np.random.default_rng(0)
_SPREAD = _CHANCE.integers(0, 1 << 63, 4096, dtype=np.uint64) | np.uint64(1)


# The model


def _links(tokens: Sequence[int], known: list[int]) -> list[int]:
    """One number per token that depends on all tokens up to it; continues ``known``."""
    value = known[-1] if known else 1
    for token in tokens[len(known) :]:
        value = ((value * 6364136223846793005) ^ (token + 1)) * 1442695040888963407 & (1 << 64) - 1
        known.append(value)
    return known


def _written(links: Sequence[int], seed: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """What a rank keeps for these tokens in one layer: ``[tokens, nbytes]``."""
    values = np.array(links, dtype=np.uint64)[:, np.newaxis] ^ np.uint64(seed * 0x9E3779B97F4A7C15 & (1 << 64) - 1)
    return ((values * _SPREAD[:nbytes]) >> np.uint64(56)).astype(np.uint8)


def _next(link: int) -> int:
    return (link >> 20) % (VOCAB - 1)


def answer(tokens: Sequence[int], count: int) -> list[int]:
    """What the model says after ``tokens``."""
    said, links = list(tokens), []
    for _ in range(count):
        said.append(_next(_links(said, links)[-1]))
    return said[len(tokens) :]


# The ranks


class _Row:
    """A request as one rank knows it."""

    def __init__(self, tokens: list[int], blocks: tuple[list[int], ...]) -> None:
        self.tokens = tokens
        self.blocks = [list(group) for group in blocks]
        self.links: list[int] = []


class Rank:
    """One worker. ``read``: bytes of earlier steps or of a load that its queries saw, all as they should be; ``wrong``:
    requests that saw others.
    """

    def __init__(self, config: Any, rank: tuple[int, int], kinds: Sequence[str]) -> None:
        self.config, self.rank, self.kinds = config, rank, kinds
        self.rows: dict[str, _Row] = {}
        self.read = 0
        self.wrong: list[str] = []
        share = len(kinds) // config.parallel_config.pipeline_parallel_size
        self._mine = range(rank[0] * share, (rank[0] + 1) * share)
        parallel = config.parallel_config
        heads = config.model_config.get_total_num_kv_heads()
        count = max(1, heads // parallel.tensor_parallel_size)
        first = rank[1] * heads // parallel.tensor_parallel_size
        self._heads = range(first, first + count)
        self._last = rank[0] == parallel.pipeline_parallel_size - 1
        backend = SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: Ranks.backend))
        config.compilation_config.static_forward_context |= {_name(layer): backend for layer in self._mine}

    def specs(self) -> dict[str, KVCacheSpec]:
        """Of this stage's layers, as a model's would be."""
        plain = {"block_size": BLOCK, "num_kv_heads": len(self._heads), "head_size": 8, "dtype": torch.float32}
        of_kind = {
            "full": FullAttentionSpec(**plain),
            "sliding": SlidingWindowSpec(**plain, sliding_window=WINDOW),
            "mla": MLAAttentionSpec(**plain | {"num_kv_heads": 1}),
        }
        return {_name(layer): of_kind[self.kinds[layer]] for layer in self._mine}

    def allocate(self, kv_cache_config: Any) -> None:
        """vLLM's own tensors, and the connector as vLLM makes it in a worker."""
        layout = self.config.cache_config.get_resolved_kv_cache_layout()
        self.caches = allocate_kv_cache(kv_cache_config, torch.device("cpu"), layout)
        self._group = {name: g for g, group in enumerate(kv_cache_config.kv_cache_groups) for name in group.layer_names}
        real, adapter.rank_of_worker = adapter.rank_of_worker, lambda: self.rank
        self.connector: Any = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, kv_cache_config)
        adapter.rank_of_worker = real
        self.connector.register_kv_caches(self.caches)

    def scribble(self) -> None:
        """Overwrite every byte."""
        storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage() for cache in self.caches.values()}
        for storage in storages.values():
            torch.empty(0, dtype=torch.uint8).set_(storage).random_(0, 255)

    def run(self, scheduled: Any, right: dict[str, bool]) -> ModelRunnerOutput:
        """One step, in the order of vLLM's model runner. ``right``: by request, whether all ranks before saw what they
        should: it goes from stage to stage with the batch.
        """
        self._update(scheduled)
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        if not scheduled.total_num_scheduled_tokens:
            return Around.kv_connector_no_forward(scheduled, self.config)
        with set_forward_context(None, self.config), Around.maybe_get_kv_connector_output(scheduled) as told:
            sampled = {
                name: self._forward(name, count, computed, right) for name, count, computed in _counts(scheduled)
            }
        if not self._last:
            return ModelRunnerOutput.with_kv_conn_output_only(told)
        return ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={name: at for at, name in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=told,
        )

    def _update(self, scheduled: Any) -> None:
        for name in scheduled.finished_req_ids:
            self.rows.pop(name, None)
        for new in scheduled.scheduled_new_reqs:
            self.rows[new.req_id] = _Row(list(new.prompt_token_ids), new.block_ids)
        cached = scheduled.scheduled_cached_reqs
        for at, name in enumerate(cached.req_ids):
            row, blocks = self.rows[name], cached.new_block_ids[at]
            if name in cached.resumed_req_ids:
                row.blocks = [list(group) for group in blocks]
            elif blocks is not None:
                for group, more in zip(row.blocks, blocks, strict=True):
                    group.extend(more)
            if name in cached.all_token_ids:
                row.tokens = list(cached.all_token_ids[name])
            elif cached.new_token_ids:  # earlier stages sample nothing: the scheduler tells them
                end = cached.num_computed_tokens[at] + len(cached.new_token_ids[at])
                row.tokens += cached.new_token_ids[at][len(cached.new_token_ids[at]) - max(0, end - len(row.tokens)) :]

    def _forward(self, name: str, count: int, computed: int, right: dict[str, bool]) -> list[int]:
        row = self.rows[name]
        end = computed + count
        assert end <= len(row.tokens), "scheduled ahead of the tokens that are known"
        links = _links(row.tokens, row.links)
        for layer in self._mine:
            key = _name(layer)
            cache = self.caches[key].view(torch.uint8).numpy()  # [blocks, heads, tokens, bytes]
            table = np.array(row.blocks[self._group[key]])
            first = max(0, computed - WINDOW + 1) if self.kinds[layer] == "sliding" else 0
            heads = [0] if self.kinds[layer] == "mla" else self._heads
            expected = np.stack([_written(links[first:end], layer * 64 + head, cache.shape[3]) for head in heads], 1)
            at = np.arange(first, end)
            blocks, slots = table[at // BLOCK], at % BLOCK
            assert (blocks > 0).all(), f"{name} sees vLLM's null block"
            seen = cache[blocks[: computed - first], :, slots[: computed - first]]
            self.read += seen.size
            if not np.array_equal(seen, expected[: computed - first]):
                right[name] = False
                self.wrong.append(name)
            cache[blocks[computed - first :], :, slots[computed - first :]] = expected[computed - first :]
        if end < len(row.tokens) or not self._last:
            return []
        token = _next(links[end - 1]) if right.get(name, True) else VOCAB - 1
        row.tokens.append(token)
        return [token]


def _name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"


def _counts(scheduled: Any) -> Iterator[tuple[str, int, int]]:
    cached = scheduled.scheduled_cached_reqs
    computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
    computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    for name, count in scheduled.num_scheduled_tokens.items():
        yield name, count, computed[name]


def _across(value: Any) -> Any:
    """As it comes out at the other end of a pipe between processes: nothing is shared."""
    return copy.deepcopy(value)


class _Pending(Future):  # type: ignore[type-arg]
    """Done when its result is asked for, as a later stage of a pipeline is."""

    def __init__(self, finish: Callable[[], Any]) -> None:
        super().__init__()
        self._finish = finish

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self.set_result(self._finish())
        return super().result()


class _Batch:
    """A step on its way through the stages."""

    def __init__(self, scheduled: Any) -> None:
        self.computes = scheduled.total_num_scheduled_tokens > 0
        self.scheduled = _across(scheduled)
        self.right: dict[str, bool] = {}
        self.outputs: list[ModelRunnerOutput] = []
        self.result: ModelRunnerOutput | None = None


class Ranks(Executor):
    """vLLM's executor of all. ``kinds``: of the layers; ``backend``: of their attention. Set before vLLM makes it."""

    supports_pp = True
    kinds: Sequence[str] = ()
    machines: Sequence[str] = ()
    backend = "CPU_ATTN"

    def _init_executor(self) -> None:
        parallel = self.vllm_config.parallel_config
        self._stages, self._tensor = parallel.pipeline_parallel_size, parallel.tensor_parallel_size
        names = [(stage, tensor) for stage in range(self._stages) for tensor in range(self._tensor)]
        self.ranks = [Rank(self.vllm_config, name, self.kinds) for name in names]
        self._flying: list[_Batch] = []
        self.flying_max = self.running = 0

    def collective_rpc(
        self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None, non_block: Any = False
    ) -> Any:
        told = {
            "get_kv_cache_spec": lambda rank: rank.specs(),
            "get_supported_kv_cache_layouts": lambda rank: ["LBHNC"],
            "set_kv_cache_layout": lambda rank: None,
            "determine_available_memory": lambda rank: 256 << 20,
            "compile_or_warm_up_model": lambda rank: CompilationTimes(0.0, 0.0),
            "get_kv_connector_handshake_metadata": lambda rank: {rank.rank: self._part(rank)},
            "shutdown": lambda rank: rank.connector.shutdown(),
        }[method]
        return [told(rank) for rank in self.ranks]

    def _part(self, rank: Rank) -> Any:
        part = rank.connector.get_handshake_metadata()
        if self.machines:
            object.__setattr__(part, "machine", self.machines[self.ranks.index(rank)])
        return _across(part)

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        for rank, config in zip(self.ranks, kv_cache_configs, strict=True):
            rank.allocate(config)

    def check_health(self) -> None: ...

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        batch = _Batch(scheduler_output)
        self._flying.append(batch)
        self.flying_max = max(self.flying_max, len(self._flying))
        self._stage(0, batch)
        pending = _Pending(lambda: None if batch.computes else self._finish(batch))
        return pending if non_block else pending.result()

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        batch = self._flying[-1]
        pending = _Pending(lambda: self._finish(batch))
        return pending if non_block else pending.result()

    def _stage(self, stage: int, batch: _Batch) -> None:
        for rank in self.ranks[stage * self._tensor : (stage + 1) * self._tensor]:
            self.running = rank.rank[1]
            batch.outputs.append(_across(rank.run(_across(batch.scheduled), batch.right)))

    def _finish(self, batch: _Batch) -> ModelRunnerOutput:
        assert self._flying.pop(0) is batch, "vLLM takes results in the order of the batches"
        for stage in range(1, self._stages):
            self._stage(stage, batch)
        assert self.kv_output_aggregator is not None
        result = self.kv_output_aggregator.aggregate(batch.outputs, output_rank=len(self.ranks) - self._tensor)
        assert result is not None
        return result
