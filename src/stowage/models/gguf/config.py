"""The config of Transformers that a GGUF file's fields describe.

Names of fields are Transformers' own tables (``integrations/ggml.py``). What those leave out is read here: scaled
rotary embeddings, sizes of heads and experts, biases, soft-capping, tied embeddings, and the tokens that end a turn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stowage.errors import CheckpointError
from stowage.models.compat import put_among_causal
from stowage.models.gguf.families import OWN, entries_of, family_of
from stowage.models.gguf.fields import head_size, lacks_size, layers_of, number, uniform, unsupported
from stowage.models.gguf.llama3 import HIGH, scaling_of
from stowage.models.gguf.refusals import refuse_other_arithmetic, refuse_other_windows
from stowage.models.gguf.stop_tokens import is_token
from stowage.weights.gguf import GgufFile

_TABLE: Final = {"gemma3_text": "gemma3", "gemma4_text": "gemma4"}
"""Of those that Transformers' tables have under another name. What they do not have is read by that of llama."""
_MORE: Final[Sequence[tuple[str, str]]] = (
    ("attention.key_length", "head_dim"),
    ("attention.layer_norm_epsilon", "layer_norm_eps"),
    ("attention.layer_norm_epsilon", "norm_eps"),
    ("attention.layer_norm_rms_epsilon", "norm_eps"),
    ("attention.scale", "attention_multiplier"),
    ("attention.sliding_window", "sliding_window"),
    ("rope.freq_base", "rope_theta"),
    ("expert_count", "num_local_experts"),
    ("expert_count", "num_experts"),
    ("expert_count", "n_routed_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
    ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
    ("expert_shared_count", "n_shared_experts"),
    ("expert_group_count", "n_group"),
    ("expert_group_used_count", "topk_group"),
    ("expert_weights_norm", "norm_topk_prob"),
    ("expert_weights_scale", "routed_scaling_factor"),
    ("expert_weights_scale", "route_scale"),
    ("expert_shared_count", "num_shared_experts"),
    ("leading_dense_block_count", "first_k_dense_replace"),
    ("leading_dense_block_count", "num_dense_layers"),
    ("shortconv.l_cache", "conv_L_cache"),
    ("attn_logit_softcapping", "attn_logit_softcapping"),
    ("final_logit_softcapping", "final_logit_softcapping"),
    ("embedding_scale", "embedding_multiplier"),
    ("residual_scale", "residual_multiplier"),
    ("logit_scale", "logits_scaling"),
    ("logit_scale", "logit_scale"),
)
"""Fields that Transformers' tables lack for some families which have them."""
_BIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "attention_bias": ("attn_q.bias", "attn_qkv.bias", "attn_output.bias"),
    "attention_out_bias": ("attn_output.bias",),
    "mlp_bias": ("ffn_up.bias",),
    "use_bias": ("attn_q.bias", "attn_qkv.bias"),
    "use_qkv_bias": ("attn_q.bias", "attn_qkv.bias"),
}
"""Tensors of some layer, since not all of a hybrid's have attention."""
_NOT_AT_ALL: Final[Mapping[str, float | None]] = {
    "attn_logit_softcapping": None,
    "embedding_scale": 1.0,
    "expert_weights_scale": 1.0,
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
}
"""What zeros in fields mean, which llama.cpp leaves out: numbers that change nothing."""
_LOCAL_THETA: Final = 10000.0
_TWO_ROPES: Final = {
    "gemma3_text": _LOCAL_THETA,
    "gemma3n_text": _LOCAL_THETA,
    "mimo_v2_flash": _LOCAL_THETA,
    "olmo3": 0.0,
}
"""Families whose window layers rotate otherwise, without scaling, and their base where no field says it; 0: equal."""
_TEMPERATURE: Final = 0.1
"""Of Mistral Small 4, whose files may not say it."""
_STANDING: Final = 1e20
_UNSCALED: Final = ("gemma4", "glm-dsa")
"""Families of whose rotary embeddings no scaling is read."""
_INTERLEAVED: Final = (
    *("arcee", "granite", "granitehybrid", "granitemoe", "internlm2", "llama", "minicpm", "mistral3", "nemotron_h"),
    *("nemotron_h_moe", "smollm3"),
)
"""Families whose heads' rotated halves are interleaved in files, and are not in Transformers."""
_PARTLY: Final = (
    *("glm4", "glm4_moe", "mimo_v2_flash", "nemotron", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "stablelm"),
)
"""Types of models whose configs take it that a part of each head is rotated where they are told nothing."""


