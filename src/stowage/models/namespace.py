"""The fields of a namespace: all that a chunk's bytes depend on besides its tokens; and the sizes of blocks.

Owns the list (case F3). Changing any field changes every key.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from blake3 import blake3

from stowage.config.memory import Memory
from stowage.core.geometry import Kind
from stowage.core.key import Field
from stowage.models.layout import ModelLayout
from stowage.models.loading import Loaded
from stowage.storage.format import envelope, segment

SNAPSHOT_GRID_TOKENS_LEAST = 64
PARALLEL = "1"
"""How a model is divided over devices: not at all."""
ADAPTER = ""
"""What is put on top of the weights: nothing, ``loading`` refuses adapters that are not merged."""
_COMPUTING = ("core", "cuda", "engine", "executor", "models", "native", "plugins/transformers", "transfer", "weights")
"""Folders of the code that makes a chunk's bytes, from a checkpoint's to those of a block."""


def block_tokens_of(memory: Memory, grid: int = 1) -> Mapping[Kind, int]:
    """Tokens per block of each kind; the snapshot grid is a multiple of the others' chunks, because a boundary must
    suit all groups: a snapshot inside of a chunk that is not complete is of no use below the device. It is a multiple
    of ``grid`` too.
    """
    tokens = {kind: memory.group_block_size.get(kind.value, memory.block_size) for kind in Kind}
    paged = math.lcm(*(tokens[kind] for kind in Kind if kind is not Kind.RECURRENT)) * memory.chunk_blocks
    if Kind.RECURRENT.value not in memory.group_block_size:
        tokens[Kind.RECURRENT] = paged * -(-SNAPSHOT_GRID_TOKENS_LEAST // paged)
    tokens[Kind.RECURRENT] = math.lcm(tokens[Kind.RECURRENT], grid)
    return tokens


def namespace_fields(
    loaded: Loaded, layout: ModelLayout, salt: str, writer: str, attention_name: str
) -> Mapping[str, Field]:
    """All that a chunk's bytes depend on besides its tokens (case F3); see ``docs/security.md``. ``writer``: who
    lays chunks out, and its format.
    """
    config = loaded.model.config
    groups: list[Field] = [
        {
            "kind": b.group.kind.value,
            "block_tokens": b.group.block_tokens,
            "blocks_per_chunk": b.group.blocks_per_chunk,
            "bytes_per_block": b.group.bytes_per_block,
            "window": b.group.window,
            "layers": [
                {
                    "index": layer.index,
                    "latent": layer.latent,
                    "tensors": [[str(t.dtype), list(t.shape)] for t in layer.tensors],
                    "offsets": list(b.offsets[layer.index]),
                }
                for layer in b.layers
            ],
        }
        for b in layout.blocks
    ]
    return {
        "format": [envelope.VERSION, segment.VERSION],
        "engine": writer,
        "code": f"stowage/{own_code()} transformers/{transformers.__version__}",
        "attention": attention_name,
        "weights": loaded.identity,
        "family": config.model_type,
        "compute_dtype": str(loaded.model.dtype),
        "rope": _plain(getattr(config, "rope_parameters", None)),
        "groups": groups,
        "parallel": PARALLEL,
        "adapter": ADAPTER,
        "salt": salt,
    }


@functools.cache
def own_code() -> str:
    """A digest of Stowage's version and of its Python code that computes: what another one stored may be what a defect
    made of the same weights, and the defect is mended. Compiled code has a revision of its own (``executor.kernels``).
    """
    package, digest = Path(__file__).parents[1], blake3()
    files = [path for folder in _COMPUTING for path in (package / folder).rglob("*.py")]
    for path in sorted([*package.glob("__init__.py"), *files]):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _plain(value: Any) -> Field:
    """A config value in the types that a namespace takes."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    return str(value)
