"""Reads vLLM's objects, in the forms that the supported releases have: 0.32 and 0.33.

Owns every name of vLLM's that is not part of its connector interface. What differs between releases is asked for, not
looked up by version. Nothing here changes anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stowage.core.gather import attributes, joined, rows
from stowage.core.geometry import NULL_BLOCK, IntArray, Kind
from stowage.errors import ConfigError, UnsupportedModelError

SUPPORTED = ("0.32", "0.33")
NULL = 0
"""vLLM's null block."""
READ_FROM_FILES = frozenset(
    "auto bitsandbytes fastsafetensors gguf hf instanttensor mistral npcache pt runai_streamer runai_streamer_sharded "
    "safetensors sharded_state".split()
)
"""Formats of ``--load-format`` that read the files of the model. The others fetch weights from somewhere."""


@dataclass(frozen=True)
class GroupShape:
    """What the scheduler knows of a cache group before anything is allocated. ``dense``: a recurrent group keeps the
    state after every block, not only where a step ended. ``of``: vLLM's number of the group whose blocks these are, if
    it is not this one's, of which each has ``parts`` of ``block_tokens``. The rest: see ``core.geometry.Group``.
    """

    kind: Kind
    block_tokens: int
    window: int
    layers: tuple[str, ...]
    dense: bool = False
    of: int | None = None
    parts: int = 1
    resume_tokens: int = 0
    spared_tokens: int = 0


def unknown_release() -> str:
    """What to say of the installed vLLM when it is none of ``SUPPORTED``; empty when it is."""
    from vllm import __version__ as version

    if ".".join(version.split(".")[:2]) in SUPPORTED:
        return ""
    return f"vLLM {version} is installed, and StowageConnector is written for {' and '.join(SUPPORTED)}."


def check_config(config: Any) -> None:
    """Refuse, before anything is allocated, what would be wrong or of no use. Raises ``ConfigError``."""
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(
                f"{name} is {getattr(parallel, name)}: a block's tokens are then spread over ranks, which "
                "StowageConnector does not support. Set it to 1, or leave the connector out."
            )
    drafts = config.speculative_config
    if drafts is not None and drafts.uses_extract_hidden_states():
        raise ConfigError(
            "The speculative method extract_hidden_states keeps hidden states in the KV cache, which StowageConnector "
            "does not store. Leave --speculative-config or the connector out."
        )
    model = config.model_config
    _check_cache_dtype(str(config.cache_config.cache_dtype), model.dtype)
    if model.runner_type == "pooling" and not model.is_prefix_caching_supported:
        raise ConfigError(
            "The model pools all of a prompt's hidden states (MEAN, CLS or STEP), so no part of a prompt can come from "
            "a cache. Leave StowageConnector out for it."
        )


def _check_cache_dtype(cache: str, model: Any) -> None:
    """vLLM 0.32's CPU kernels take the memory of a cache for numbers of the model's type: where the size of these is
    another, they miss the blocks that vLLM names, and write beyond the end of the last.
    """
    import torch
    from vllm.platforms import current_platform

    kept = getattr(torch, cache, None)
    if current_platform.is_cpu() and isinstance(kept, torch.dtype) and kept.itemsize != model.itemsize:
        raise ConfigError(
            f"kv_cache_dtype is {cache}, and the model computes in {str(model).removeprefix('torch.')}: vLLM's CPU "
            "kernels take the cache for numbers of that, and write outside of its blocks. Set --kv-cache-dtype auto."
        )


@dataclass(frozen=True)
class Drafts:
    """Speculative decoding. ``lookahead``: what draft layers cache for a token depends on so many tokens behind it.
    ``model``: the draft model's configuration, where draft layers have a KV cache that depends on it. ``tokens``: how
    many are drafted at most.
    """

    method: str
    lookahead: int = 0
    model: Any = None
    tokens: int = 0


def drafts_of(config: Any) -> Drafts | None:
    """``None`` without speculative decoding. Draft layers that read the target's hidden states (EAGLE, MTP) take the
    hidden state of a token and the token behind it; those of several modules, or blocks of drafts, more of them: as
    many as are drafted at most, which is what vLLM drops of a hit.
    """
    drafts = config.speculative_config
    if drafts is None:
        return None
    lookahead = 0
    if drafts.use_eagle():
        several = drafts.use_multi_module_mtp() or drafts.method not in ("eagle", "eagle3", "mtp")
        lookahead = drafts.num_speculative_tokens if several else 1
    model = drafts.draft_model_config if drafts.uses_draft_kv_cache() else None
    return Drafts(drafts.method, lookahead, model, drafts.num_speculative_tokens or 0)


