"""Fields of a file that change what is computed, and that a family's config has no place for: the file is refused.

Names of fields are llama.cpp's (``gguf-py/gguf/constants.py``). What says the same as nothing is borne.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from stowage.errors import UnsupportedModelError
from stowage.models.gguf.fields import head_size, number, unsupported
from stowage.models.gguf.mixtures import SIGMOID
from stowage.models.gguf.windows import kinds_of
from stowage.weights.gguf import GgufFile

_NEVER_READ: Final[Mapping[str, tuple[Any, ...]]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.indexer.block_size": (0,),
    "attention.indexer.kpool": (0, 1),
    "attention.max_alibi_bias": (0.0,),
    "attention.output_scale": (0.0, 1.0),
    "kda.gate_lower_bound": (0.0,),
    "kda.safe_gate": (False,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "router_logit_softcapping": (0.0,),
    "swiglu_clamp_exp": (0.0,),
    "swiglu_clamp_shexp": (0.0,),
}
"""Fields that no config is made of, with the values that change nothing."""
_READ_BY_SOME: Final = {
    "attention.scale": ("attention_multiplier",),
    "attention.value_scale": ("attention_value_scale",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "embedding_scale": ("embedding_multiplier",),
    "expert_group_count": ("n_group", "num_expert_group"),
    "expert_weights_scale": ("routed_scaling_factor", "route_scale"),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "residual_scale": ("residual_multiplier",),
}
_SCALED_BY_PLACE: Final = ("ministral3", "mistral4")
"""Types of models whose queries are scaled by where they stand."""
_WINDOWLESS: Final = ("lfm2", "lfm2moe")
"""Families that may have a window, of which Transformers' models have none."""
_OWN_WINDOW: Final = ("gemma2",)
"""Families that have a window of one size where a file does not say it."""
_ONE_BASE: Final = ("afmoe", "llama4")
"""Families of which only layers with a window are rotated, by the one base that their config has."""
_BY_SOFTMAX: Final = (0, 1, 3)
_BY_SIGMOID: Final = (
    *("afmoe", "bailingmoe2", "deepseek2", "dots1", "exaone-moe", "glm-dsa", "glm4moe", "kimi-linear"),
    *("lfm2moe", "llama4", "mimo2", "minimax-m2", "nemotron_h_moe"),
)
"""Families whose routers may score by sigmoid: they are computed so, or refuse another way themselves."""
_NEVER_BY_SOFTMAX: Final = ("lfm2moe", "minimax-m2", "nemotron_h_moe")
"""Those of them that say nothing more of their routers."""


def refuse_other_arithmetic(file: GgufFile, family: str, known: Collection[str]) -> None:
    """``known``: what the config of its family names. Raises UnsupportedModelError."""
    for key, harmless in _NEVER_READ.items():
        value = file.fields.get(f"{file.architecture}.{key}")
        each = value if isinstance(value, list) else [value]
        if any(one is not None and one not in harmless for one in each):
            raise _unread(file, key, value)
    for key, names in _READ_BY_SOME.items():
        value = file.fields.get(f"{file.architecture}.{key}")
        if value not in (None, 0.0, 1.0) and not any(name in known for name in names):
            raise _unread(file, key, value)
    scaled = file.fields.get(f"{file.architecture}.attention.temperature_scale")
    by_yarn = file.fields.get(f"{file.architecture}.rope.scaling.type") == "yarn"
    if scaled not in (None, 0.0) and (family not in _SCALED_BY_PLACE or not by_yarn):
        raise _unread(file, "attention.temperature_scale", scaled)
    times, whole = (file.fields.get(f"{file.architecture}.rope.scaling.{part}attn_factor") for part in ("", "yarn_"))
    if times not in (None, 1.0) and (whole is not None or not _reads_times(file)):
        raise _unread(file, "rope.scaling.attn_factor", times)
    if whole not in (None, 1.0) and not by_yarn:
        raise _unread(file, "rope.scaling.yarn_attn_factor", whole)
    base, local = (file.fields.get(f"{file.architecture}.rope.freq_base{end}") for end in ("", "_swa"))
    if local not in (None, base) and file.architecture in _ONE_BASE:
        raise _unread(file, "rope.freq_base_swa", local)
    if (window := number(file, "attention.sliding_window")) and file.architecture in _WINDOWLESS:
        raise _unread(file, "attention.sliding_window", window)
    if any(file.fields.get("glm4.rope.dimension_sections") or ()):  # the rows of its heads lie in another order
        raise _unread(file, "rope.dimension_sections", "a list")
    if file.fields.get("granite.rope.scaling.finetuned") is False:  # so it says that nothing is rotated
        raise _unread(file, "rope.scaling.finetuned", False)
    scored = file.fields.get(f"{file.architecture}.expert_gating_func", 0)
    if file.architecture in _NEVER_BY_SOFTMAX:
        read = scored in (0, SIGMOID)
    else:
        read = scored in _BY_SOFTMAX or (scored == SIGMOID and file.architecture in _BY_SIGMOID)
    if not read:
        raise _unread(file, "expert_gating_func", scored)


def _reads_times(file: GgufFile) -> bool:
    """Whether a factor of rotated queries and keys is read: with two lists of factors it follows from lengths, and YaRN
    has it where it is not said in the way of DeepSeek too. With two kinds of rotation it is that of both.
    """
    scaling = f"{file.architecture}.rope.scaling"
    by_yarn = file.fields.get(f"{scaling}.type") == "yarn" and f"{scaling}.yarn_log_multiplier" not in file.fields
    by_yarn = by_yarn and file.architecture not in ("gemma3", "gemma3n", "mimo2")
    return by_yarn or "rope_factors_long.weight" in file.tensors


def refuse_other_rotation(file: GgufFile, model: Any) -> None:
    """``model``, built of the file's config, rotates as much of each head as it says: most families' all of it,
    whatever a config says. Raises UnsupportedModelError.
    """
    found = {2 * len(own) for name, own in model.named_buffers() if name.endswith("inv_freq")}
    if not found or f"{file.architecture}.attention.kv_lora_rank" in file.fields:
        return
    for key in ("rope.dimension_count", "rope.dimension_count_swa"):
        rotated = number(file, key)
        if rotated and (rotated not in found or rotated > head_size(file)):
            raise _unread(file, key, rotated)


def refuse_other_windows(file: GgufFile, config: Any) -> None:
    """Where a file says layer by layer which have a window, ``config`` has the same. One number says it of models that
    have windows. Raises UnsupportedModelError.
    """
    kinds, ours = kinds_of(file), list(getattr(config, "layer_types", None) or ())
    unsaid = not number(file, "attention.sliding_window") and file.architecture not in _OWN_WINDOW
    if "sliding_attention" in ours and (unsaid or not config.sliding_window):
        raise _unread(file, "attention.sliding_window", 0)
    if kinds is None or kinds == ours or (not ours and "sliding_attention" not in kinds):
        return
    said = file.fields[f"{file.architecture}.attention.sliding_window_pattern"]
    if isinstance(said, list) or "sliding_attention" in ours:
        raise _unread(file, "attention.sliding_window_pattern", "a list" if isinstance(said, list) else said)


def _unread(file: GgufFile, key: str, value: Any) -> UnsupportedModelError:
    family = f"GGUF of the family {file.architecture}"
    return unsupported(file, f"says {key} = {str(value)[:40]}, which is not computed from {family}")
