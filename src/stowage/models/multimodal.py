"""Checkpoints of models that take pictures or sound besides text: which text model lies in them, what its config is,
and what its tensors are called.

Owns the way from such an outer config to the text model's class. Only the text model is built, so the tensors of all
else are never loaded and are in no budget. What the outer model does with plain text decides: whether the output layer
is the embedding, the type of weights. Knows no tensor's shape and reads no file.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stowage.errors import UnsupportedModelError
from stowage.models.compat import put_among_causal
from stowage.models.families import AS_TEXT, OUTER

RENAMED: Mapping[str, str] = {
    r"^(?:model\.)?language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.(?:language|text)_model\.": "model.",
}
"""From names in outer checkpoints, older and newer ones, to those of the text model (regular expressions)."""
_NOT_TEXT = (
    r"^(?!model\.|lm_head\.)|^model\.(?:vision|visual|audio|embed_vision|embed_audio|multi_modal|mm_|connector|image_)"
)
"""Names of what else is in an outer checkpoint, after renaming: nobody needs to be told that it is not loaded."""
_PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")
_REPLACED = ("gemma4", "gemma4_unified")
"""Outer models that put another token in the place of a picture's, even where no picture is given."""
_STACKED_BY_INPUT = "qwen3_vl_moe"
"""In its files stacked experts have inputs before outputs, which the outer type's conversions know."""


@dataclass(frozen=True, slots=True)
class TextPart:
    """What a checkpoint is run as. ``config``: of the text model; ``outer``: the checkpoint's type where that is
    another one, else empty. ``placeholders``: tokens that stand for pictures or sound, which the text model does not
    know.
    """

    config: Any
    outer: str = ""
    placeholders: frozenset[int] = field(default_factory=frozenset)
    model_class: Any = None
    """The class of Transformers that loads all of it; ``None``: the causal one that goes with ``config``."""

    @property
    def renamed(self) -> Mapping[str, str] | None:
        """For ``from_pretrained``'s ``key_mapping``; ``None`` where tensors have their names already."""
        return RENAMED if self.outer else None


def text_part(config: Any) -> TextPart:
    """The text model in ``config``, which may be its own config already, or be of a type that is not run."""
    text = config.get_text_config(decoder=True)
    put_among_causal(text)
    if text is config or config.model_type not in OUTER:
        return TextPart(config, placeholders=_placeholders(config, config))
    text = _translated(copy.deepcopy(text))
    text.model_type = type(text).model_type  # Kimi-K2.5's text is a DeepseekV3Config that calls itself kimi_k2
    if text.model_type not in OUTER[config.model_type]:
        return TextPart(config)
    text.tie_word_embeddings = bool(getattr(config, "tie_word_embeddings", False))
    for name in ("dtype", "quantization_config"):
        stated = getattr(config, name, None)
        if stated is not None:
            setattr(text, name, stated)
    return TextPart(text, config.model_type, _placeholders(config, text))


def _placeholders(config: Any, text: Any) -> frozenset[int]:
    """Tokens that the outer model does not look up in the text model's tables, or that are not in all of them."""
    if config.model_type in _REPLACED:
        return frozenset(getattr(config, name) for name in _PLACEHOLDERS if getattr(config, name, None) is not None)
    if text.model_type == "gemma3n_text":
        return frozenset(range(text.vocab_size_per_layer_input, text.vocab_size))
    return frozenset()


def _translated(text: Any) -> Any:
    """``text``, or the config of the family that computes the same where Transformers has no causal model of its own
    for it: with text alone, the positions of time, height and width are one and the same.
    """
    family = AS_TEXT.get(text.model_type)
    if family is None:
        return text
    from transformers import AutoConfig

    fields = {k: v for k, v in text.to_dict().items() if k not in ("model_type", "transformers_version")}
    rope = dict(fields.get("rope_parameters") or {})
    fields["rope_parameters"] = {k: v for k, v in rope.items() if not k.startswith("mrope")}
    if family == "qwen3_moe":
        fields["norm_topk_prob"] = True  # always so in Qwen3-VL's router
    return AutoConfig.for_model(family, **fields)


def load_with(part: TextPart) -> Any:
    """What of Transformers loads ``part``: has ``from_pretrained``. Give what it makes to ``as_plain``."""
    from transformers import AutoModelForCausalLM, conversion_mapping
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if part.model_class is not None:
        return part.model_class
    if not part.outer:
        return AutoModelForCausalLM
    base = MODEL_FOR_CAUSAL_LM_MAPPING[type(part.config)]
    ignored = [*(base._keys_to_ignore_on_load_unexpected or []), _NOT_TEXT]
    own = {"__module__": base.__module__, "_keys_to_ignore_on_load_unexpected": ignored}
    conversions = conversion_mapping.get_checkpoint_conversion_mapping(part.outer)
    if part.outer != _STACKED_BY_INPUT or conversions is None:
        return type(base.__name__, (base,), own)
    name = f"{base.__name__}Of{part.outer}"  # conversions go by a class's name
    conversion_mapping.register_checkpoint_conversion_mapping(name, conversions, overwrite=True)
    return type(name, (base,), own)


def class_of(part: TextPart) -> Any:
    """The same, as the very class, which can be built of tensors without a directory."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    found = load_with(part)
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(part.config)] if found is AutoModelForCausalLM else found


def as_plain(model: Any, part: TextPart) -> Any:
    """``model`` as an object of Transformers' own class, which is saved as that class saves."""
    if part.outer:
        model.__class__ = type(model).__mro__[1]
        if hasattr(model, "_weight_conversions"):
            del model._weight_conversions  # saving would undo them
    return model


def text_model(model: Any, part: TextPart) -> Any:
    """The text model in an outer ``model`` in memory, with its tensors. Raises UnsupportedModelError."""
    kept = {tensor.data_ptr() for tensor in model.state_dict().values()}
    dtype = model.get_input_embeddings().weight.dtype
    text, report = load_with(part).from_pretrained(
        None,
        config=part.config,
        state_dict=model.state_dict(),
        key_mapping=part.renamed,
        dtype=dtype,
        output_loading_info=True,
    )
    if report["missing_keys"] or any(tensor.data_ptr() not in kept for tensor in text.state_dict().values()):
        raise UnsupportedModelError(
            f"the text model in a {type(model).__name__} in memory has its weights in another form: give the "
            "checkpoint's directory instead of the model."
        )
    text.generation_config = copy.deepcopy(model.generation_config)
    return as_plain(text, part).eval()
