"""A GGUF file as a checkpoint: whether it is one, its config, its tokenizer, and the model that Transformers builds.

Owns the way from a file, or a directory with one model's files, to what ``loading`` asks of any checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stowage.errors import CheckpointError
from stowage.models.gguf import config as configs
from stowage.models.gguf.stop_tokens import end_ids
from stowage.models.gguf.tensors import plan_of, rope_factors
from stowage.models.gguf.tokenizer import tokenizer_of
from stowage.models.hub import is_gguf
from stowage.models.hub_gguf import goes_with_a_model
from stowage.weights import gguf
from stowage.weights.quantized.published import Plan


@dataclass(frozen=True, slots=True)
class Gguf:
    """A GGUF file as a checkpoint. ``file``: what lies where; ``config``: Transformers'."""

    file: gguf.GgufFile
    config: Any

    @property
    def paths(self) -> list[Path]:
        return list(self.file.paths)

    @property
    def classes(self) -> list[str]:
        """What it can be loaded as."""
        return ["AutoModelForCausalLM", *self.config.architectures]

    def tokenizer(self) -> Any:
        """Raises UnsupportedModelError and CheckpointError."""
        said = self.file.fields.get(f"{self.file.architecture}.context_length")  # models of states have no such limit
        context = getattr(self.config, "max_position_embeddings", said if isinstance(said, int) else 0)
        return tokenizer_of(self.file, int(context))

    def plan(self, dtype: str) -> Plan:
        """Where its parameters lie, when it is run in ``dtype``. Raises CheckpointError, UnsupportedModelError."""
        return plan_of(self.file, self.config, getattr(torch, dtype))

    def state(self, dtype: str) -> dict[str, Any]:
        """All parameters in memory, as numbers, under Transformers' names. Raises like `plan`."""
        return dict(self.plan(dtype).dequantized(self.paths, getattr(torch, dtype)))

    def finish(self, model: Any) -> Any:
        """``model``, that knows with which tokens its answers end."""
        ends = end_ids(self.file)
        model.generation_config.update(
            bos_token_id=self.config.bos_token_id,
            eos_token_id=ends if len(ends) > 1 else next(iter(ends), None),
            pad_token_id=self.config.pad_token_id,
        )
        model.name_or_path = str(self.file.paths[0])
        return model


def file_in(path: Path) -> Path | None:
    """The GGUF file that ``path`` is or, of a directory without a checkpoint of another kind, that lies there; the
    first of several that are one model. Raises CheckpointError where there are several models.
    """
    if path.is_file():
        return path if is_gguf(path) else None
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    files = list(path.glob("*.gguf"))
    models = [found for found in files if not goes_with_a_model(found.name)] or files
    firsts = sorted({gguf.splits_of(found)[0] for found in models})
    if len(firsts) > 1:
        names = ", ".join(first.name for first in firsts[:4])
        raise CheckpointError(f"{path} holds {len(firsts)} models in GGUF files ({names}): give one of the files.")
    return firsts[0] if firsts else None


def open_gguf(path: Path) -> Gguf:
    """Raises CheckpointError for what is no whole file, UnsupportedModelError for a family that is not read."""
    file = gguf.read(path)
    return Gguf(file, configs.config_of(file, rope_factors(file)))
