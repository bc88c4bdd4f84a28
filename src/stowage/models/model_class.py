"""Which Transformers class `stowage.offload` loads a checkpoint as: the one that the caller or config.json names.

Example: a T5 checkpoint becomes a whole `T5ForConditionalGeneration`, encoder included; an engine would refuse it
(``layout``). Owns the choice of the class, and the inputs of a few tokens that show whether its modules get their
weights.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from stowage.errors import CheckpointError, ConfigError
from stowage.models.multimodal import TextPart, text_part

_TEXT = "AutoModelForCausalLM"


def whole_part(directory: Path, config: Any, model_class: Any) -> TextPart:
    """What the checkpoint in ``directory`` is loaded as: ``model_class`` (a class of Transformers, or its name), else
    the class that its config.json names. ``AutoModelForCausalLM``: the text model alone. Raises ConfigError for what is
    no such class, CheckpointError where config.json names none that Transformers has.
    """
    named = model_class if model_class is not None else _architecture(directory, config)
    found = _class_of(named) if isinstance(named, str) else named
    if not callable(getattr(found, "from_pretrained", None)):
        raise ConfigError(
            f"model_class={named!r} is no class of Transformers: give one, such as T5ForConditionalGeneration or "
            "AutoModelForSequenceClassification, or its name."
        )
    if found.__name__ == _TEXT:
        return text_part(config)
    return TextPart(config, model_class=found)


def _class_of(name: str) -> Any:
    import transformers

    return getattr(transformers, name, None)


def _architecture(directory: Path, config: Any) -> str:
    """The first class in config.json that Transformers has. A config without any is a causal model's."""
    try:
        stated = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("architectures") or []
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{directory / 'config.json'} cannot be read: {error}") from error
    known = [name for name in stated if isinstance(name, str) and hasattr(_class_of(name), "from_pretrained")]
    if stated and not known:
        raise CheckpointError(
            f"{directory} is a {stated[0]}, and Transformers has no such class, or it comes with code of its own, "
            "which is not run. Give the class that reads it: stowage.offload(DIR, model_class=...)."
        )
    return known[0] if known and not _is_causal(known[0], config) else _TEXT


def _is_causal(name: str, config: Any) -> bool:
    """A text model that Transformers' mapping gives for that config: the same class, found as before."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    text = text_part(config)
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text.config), None) if not text.outer else None
    return getattr(found, "__name__", "") == name


def towers(model: Any) -> list[Any]:
    """The models in ``model`` that take pictures or sound, which a forward of text alone does not reach."""
    from transformers import PreTrainedModel

    if getattr(model, "main_input_name", "") != "input_ids":
        return []
    inner = [module for module in model.modules() if isinstance(module, PreTrainedModel) and module is not model]
    return [module for module in inner if module.main_input_name != "input_ids"]


def trial_inputs(model: Any, tokens: int) -> Mapping[str, Any] | None:
    """Inputs of a few ``tokens`` for a forward of ``model``; ``None`` where its main input is none that is known."""
    config, main = model.config, getattr(model, "main_input_name", "input_ids")
    taken = inspect.signature(type(model).forward).parameters
    ids = torch.arange(tokens, device=model.device)[None]
    inputs: dict[str, Any] = {}
    if main == "input_ids":
        inputs["input_ids"] = ids
    elif main == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size, channels = getattr(vision, "image_size", None), getattr(vision, "num_channels", None)
        if size is None or channels is None:
            return None
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        inputs[main] = torch.zeros(1, channels, height, width, dtype=model.dtype, device=model.device)
    elif main == "input_features" and hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        shape = 1, config.num_mel_bins, 2 * config.max_source_positions
        inputs[main] = torch.zeros(*shape, dtype=model.dtype, device=model.device)
    elif main == "input_values":
        inputs[main] = torch.zeros(1, 4000, dtype=model.dtype, device=model.device)
    else:
        return None
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in taken:
        inputs["decoder_input_ids"] = ids
    if "use_cache" in taken:
        inputs["use_cache"] = False
    return inputs
