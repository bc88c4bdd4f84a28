"""Names of what is stored: everything that vLLM's cached bytes depend on besides tokens, so that two engines share a
chunk only when its bytes mean the same.

Keys are made from the tokens here and not from vLLM's block hashes: those omit the weights, the layout and the parallel
division, some of vLLM's hash functions depend on the process, and none of them is needed.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from stowage.core.geometry import Group
from stowage.core.key import Field, namespace, tenant_namespace
from stowage.models import hub, identity
from stowage.plugins.vllm import adapter
from stowage.plugins.vllm.division import Division
from stowage.storage.format import envelope, segment

FORMAT = 2
"""How chunks are laid out; raised whenever the same tokens come to other bytes."""

_LLAMA4_TUNED_FROM = 32768

_DIGEST: Final = re.compile(r"(?:.*:)?(?:[0-9a-f]{64}|[0-9a-f]{128})", re.DOTALL)
"""What vLLM calls media by their content, with an adapter's name before it where that matters."""

logger = logging.getLogger("stowage.vllm")


def engine_namespace(config: Any, groups: Iterable[Group], division: Division, *, by_name: bool) -> bytes:
    """The 32 bytes for an engine whose ranks divide every block so. ``by_name``: they are those of other numbers of
    ranks, too, if these have the same pieces.
    """
    import vllm
    from vllm.platforms import current_platform

    model, parallel = config.model_config, config.parallel_config
    shapes: list[Field] = [
        {
            "kind": group.kind.value,
            "block_tokens": group.block_tokens,
            "blocks_per_chunk": group.blocks_per_chunk,
            "window": group.window,
            "pieces": [[piece.name, piece.nbytes, piece.layout] for piece in division.pieces[group.index]],
        }
        for group in groups
    ]
    return namespace(
        {
            "format": [envelope.VERSION, segment.VERSION],
            "engine": f"vllm/{FORMAT}",
            "code": f"vllm/{vllm.__version__}",
            "platform": [current_platform.device_type, os.uname().machine, _instructions()],
            "attention": str(getattr(config.attention_config, "backend", None)),
            "weights": _weights(model, config),
            "config": _config_text(model.hf_config),
            "compute_dtype": str(model.dtype),
            "kv_dtype": str(config.cache_config.cache_dtype),
            "quantization": str(model.quantization),
            "groups": shapes,
            "parallel": "any" if by_name else _parallel(parallel),
            **_draft_fields(config),
            **_option_fields(config),
        }
    )


def _parallel(parallel: Any) -> Field:
    expert_parallel = bool(getattr(parallel, "enable_expert_parallel", False))
    return [parallel.tensor_parallel_size, parallel.pipeline_parallel_size, expert_parallel]


def _draft_fields(config: Any) -> dict[str, Field]:
    """Where blocks hold what draft layers cache: what that depends on. Other kinds of drafts change no byte."""
    drafts = adapter.drafts_of(config)
    if drafts is None or drafts.model is None:
        return {}
    same = drafts.model.model == config.model_config.model
    weights = "" if same else _weights(drafts.model, config)
    named: list[Field] = [drafts.method, drafts.lookahead, weights, _config_text(drafts.model.hf_config)]
    return {"drafts": [*named, *_length_marks(drafts.model)]}


def _option_fields(config: Any) -> dict[str, Field]:
    """What an engine was told that changes what the same weights compute, where it was told anything."""
    model = config.model_config
    parts = (
        (model, ("quantization_config", "model_class_overrides")),
        (model.multimodal_config, ("mm_processor_kwargs", "mm_encoder_attn_dtype", "video_pruning_rate")),
        (config.lora_config, ("target_modules",)),
    )
    told = {name: getattr(part, name, None) for part, names in parts for name in names}
    return {name: _text(value) for name, value in (told | {"lengths": _length_marks(model)}).items() if value}


def _length_marks(model: Any) -> list[bool]:
    """Where numbers depend on the longest prompt that an engine takes, on which side of their marks it is: LongRoPE has
    one set of factors up to a length and another beyond, and Llama 4 scales its queries from 32k on unless told.
    """
    marks = [model.max_model_len > length for length in _longrope_lengths(model.hf_config.to_dict())]
    if any("Llama4" in name for name in model.hf_config.architectures or ()):
        told = {**model.try_get_generation_config(), **model.override_generation_config}
        marks.append(bool(told.get("attn_temperature_tuning", model.max_model_len > _LLAMA4_TUNED_FROM)))
    return marks


