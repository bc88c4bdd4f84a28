"""LoRA adapters of an engine: installed, tried with a few tokens, and counted in its memory budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stowage.config.memory import Memory, format_size
from stowage.core.key import adapter_namespace
from stowage.engine.assembly import Parts
from stowage.errors import BudgetError, RequestError, UnsupportedModelError
from stowage.executor.batch import Work
from stowage.executor.sequence_state import probe_sequence, take_blocks
from stowage.models.adapters import Adapter, AdapterFile, Adapters
from stowage.models.loading import Loaded

_PROMPT, _TOKENS = 4, 6
_READ_AS_IT_IS = "kv_b_proj"
"""Latent attention (``executor.attention``) computes with the weight of this layer, besides calling it."""
_SCALED = "rwkv"


def memory_without_adapters(files: Sequence[AdapterFile], memory: Memory) -> Memory:
    """What the matrices of ``files``, which stay on the device, leave of ``memory``. Raises BudgetError."""
    nbytes = sum(file.nbytes for file in files)
    if not nbytes or not memory.device_memory_bytes:
        return memory
    left = memory.device_memory_bytes - nbytes
    if left <= 0:
        raise BudgetError(
            f"device_memory is {format_size(memory.device_memory_bytes)}, and the adapters alone take "
            f"{format_size(nbytes)} of it. Give device_memory a larger size, or fewer adapters."
        )
    return replace(memory, device_memory=left)


def install(loaded: Loaded, files: Sequence[AdapterFile], parts: Parts) -> Adapters | None:
    """The adapters in ``files`` on an engine's model; ``None`` for none. Each is tried with a few tokens: all of its
    layers must be called, as a prompt and token by token. Raises CheckpointError and UnsupportedModelError, and then
    ``parts`` are closed.
    """
    if not files:
        return None
    try:
        return _installed(loaded, files, parts)
    except BaseException:
        parts.runner.close()
        if parts.link is not None:
            parts.link.close()
        if parts.store is not None:
            parts.store.close(0.0)
        raise


def select_adapter(adapters: Adapters | None, name: str) -> Adapter | None:
    """The adapter of a request that names it; ``None``: the model without one. Raises RequestError."""
    if adapters is not None:
        return adapters.named(name)
    if name:
        raise RequestError(f"there is no adapter {name!r} here: the engine was given none.")
    return None


def _installed(loaded: Loaded, files: Sequence[AdapterFile], parts: Parts) -> Adapters:
    if loaded.model.config.model_type == _SCALED:
        raise UnsupportedModelError(
            "adapters are not put on RWKV models: their weights are scaled down layer by layer in answers and not in "
            "training, and PEFT's matrices are not. Merge the adapter with PEFT's merge_and_unload()."
        )
    adapters = Adapters(loaded.model, files, loaded.renamed)
    latent = any(layer.latent for blocks in parts.layout.blocks for layer in blocks.layers)
    parts.runner.adapters = adapters
    try:
        for name in adapters.names:
            adapter = adapters.named(name)
            assert adapter is not None
            read = [layer for layer in adapter.layers if latent and layer.rpartition(".")[2] == _READ_AS_IT_IS]
            missed = read[0] if read else _missed(adapter, parts)
            if missed:
                raise UnsupportedModelError(
                    f"the adapter {adapter.name!r} changes {missed}, which is computed here in a way that an adapter "
                    "cannot be added to. Merge it with PEFT: "
                    "PeftModel.from_pretrained(BASE, DIR).merge_and_unload().save_pretrained(NEW_DIR)"
                )
    except BaseException:
        parts.runner.adapters = None
        adapters.remove()
        raise
    return adapters


def _missed(adapter: Adapter, parts: Parts) -> str:
    """A layer of ``adapter`` that a step does not call; empty: all are called."""
    tokens = [at % parts.layout.vocab for at in range(5, 5 + _TOKENS)]
    sequence = probe_sequence(0, tokens, parts.layout.groups)
    sequence.adapter = adapter
    take_blocks(sequence, parts.pools, _TOKENS)
    try:
        for count in (_PROMPT, *[1] * (_TOKENS - _PROMPT)):
            adapter.called.clear()
            parts.runner.run([Work(sequence, sequence.computed, count)])
            sequence.computed += count
            if not adapter.called >= adapter.layers.keys():
                return min(adapter.layers.keys() - adapter.called)
        return ""
    finally:
        for pool, table in zip(parts.pools, sequence.tables, strict=True):
            pool.release(table.clear())


def namespace_for_adapter(namespace: bytes, adapter: Adapter | None) -> bytes:
    """The namespace of prompts that are computed with ``adapter``."""
    return adapter_namespace(namespace, adapter.digest if adapter is not None else b"")