def group_shapes(kv_cache_config: Any) -> list[GroupShape]:
    """The cache groups, in vLLM's order, and behind them what ``parts_of_blocks`` adds. Raises
    ``UnsupportedModelError`` for kinds that are not known here.
    """
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    groups = kv_cache_config.kv_cache_groups
    if not groups:
        raise UnsupportedModelError("The model has no KV cache: there is nothing to keep. Leave the connector out.")
    shapes = []
    for number, group in enumerate(groups):
        spec = group.kv_cache_spec
        if not getattr(spec, "prefix_cacheable", True) or not getattr(group, "enable_kv_transfer", True):
            raise _unknown(number, spec, "its blocks cannot be found by content")
        specs = list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
        found = {_shape(number, one) for one in specs}
        if len(found) > 1:
            raise _unknown(number, spec, "its layers differ in what a query reads")
        kind, window, dense = found.pop()
        shapes.append(GroupShape(kind, spec.block_size, window, tuple(group.layer_names), dense))
    return parts_of_blocks(shapes, getattr(kv_cache_config, "cache_hit_alignment_tokens", None) or 0)


def parts_of_blocks(shapes: list[GroupShape], unit: int) -> list[GroupShape]:
    """With a ``prefix_match_unit`` vLLM finds the end of a prompt up to a part of a block, which has a state there. So
    states are named every ``unit`` tokens, and the part of a block of attention is a group of its own, found like one.
    """
    sizes, kinds = {shape.block_tokens for shape in shapes}, {shape.kind for shape in shapes}
    block = max(sizes)
    whole = not unit or unit >= block or block % unit
    if whole or len(sizes) > 1 or kinds != {Kind.FULL, Kind.RECURRENT} or any(shape.dense for shape in shapes):
        return shapes
    parts = block // unit
    found = [
        replace(shape, resume_tokens=unit)
        if shape.kind is Kind.FULL
        else replace(shape, block_tokens=unit, parts=parts)
        for shape in shapes
    ]
    return found + [
        GroupShape(Kind.RECURRENT, unit, 0, shape.layers, of=number, parts=parts, spared_tokens=block)
        for number, shape in enumerate(shapes)
        if shape.kind is Kind.FULL
    ]


def _shape(number: int, spec: Any) -> tuple[Kind, int, bool]:
    from vllm.v1 import kv_cache_interface as vllm

    if getattr(spec, "prefix_replay_tokens", 0):
        raise _unknown(number, spec, "a hit has to be computed again in part")
    if type(spec) in (vllm.FullAttentionSpec, vllm.MLAAttentionSpec):  # one with a window, when hybrids are off, too:
        return Kind.FULL, 0, False  # its blocks are all kept
    if type(spec) is vllm.SlidingWindowSpec:
        return Kind.SLIDING, spec.sliding_window + getattr(spec, "extra_retained_tokens", 0), False
    if type(spec) is vllm.ChunkedLocalAttentionSpec:
        return Kind.CHUNKED, spec.attention_chunk_size, False
    if type(spec) is vllm.MambaSpec:
        if spec.mamba_cache_mode == "none":
            raise ConfigError(
                "The model has recurrent layers, and vLLM keeps none of their states to resume from. Start with "
                "--enable-prefix-caching --mamba-cache-mode align."
            )
        return Kind.RECURRENT, 0, spec.mamba_cache_mode != "align"
    raise _unknown(number, spec, "this kind of cache is not known here")


def _unknown(number: int, spec: Any, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"Cache group {number} of the model is a {type(spec).__name__}: {why}. Leave StowageConnector out for it."
    )


def hash_tokens(config: Any, kv_cache_config: Any) -> int:
    """Tokens per block hash, where somebody listens to KV cache events; else 0."""
    events = config.kv_events_config
    if events is None or not events.enable_kv_cache_events:
        return 0
    tokens: int = getattr(kv_cache_config, "hash_block_size", None) or config.cache_config.block_size
    return tokens


def say(text: str) -> None:
    """One line of vLLM's log."""
    from vllm.logger import init_logger

    init_logger("vllm.stowage").info("%s", text)


def warn(text: str) -> None:
    """The same as a warning, once in a process."""
    from vllm.logger import init_logger

    init_logger("vllm.stowage").warning_once(text)


