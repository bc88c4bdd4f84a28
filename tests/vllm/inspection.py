"""What tests look at in an engine beside its answers: memory that vLLM has allocated, the arena, each copy."""

from __future__ import annotations

from typing import Any


class Inspection:
    """Part of the driver, whose engine it looks into."""

    _core: Any
    _runner: Any
    _connector: Any

    def allocated(self) -> dict[str, Any]:
        """What the worker has really allocated, found without the connector: by group of the cache the bytes of one
        block, each place in memory once however many layers share it, and the bytes of all tensors' storage.
        """
        import torch

        config, context = self._core.scheduler.kv_cache_config, self._runner.compilation_config.static_forward_context
        groups, storages = [], {}
        for group in config.kv_cache_groups:
            places = {}
            for name in group.layer_names:
                cache = context[name].kv_cache
                for tensor in [cache] if isinstance(cache, torch.Tensor) else cache:
                    places[tensor.data_ptr()] = tensor.numel() * tensor.element_size() // config.num_blocks
                    storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            groups.append(places)
        return {
            "blocks": config.num_blocks,
            "tensors": [len(places) for places in groups],
            "block_bytes": [sum(places.values()) for places in groups],
            "storage": sum(storages.values()),
        }

    def arena(self) -> dict[str, Any]:
        """How the connector has divided host memory."""
        side = self._connector._scheduler
        fields = ("slot_bytes", "groups", "slots", "offset_bytes", "first_slot")
        return {
            "bytes": side._store.arena.bytes,
            "slabs": [{name: getattr(slab, name) for name in fields} for slab in side._store.slabs],
            "block_bytes": [group.bytes_per_block for group in side._groups],
            "chunk_blocks": [group.blocks_per_chunk for group in side._groups],
            "specs": [type(group.kv_cache_spec).__name__ for group in self._runner.kv_cache_config.kv_cache_groups],
        }

    def watch(self) -> None:
        """From now on note each copy of the connector's, for ``watched``."""
        from stowage.plugins.vllm.memory import Copies

        seen = {"stored": 0, "loaded": 0, "null": 0, "partial": 0, "different": 0, "totals": 0}
        kept: dict[tuple[int, int, int], list[bytes]] = {}
        self._seen = seen
        store, load = Copies.store, Copies.load

        def rows(copies: Any, plan: Any) -> list[tuple[tuple[int, int, int], list[bytes]]]:
            """What the device holds of each block of the plan, by its place in the arena."""
            runs = copies._groups[plan.group].runs
            places = zip(plan.blocks.tolist(), plan.slots.tolist(), plan.offsets.tolist(), strict=True)
            seen["null"] += int((plan.blocks <= 0).sum())
            seen["totals"] += plan.copies != len(plan.blocks)
            return [
                ((plan.group, slot, offset), [bytes(run[block].numpy()) for run in runs])
                for block, slot, offset in places
            ]

        def storing(copies: Any, plan: Any) -> Any:
            blocks_per_chunk = self._connector._scheduler._groups[plan.group].blocks_per_chunk
            seen["stored"] += plan.copies
            seen["partial"] += sum((plan.slots == slot).sum() < blocks_per_chunk for slot in set(plan.slots.tolist()))
            kept.update(rows(copies, plan))
            return store(copies, plan)

        def loading(copies: Any, plan: Any) -> Any:
            moved = load(copies, plan)
            seen["loaded"] += plan.copies
            seen["different"] += sum(kept[place] != row for place, row in rows(copies, plan))
            return moved

        Copies.store, Copies.load = storing, loading  # type: ignore[method-assign]

    def watched(self) -> dict[str, int]:
        """Blocks stored and loaded, how many were vLLM's null block, chunks of which not all blocks were stored, blocks
        that came back as other bytes than were there when they were stored.
        """
        return {name: int(count) for name, count in self._seen.items()}
