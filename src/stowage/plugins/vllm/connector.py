"""``StowageConnector``: vLLM's connector interface, handed on to the side that this process is.

Owns no logic. A connector of its own, and not vLLM's ``OffloadingSpec`` under its ``OffloadingConnector``: that one
stores only the last window or state of sliding and recurrent groups, so that a prefix which ends in the middle of a
stored prompt is no hit for hybrid models; and it asserts that copies succeed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from stowage.plugins.vllm import adapter, layer_heads, multi_connector, settings, weight_updates
from stowage.plugins.vllm.messages import Part, Report, Step
from stowage.plugins.vllm.scheduler import SchedulerSide
from stowage.plugins.vllm.stats import Metrics, Reporter, Stats
from stowage.plugins.vllm.worker import WorkerSide


class StowageConnector(KVConnectorBase_V1, SupportsHMA):
    """Stowage as a KV connector of vLLM's. Settings: docs/vllm.md.

    Raises ``ConfigError`` (``BudgetError``), ``UnsupportedModelError`` or ``StorageError`` at the start of an engine
    that could not be served as its settings say.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        adapter.check_config(vllm_config)
        shapes = adapter.group_shapes(kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        options = settings.read(transfer.kv_connector_extra_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        engine = multi_connector.outermost_config(vllm_config)
        self._told_in_reports = multi_connector.others_shake_hands(engine, type(self))
        if role is KVConnectorRole.SCHEDULER:
            # vLLM reads this after it has made the connector. Its default answers a request whose copy failed with
            # an error; a cache may cost a recompute, never a request.
            engine.kv_transfer_config.kv_load_failure_policy = "recompute"
            self._scheduler = SchedulerSide(
                vllm_config, shapes, options, adapter.hash_tokens(vllm_config, kv_cache_config)
            )
            self._reporter = Reporter(self._scheduler.stats, self._scheduler.counts)
        else:
            layers = [shape.layers for shape in shapes]
            rank = adapter.rank_of_worker()
            naming = layer_heads.naming(
                vllm_config,
                kv_cache_config,
                rank[1],
                shared=options.deduplicate_ranks,
                each_head=options.any_parallel_size,
            )
            blocks = kv_cache_config.num_blocks
            self._worker = WorkerSide(layers, blocks, rank, naming, report_part=self._told_in_reports)
            last = rank[0] == vllm_config.parallel_config.pipeline_parallel_size - 1
            self._never_told_to_save = vllm_config.speculative_config is not None and not last

    @property
    def requires_kv_delivery(self) -> bool:
        """No: what is not stored is computed."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """No: nobody has tried what becomes of the mapped blocks when a GPU's cache is unmapped and mapped again."""
        return False

    # In a worker

    @property
    def _step(self) -> Step:
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        return step

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        assert self._worker is not None
        around = weight_updates.worker_around()
        self._worker.register(kv_caches, None if around is None else weight_updates.Changes(around))

    def get_handshake_metadata(self) -> Part | None:
        """See the base. None beside a connector that has some: vLLM takes one child's, and the other's are needed."""
        assert self._worker is not None
        return None if self._told_in_reports else self._worker.part()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self._worker is not None
        self._worker.begin_loads(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are for requests that wait: no layer of this forward waits for one."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are stored when the whole step is computed."""

    def wait_for_save(self) -> None:
        assert self._worker is not None
        self._worker.store(self._step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._worker is not None
        busy = self._step.busy if self.has_connector_metadata() else True
        ended, failed = self._worker.results(busy)
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def build_connector_worker_meta(self) -> Report | None:
        assert self._worker is not None
        if self._never_told_to_save and self.has_connector_metadata():
            self._worker.store(
                self._step
            )  # of an engine that drafts, vLLM tells the last stage alone; this one is done
        return self._worker.report()

    # In the scheduler

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        assert self._scheduler is not None
        if not self._told_in_reports:
            self._scheduler.connect(metadata)

    def on_new_request(self, request: Any) -> None:
        assert self._scheduler is not None
        self._scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        assert self._scheduler is not None
        return self._scheduler.build(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        assert self._scheduler is not None
        self._scheduler.reported(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See the base. Blocks are free at once: what they held was copied with the step that computed it."""
        assert self._scheduler is not None
        self._scheduler.finished(request)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether vLLM should go on for a moment although nobody asks for anything: so that the last request's numbers
        are seen before the next one comes, and its chunks are found.
        """
        return self._scheduler is not None and (self._reporter.behind or self._scheduler.behind)

    def take_events(self) -> Iterable[Any]:
        assert self._scheduler is not None
        return self._scheduler.events()

    def reset_cache(self) -> bool:
        assert self._scheduler is not None
        return self._scheduler.reset()

    # Both

    def get_kv_connector_stats(self) -> Stats | None:
        """See the base. Workers tell theirs in their reports."""
        return self._reporter.report() if self._scheduler is not None else None

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> Metrics:
        return Metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