def config_of(file: GgufFile, rope_factors: Mapping[str, NDArray[np.float32]]) -> Any:
    """What ``AutoConfig`` would have been. ``rope_factors``: the tensors of that kind which there are.

    Raises UnsupportedModelError for a family or a way of scaling that is not read, CheckpointError for fields that are
    missing or make no sense.
    """
    family = family_of(file)
    if family is None:
        name = file.architecture[:80] or "(none)"
        raise unsupported(
            file, f"is of the family {name}, which is not read from GGUF (docs/weights.md lists those that are)"
        )
    if (layers := number(file, "block_count")) > len(file.tensors):  # before a list of so many is made
        raise CheckpointError(f"{file.paths[0]} is said to have {layers} layers, and has {len(file.tensors)} tensors.")
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[family]
    try:
        entries = _entries(file, family, config_class)
        entries |= _rope(file, family, entries, rope_factors)
        config = config_class(**entries)
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, StrictDataclassError) as error:
        raise CheckpointError(f"{file.paths[0]} describes no {family}: {' '.join(str(error).split())[:200]}") from error
    refuse_other_windows(file, config)
    put_among_causal(config)
    config.architectures = [_class_of(family)]
    return config


def _class_of(family: str) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
    return name if isinstance(name, str) else name[0]


def _entries(file: GgufFile, family: str, config_class: Any) -> dict[str, Any]:
    from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING

    table = _TABLE.get(family, family)
    heads = number(file, "attention.head_count")
    own = {key: name for key, name in GGUF_CONFIG_MAPPING.get(table, GGUF_CONFIG_MAPPING["llama"]).items() if name}
    names = [*own.items(), *_MORE]
    known = {*getattr(config_class, "__dataclass_fields__", ()), "rope_theta"}
    refuse_other_arithmetic(file, family, known)
    entries: dict[str, Any] = dict(GGUF_CONFIG_DEFAULTS_MAPPING.get(table, {}))
    for key, name in names:
        value = file.fields.get(f"{file.architecture}.{key}")
        if isinstance(value, float) and not math.isfinite(value):
            raise CheckpointError(f"{file.paths[0]} says {key} = {value}; download it again.")
        if value is not None and name in known:
            entries[name] = value if family in OWN else uniform(value)
        if value == 0.0 and key in _NOT_AT_ALL and name in known:
            entries[name] = _NOT_AT_ALL[key]
    biases = {name.split(".", 2)[-1] for name in file.tensors if name.endswith(".bias")}
    entries |= {name: not biases.isdisjoint(ends) for name, ends in _BIASES.items() if name in known}
    wide = number(file, "attention.key_length") not in (0, number(file, "embedding_length") // max(heads, 1))
    if (table not in GGUF_CONFIG_MAPPING and "head_dim" in known) or (wide and not _has_latents(file)):
        entries["head_dim"] = head_size(file)  # models ask for it whose configs do not name it, as Qwen3's mixtures
    if number(file, "expert_count") and not number(file, "expert_used_count"):
        raise lacks_size(file, "how many experts a token chooses")
    entries["num_hidden_layers"] = layers_of(file)
    entries |= entries_of(file, family, entries)
    entries |= _partial(file)
    if entries.get("sliding_window") == 0:  # so Phi-4 says that it has none
        entries["sliding_window"] = None
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{file.paths[0]} has no token_embd.weight: it is no whole language model.")
    entries["vocab_size"], entries["hidden_size"] = embedding.shape
    first = number(file, "rope.scaling.original_context_length")
    if first and "original_max_position_embeddings" in known:  # else its default would be taken for that of rotations
        entries["original_max_position_embeddings"] = first
    entries["tie_word_embeddings"] = "output.weight" not in file.tensors
    for name in ("bos", "eos", "padding"):
        value = file.fields.get(f"tokenizer.ggml.{name}_token_id")
        entries[f"{name[:3]}_token_id"] = value if is_token(value, embedding.shape[0]) else None
    floats = all(t.type.name == "F32" for t in file.tensors.values() if len(t.shape) > 1)
    return {**entries, "dtype": "float32" if floats else "bfloat16"}


def _partial(file: GgufFile) -> dict[str, Any]:
    """Of each head's numbers, which part is rotated."""
    rotated, size = number(file, "rope.dimension_count"), head_size(file)
    return {"partial_rotary_factor": rotated / size} if rotated and size and not _has_latents(file) else {}


def _has_latents(file: GgufFile) -> bool:
    """Whether what is rotated of a head stands apart from the rest of it."""
    return f"{file.architecture}.attention.kv_lora_rank" in file.fields


def _rope(
    file: GgufFile, family: str, entries: dict[str, Any], factors: Mapping[str, NDArray[np.float32]]
) -> dict[str, Any]:
    """Rotary embeddings: ``rope_parameters``, with what ``entries`` says of them taken out of there."""
    theta, partial = entries.pop("rope_theta", 10000.0), entries.pop("partial_rotary_factor", None)
    rope = {"rope_theta": theta, **_scaling(file)}
    if factors and rope["rope_type"] != "default":
        how = f"scales its rotary embeddings in the way {rope['rope_type']!r} and by a list of factors too"
        raise unsupported(file, f"{how}, which is not read from GGUF")
    if "rope_factors_short" in factors or "rope_factors_long" in factors:
        rope |= _longrope(file, family, factors)
    if family == "gemma4_text":
        return {"rope_parameters": _proportional(file, theta, factors.get("rope_freqs"))}
    if family == "hunyuan_v1_dense" and (alpha := file.fields.get(f"{file.architecture}.rope.scaling.alpha", 0.0)) > 0:
        rope["rope_theta"] = theta * alpha ** (head_size(file) / (head_size(file) - 2))
    if "rope_freqs" in factors:
        rope |= _llama3(file, factors["rope_freqs"], theta, 1.0 if family == "llama4_text" else HIGH)
    if (partial is not None and partial != 1) or family in _PARTLY:
        rope["partial_rotary_factor"] = 1.0 if partial is None else partial
    if family in _TWO_ROPES:
        local = file.fields.get(f"{file.architecture}.rope.freq_base_swa", _TWO_ROPES[family] or theta)
        sliding = (
            rope | {"rope_type": "default", "rope_theta": local}
            if family == "mimo_v2_flash"
            else {"rope_type": "default", "rope_theta": local}
        )
        return {"rope_parameters": {"full_attention": rope, "sliding_attention": sliding}}
    return {"rope_parameters": rope}


def _longrope(file: GgufFile, family: str, factors: Mapping[str, NDArray[np.float32]]) -> dict[str, Any]:
    """Of Phi: one list of factors up to the length that it was first trained with, and another beyond. MiniCPM 3 was
    first trained with all of its length.
    """
    context, own = number(file, "context_length"), number(file, "rope.scaling.original_context_length")
    first = own or (context if family == "minicpm3" else 0)
    if family not in ("minicpm3", "phi3") or len(factors) < 2 or not first:
        how = "scales its rotary embeddings by two lists of factors (longrope)"
        raise unsupported(file, f"{how}, which is read from GGUF of phi3 and minicpm3 only")
    lists = {
        f"{name}_factor": [float(str(one)) for one in factors[f"rope_factors_{name}"]] for name in ("short", "long")
    }
    found = {"rope_type": "longrope", "original_max_position_embeddings": first, **lists}
    if family == "minicpm3":
        found["factor"] = 1.0
    times = file.fields.get(f"{file.architecture}.rope.scaling.attn_factor", 1.0)
    longer = context / first if family == "phi3" else 1.0
    if not math.isclose(times, math.sqrt(1 + math.log(max(longer, 1.0)) / math.log(first)), rel_tol=1e-5):
        found["attention_factor"] = times  # else as Transformers makes it of lengths, which a file has rounded
    return found


def _proportional(file: GgufFile, theta: float, factors: NDArray[np.float32] | None) -> dict[str, Any]:
    """Of Gemma 4: in layers without a window the first frequencies are rotated, and the others divided by so much that
    they stand still.
    """
    rotated, size = number(file, "rope.dimension_count"), number(file, "attention.key_length")
    if rotated not in (0, size):
        raise lacks_size(file, "that its heads are rotated as a whole")
    partial = 1.0 if factors is None else float((factors < _STANDING).mean())
    full = {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": partial}
    local = file.fields.get("gemma4.rope.freq_base_swa", _LOCAL_THETA)
    return {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": local}}


def _scaling(file: GgufFile) -> dict[str, Any]:
    said = {
        key.removeprefix(f"{file.architecture}.rope.scaling."): value
        for key, value in file.fields.items()
        if key.startswith(f"{file.architecture}.rope.scaling.")
    }
    factor = said.get("factor", file.fields.get(f"{file.architecture}.rope.scale_linear", 0.0))  # so older files say it
    kind = said.get("type", "linear")
    by_lists = kind == "longrope" and "rope_factors_long.weight" in file.tensors
    if kind == "none" or ((kind == "linear" or by_lists) and factor in (0, 1)):
        return {"rope_type": "default"}
    positive = isinstance(factor, int | float) and factor > 0 and (kind != "yarn" or factor >= 1)
    if kind not in ("linear", "yarn") or not positive or file.architecture in _UNSCALED:
        how = f"scales its rotary embeddings in the way {str(kind)[:40]!r}"
        raise unsupported(file, f"{how}, which is not read from GGUF")
    found = {"rope_type": kind, "factor": float(factor)}
    names = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
    if kind == "yarn":
        names["original_context_length"] = "original_max_position_embeddings"
        found |= {name: said[key] for key, name in names.items() if key in said}
        if (times := said.get("attn_factor", 1.0)) != 1.0:  # of what the factor alone makes of it
            found["attention_factor"] = times * (1 + 0.1 * math.log(max(factor, 1.0)))
        if (whole := said.get("yarn_attn_factor")) is not None:  # Transformers' number as it is
            found["attention_factor"] = whole
    if file.architecture in ("deepseek2", "mistral4") and (said_twice := said.get("yarn_log_multiplier")) is not None:
        found |= dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * said_twice, 4))
    if file.architecture == "mistral3":
        found |= {"mscale": 1.0, "mscale_all_dim": said.get("yarn_log_multiplier", 0.0)}
        found["llama_4_scaling_beta"] = file.fields.get("mistral3.attention.temperature_scale", 0.0)
    scaled = file.fields.get(f"{file.architecture}.attention.temperature_scale")
    if file.architecture == "mistral4" or (file.architecture == "deepseek2" and scaled is not None):
        found["llama_4_scaling_beta"] = _TEMPERATURE if scaled is None else scaled
    if file.architecture == "gpt-oss":
        found["truncate"] = False  # what no field says
    return found


def _llama3(file: GgufFile, factors: NDArray[np.float32], theta: float, high: float) -> dict[str, Any]:
    found = scaling_of(factors, theta, high)
    if found is None:
        raise unsupported(file, "scales its rotary embeddings by factors that are not Llama 3's (rope_freqs.weight)")
    return found


def heads_of(file: GgufFile, config: Any) -> Mapping[str, int]:
    """By part of a tensor's name: the heads whose rotated halves are interleaved in the file's rows, as llama.cpp wants
    them, where Transformers has one half after the other.
    """
    if file.architecture not in _INTERLEAVED:
        return {}
    return {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