def _longrope_lengths(fields: dict[str, Any], outer: int = 0) -> list[int]:
    """``original_max_position_embeddings`` of each such rope, wherever in a config it is."""
    own = fields.get("original_max_position_embeddings") or outer
    found = [own] if own and (fields.get("rope_type") or fields.get("type")) in ("longrope", "su") else []
    for name in sorted(fields, key=str):
        if isinstance(fields[name], dict):
            found += _longrope_lengths(fields[name], own)
    return found


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _config_text(hf_config: Any) -> str:
    fields = hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version", "_commit_hash"):
        fields.pop(name, None)
    return _text(fields)


def _instructions() -> str:
    """The device that computes: its kernels decide how blocks are laid out, and how sums are rounded."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return str(current_platform.get_device_name())
    import torch

    return f"{torch.backends.cpu.get_cpu_capability()} amx={torch.cpu._is_amx_tile_supported()}"


def _weights(model: Any, config: Any) -> str:
    """A name for the weights' content: a digest of the files, or the hub's commit; else one of this process."""
    load_format = str(config.load_config.load_format)
    if "dummy" in load_format:
        return _private(f"the weights are random (load_format={load_format})")
    elsewhere = getattr(model, "model_weights", "") or (
        load_format if load_format not in adapter.READ_FROM_FILES else ""
    )
    if elsewhere:
        return _private(f"the weights come from {elsewhere} and not from files in a directory")
    path = hub.local_path(model.model, model.revision)
    digest = identity.of_path(path) if path is not None else None
    if digest is not None:
        return digest
    commit = getattr(model.hf_config, "_commit_hash", None)
    if commit and (model.hf_config_path or model.model) == model.model:  # else it is of where the config lies
        return f"hub:{model.model}@{commit}"
    return _private(f"no files with weights were found of {model.model}, and its revision is not known")


def _private(why: str) -> str:
    logger.warning("%s: what is stored serves this process alone, and no later one", why)
    return f"private:{os.urandom(16).hex()}"


class Namespaces:
    """The namespace of each request, the engine's, its adapter's, its tenant's; and the names of its media. ``renew``
    makes all that is stored unreachable, for weights that were changed in place.

    ``hashes_media``: whether vLLM names media by what they hold.
    """

    def __init__(self, engine: bytes, *, hashes_media: bool = True) -> None:
        self._engine, self._hashes_media = engine, hashes_media
        self._own = os.urandom(16)
        self._adapters: dict[tuple[int, Path], _Adapter] = {}

    def of(self, request: Any) -> bytes:
        """Raises ``OSError`` for adapter files that cannot be read, ``ValueError`` where the workers have others."""
        name = self._engine
        lora = adapter.adapter_of(request)
        if lora is not None:
            name = namespace({"engine": self._engine, "adapter": self._adapter(lora)})
        return tenant_namespace(name, request.cache_salt) if request.cache_salt else name

    def media_of(self, request: Any) -> list[tuple[int, bytes]]:
        """Where images and the like begin in the prompt, and what they are. One that is not named by what it holds, but
        by a count or by a client, is the same in this engine alone.
        """
        found = []
        for offset, name in adapter.media_of(request):
            by_content = self._hashes_media and _DIGEST.fullmatch(name)
            found.append((offset, blake3((b"" if by_content else self._own) + name.encode()).digest()))
        return found

    def _adapter(self, lora: adapter.Lora) -> str:
        """What an adapter's files hold, and held when it was seen first: workers read them once, unless they are told
        to again, so of files that have changed meanwhile nobody knows whether they are what is computed with.
        """
        known, files = self._adapters.get((lora.number, lora.directory)), identity.files_in(lora.directory)
        marks = {path: identity.mark_of(path.stat()) for path in files}
        if known is not None and known.marks == marks:
            return known.digest
        whole = identity.have_tensors(files)
        digest = identity.of_checkpoint(lora.directory, files) if whole else f"private:{os.urandom(16).hex()}"
        if known is not None and known.digest != digest and not lora.again:
            raise ValueError(
                f"the files in {lora.directory} have changed since the adapter was loaded from there. Load what has "
                "changed from a new path, or restart the server."
            )
        self._adapters[lora.number, lora.directory] = _Adapter(marks, digest)
        return digest

    def renew(self) -> None:
        """From now on nothing that was stored is found."""
        self._engine = namespace({"engine": self._engine, "weights": os.urandom(16)})


@dataclass(frozen=True, slots=True)
class _Adapter:
    marks: dict[Path, str]
    digest: str