def rank_of_worker() -> tuple[int, int]:
    """Pipeline and tensor rank of this process, as vLLM names its handshakes."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return get_pp_group().rank_in_group, get_tp_group().rank_in_group


# A step


def computed_before(request: Any) -> int:
    """Tokens that a request had computed before the step that is being built."""
    count: int = request.num_computed_tokens
    return count


def resumed(scheduled: Any) -> Iterable[str]:
    """Requests that lost their blocks and begin anew in this step."""
    names: Iterable[str] = getattr(scheduled.scheduled_cached_reqs, "resumed_req_ids", ())
    return names


class StepBlocks:
    """vLLM's blocks of the requests of a step that is being built: its own lists, for copying them takes long."""

    def __init__(self, scheduled: Any) -> None:
        self._state = getattr(scheduled, "kv_connector_block_state", None)
        manager = getattr(getattr(self._state, "resolve_block_ids", None), "__self__", None)
        managers = getattr(getattr(manager, "coordinator", None), "single_type_managers", ())
        self._tables = [manager.req_to_blocks for manager in managers]

    def tell(self, request: str) -> bool:
        """Whether they tell of this request."""
        if self._tables:
            return request in self._state.req_ids  # type: ignore[union-attr]
        return self._state is not None and self._state.get_block_ids(request) is not None

    def numbers(self, request: str, group: int) -> list[int]:
        """vLLM's numbers of a request's blocks of a group."""
        if self._tables:
            blocks = self._tables[group].get(request) or []
            return attributes(blocks, 0, len(blocks), "block_id")
        return list(self._state.get_block_ids(request)[group])  # type: ignore[union-attr]

    def rows(self, group: int, requests: list[str], begins: list[int], width: int) -> tuple[list[int], list[int]]:
        """The numbers of so many blocks of each request from where it ``begins`` on, one after the other; and the
        indices of requests of which some of them are not there.
        """
        if self._tables:
            table = self._tables[group]
            return rows([table.get(request) or [] for request in requests], begins, width, "block_id", NULL)
        places = zip(requests, begins, strict=True)
        return joined((self.numbers(name, group)[begin : begin + width] for name, begin in places), width, NULL)


def table_of(blocks: Iterable[int]) -> IntArray:
    """vLLM's block numbers, its null block named as ours."""
    table = np.array(list(blocks), dtype=np.int64)
    table[table == NULL] = NULL_BLOCK
    return table


def boundary_states(scheduled: Any) -> Mapping[str, Sequence[tuple[int, int, int]]]:
    """Group, block and boundary of the recurrent states that this step leaves behind, by request."""
    state = getattr(scheduled, "kv_connector_block_state", None)
    offers: Mapping[str, Sequence[tuple[int, int, int]]] = getattr(state, "boundary_state_offloads", None) or {}
    return offers


# A request


def media_of(request: Any) -> list[tuple[int, str]]:
    """Where images and the like begin in the prompt, and what vLLM calls them."""
    return [(feature.mm_position.offset, feature.identifier) for feature in request.mm_features or ()]


def hashes_media(config: Any) -> bool:
    """Whether vLLM names media by what they hold. Where it keeps none of them it counts them, in each engine anew."""
    media = getattr(config.model_config, "multimodal_config", None)
    return bool(config.cache_config.enable_prefix_caching or getattr(media, "mm_processor_cache_gb", 1))


def tokens_of(request: Any) -> Sequence[int]:
    """All tokens that are known. vLLM's own list where there is one: what it shows reads them one by one."""
    tokens: Sequence[int] = getattr(request, "_all_token_ids", request.all_token_ids)
    return tokens


def uses_embeddings(request: Any) -> bool:
    """Whether the prompt is not told by its tokens."""
    return request.prompt_token_ids is None or request.prompt_embeds is not None


def reads_cache(request: Any) -> bool:
    """Whether vLLM takes any of this prompt from a cache: not if all log-probabilities or states are asked for."""
    return not getattr(request, "skip_reading_prefix_cache", False)


def stop_at(request: Any, boundary: int) -> None:
    """Have vLLM end a step of this prompt there, so that the states of recurrent layers can be kept: what lies before
    was seen in another prompt. Releases that do not know such positions compute as they would.
    """
    if getattr(request, "shared_prefix_boundary", boundary) < boundary:
        request.shared_prefix_boundary = boundary


def adapter_of(request: Any) -> Lora | None:
    """The request's LoRA adapter."""
    lora = request.lora_request
    if lora is None:
        return None
    return Lora(lora.lora_int_id, Path(lora.lora_path), bool(getattr(lora, "load_inplace", False)))


@dataclass(frozen=True, slots=True)
class Lora:
    """An adapter: the number under which workers keep it, and the files that they read when they have none of that
    number, or each time (``again``).
    """

    number: int
    directory: Path
    again: bool
