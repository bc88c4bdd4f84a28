"""Tiny models of the table's families: their configs, the models in memory, and complete checkpoints on disk."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stowage.errors import ConfigError
from stowage.models.compat import put_among_causal
from stowage.testing.tiny_models.family import TinySize
from stowage.testing.tiny_models.outer import Outer, as_published, without_timm
from stowage.testing.tiny_models.table import OUTER, REFUSED, TABLE
from stowage.testing.tiny_models.vocabulary import tokenizer


def config(family: str, size: TinySize | None = None, **overrides: Any) -> Any:
    """The Transformers config of a tiny ``family``; ``overrides`` replace single fields.

    Raises ``ConfigError`` for a family that has no builder.
    """
    from transformers import AutoConfig

    row = TABLE.get(family) or REFUSED.get(family)
    if family in OUTER:
        return outer_config(OUTER[family], size or TinySize(), overrides)
    if row is None:
        near = difflib.get_close_matches(family, [*TABLE, *OUTER], n=5, cutoff=0.0)
        raise ConfigError(
            f"no tiny model of family {family!r}; docs/reference/models.md has all. Try {', '.join(near)}."
        )
    found = AutoConfig.for_model(row.model_type, **row.fields(size or TinySize()) | overrides)
    put_among_causal(found)
    return found


def outer_config(row: Outer, size: TinySize, overrides: Mapping[str, Any]) -> Any:
    """The whole model's config. ``overrides``: of the text part, but for whether its embedding is the output layer."""
    from transformers import AutoConfig

    text = TABLE[row.text].fields(size) | row.changed(size) | dict(overrides)
    tied = {"tie_word_embeddings": text.pop("tie_word_embeddings")}
    text = {"model_type": TABLE[row.text].model_type} | text
    return AutoConfig.for_model(row.model_type, text_config=text, **row.around(size), **tied)


def build(family: str, size: TinySize | None = None, *, seed: int = 0, **overrides: Any) -> Any:
    """A tiny model of ``family`` in memory, float32, in evaluation mode."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    settings = config(family, size, **overrides)
    with torch.random.fork_rng(), without_timm():
        torch.manual_seed(seed)
        model = (AutoModelForMultimodalLM if family in OUTER else AutoModelForCausalLM).from_config(settings)
        vary(model)
    return model.eval()


_WIDE = tuple(
    "A_log dt_bias .A .D .sinks .temp position_bias gate_preact.weight igate_preact.bias proj_up_gate.weight".split()
)
_LEARNED_BUFFERS = ("e_score_correction_bias", "expert_bias", "balancing_biases", "layer_scalar")
_NOISE = 0.1


def vary(model: Any) -> None:
    """Give every weight of a new model a value that matters, from torch's generator. Transformers starts norms at one,
    biases, a router's corrections and some matrices at zero: code that left one of them out would compute the same.
    """
    import torch

    for name, parameter in model.named_parameters():
        if name.endswith(_WIDE):
            parameter.data.copy_(torch.rand_like(parameter) + 0.2)
        elif parameter.dim() == 1 or name.endswith("bias") or _constant(parameter):
            parameter.data.add_(torch.randn_like(parameter), alpha=_NOISE)
    for name, buffer in model.named_buffers():
        if name.endswith(_LEARNED_BUFFERS):
            buffer.add_(torch.rand_like(buffer), alpha=_NOISE)
        elif name.endswith(".tid2eid"):  # the experts of each token
            ranked = torch.rand(len(buffer), model.config.n_routed_experts).argsort(1)
            buffer.copy_(ranked[:, : buffer.shape[1]])


def _constant(tensor: Any) -> bool:
    return not tensor.is_meta and bool((tensor == tensor.flatten()[0]).all())


def write(
    family: str,
    directory: str | Path,
    size: TinySize | None = None,
    *,
    seed: int = 0,
    dtype: str = "float32",
    **overrides: Any,
) -> Path:
    """Write a random checkpoint of ``family`` with its tokenizer to ``directory`` (created), and return the path.

    Raises ``ConfigError`` for an unknown family or an impossible size, and for a directory that already holds files.
    """
    import torch

    path = Path(directory)
    if path.exists() and any(path.iterdir()):
        raise ConfigError(f"{path} is not empty; choose a new directory, or remove it first: rm -r {path}")
    sizes = size or TinySize()
    model = build(family, sizes, seed=seed, **overrides)
    if dtype != "float32":
        model.to(getattr(torch, dtype))
    path.mkdir(parents=True, exist_ok=True)
    model.config.dtype = getattr(torch, dtype)
    model.save_pretrained(path)
    if family in OUTER:
        as_published(path / "model.safetensors", OUTER[family])
    tokenizer(sizes.vocab).save_pretrained(path)
    for file in path.glob("*.safetensors"):  # safetensors writes for its owner alone; the config says what others may
        file.chmod((path / "config.json").stat().st_mode & 0o777)
    return path
