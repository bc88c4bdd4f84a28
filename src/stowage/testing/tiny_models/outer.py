"""Models that take pictures or sound besides text: tiny ones, whose text part is another family's tiny model.

Owns their rows. They are built and saved whole, by the class that checkpoints of the real ones name, so that tensors
and config fields are called what they are called there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stowage.testing.tiny_models.family import TinySize

PLACEHOLDERS = (300, 301, 302)
"""Tokens that stand for a picture, a video, and sound."""
_PATCHES = {"image_size": 28, "patch_size": 14}
_TOWER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64} | _PATCHES
_HEADED = _TOWER | {"num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 8}
_QWEN = {"depth": 1, "num_heads": 2, "intermediate_size": 64}
_QWEN2 = _QWEN | {"embed_dim": 32}
_QWEN3 = _QWEN | {"hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
_SOUND = {
    "hidden_size": 32,
    "conf_num_attention_heads": 2,
    "conf_num_hidden_layers": 1,
    "input_feat_size": 16,
    "sscp_conv_channel_size": [4, 4],
}
_HEARING = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "num_mel_bins": 8,
    "max_source_positions": 16,
}


@dataclass(frozen=True, slots=True)
class Outer:
    """One row. ``text``: the name of the family whose tiny config is that of the text part; ``changed``: fields of it
    that differ. ``others``: families that the text part may be of as well. ``around``: what the config says besides.
    ``models``: who uses it.
    """

    name: str
    model_type: str
    text: str
    models: str
    around: Callable[[TinySize], dict[str, Any]]
    changed: Callable[[TinySize], dict[str, Any]] = lambda size: {}
    others: tuple[str, ...] = ()


def _tower(**more: Any) -> Callable[[TinySize], dict[str, Any]]:
    return lambda size: {"vision_config": dict(_TOWER)} | more


def _placeholders() -> dict[str, int]:
    return dict(zip(("image_token_id", "video_token_id", "audio_token_id"), PLACEHOLDERS, strict=True))


def _gemma3n(size: TinySize) -> dict[str, Any]:
    """Its pictures go through a package of their own, so another tower takes its place (``checkpoint``)."""
    seen = {"vocab_size": 2, "vocab_offset": size.vocab}
    heard = _SOUND | {"vocab_size": 2, "vocab_offset": size.vocab + 2}
    return {"vision_config": {"hidden_size": 32} | seen, "audio_config": heard}


def _gemma4(size: TinySize) -> dict[str, Any]:
    return {"vision_config": dict(_HEADED), "audio_config": None} | _placeholders()


def _gemma4_unified(size: TinySize) -> dict[str, Any]:
    sizes = {"mm_embed_dim": size.hidden, "mm_posemb_size": 8, "output_proj_dims": size.hidden, "patch_size": 4}
    return {"vision_config": sizes} | _placeholders()


def _llama4(size: TinySize) -> dict[str, Any]:
    tower = _TOWER | {"intermediate_size": 128, "vision_output_dim": 32, "projector_input_dim": 32}
    return {"vision_config": tower | {"projector_output_dim": 32}}


def _qwen(fields: Mapping[str, Any], width: str) -> Callable[[TinySize], dict[str, Any]]:
    return lambda size: {"vision_config": {**fields, width: size.hidden}}


def _turned(kind: str, **more: Any) -> Callable[[TinySize], dict[str, Any]]:
    """A text config of type ``kind`` whose heads turn with time, height and width."""

    def changed(size: TinySize) -> dict[str, Any]:
        part = size.head_dim // 8
        rope = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [2 * part, part, part]} | more
        narrow = {"moe_intermediate_size": 3 * size.hidden // 8}  # no matrix of an expert is square
        return {"model_type": kind, "rope_parameters": rope} | narrow

    return changed


def _fuyu(size: TinySize) -> dict[str, Any]:
    """It has no tower: pictures are laid beside one another as they are."""
    return {"hidden_size": size.hidden, "vocab_size": size.vocab, "image_token_id": PLACEHOLDERS[0], "patch_size": 2}


@contextlib.contextmanager
def without_timm() -> Iterator[None]:
    """Gemma 3n sees through a model of the package timm: in here it gets a small tower that needs none."""
    from transformers import SiglipVisionConfig, SiglipVisionModel
    from transformers.models.gemma3n import modeling_gemma3n as code

    def tower(config: Any) -> Any:
        return (
            SiglipVisionModel(SiglipVisionConfig(**_TOWER)) if config.model_type == "gemma3n_vision" else whole(config)
        )

    whole = code.AutoModel.from_config
    code.AutoModel.from_config = tower
    try:
        yield
    finally:
        code.AutoModel.from_config = whole


def as_published(path: Path, row: Outer) -> None:
    """Put right where Transformers 5.17 saves other tensors than those that are published, and than it loads: names of
    Kimi-K2.5's layers; Qwen3-VL's stacked experts, which have inputs before outputs.
    """
    from safetensors.torch import load_file, save_file

    if row.model_type not in ("kimi_k25", "qwen3_vl_moe"):
        return
    tensors = load_file(path)
    if row.model_type == "kimi_k25":
        tensors = {
            n.replace("language_model.model.blocks.", "language_model.model.layers."): t for n, t in tensors.items()
        }
    else:
        tensors = {n: t.mT.contiguous() if ".experts." in n else t for n, t in tensors.items()}
    save_file(tensors, path, metadata={"format": "pt"})


OUTER: tuple[Outer, ...] = (
    Outer("gemma3_vision", "gemma3", "gemma3", "Gemma 3 4B, 12B, 27B", _tower(mm_tokens_per_image=4)),
    Outer("gemma3n_vision", "gemma3n", "gemma3n", "Gemma 3n E2B, E4B", _gemma3n),
    Outer(
        "gemma4_vision",
        "gemma4",
        "gemma4",
        "Gemma 4 E2B, E4B, 26B-A4B, 31B",
        _gemma4,
        lambda size: {"use_bidirectional_attention": "vision"},
    ),
    Outer("gemma4_unified_vision", "gemma4_unified", "gemma4_unified", "Gemma 4 12B", _gemma4_unified),
    Outer("llama4_vision", "llama4", "llama4", "Llama 4 Scout, Maverick", _llama4),
    Outer("qwen3_5_vision", "qwen3_5", "qwen3_5", "Qwen3.5, Qwen3.6 dense", _qwen(_QWEN3, "out_hidden_size")),
    Outer(
        "qwen3_5_moe_vision",
        "qwen3_5_moe",
        "qwen3_5_moe",
        "Qwen3.5, Qwen3.6 with experts",
        _qwen(_QWEN3, "out_hidden_size"),
    ),
    Outer(
        "mistral3_vision",
        "mistral3",
        "mistral",
        "Mistral Small 3.1, 3.2, 4; Ministral 3",
        _tower(spatial_merge_size=1),
        others=("ministral3", "mistral4"),
    ),
    Outer("llava", "llava", "llama", "LLaVA 1.5; Pixtral", _tower(), others=("mistral", "qwen2")),
    Outer(
        "llava_next",
        "llava_next",
        "mistral",
        "LLaVA-NeXT (1.6)",
        _tower(image_grid_pinpoints=[[28, 28]]),
        others=("llama", "qwen2"),
    ),
    Outer("llava_onevision", "llava_onevision", "qwen2", "LLaVA-OneVision", _tower(image_grid_pinpoints=[[28, 28]])),
    Outer(
        "internvl",
        "internvl",
        "qwen3",
        "InternVL 3, 3.5 (`-hf`)",
        lambda size: {"vision_config": _TOWER | {"image_size": [28, 28], "patch_size": [14, 14]}},
        others=("llama", "qwen2", "qwen3_moe", "gpt_oss"),
    ),
    Outer("idefics3", "idefics3", "llama", "Idefics 3", _tower(scale_factor=1)),
    Outer("smolvlm", "smolvlm", "llama", "SmolVLM", _tower(scale_factor=1)),
    Outer(
        "lfm2_vl",
        "lfm2_vl",
        "lfm2",
        "LFM2-VL",
        lambda size: {"vision_config": _TOWER | {"num_patches": 4}, "projector_hidden_size": 64},
        others=("lfm2_moe",),
    ),
    Outer("voxtral", "voxtral", "llama", "Voxtral", lambda size: {"audio_config": dict(_HEARING)}),
    Outer("qwen2_vl", "qwen2_vl", "qwen2", "Qwen2-VL", _qwen(_QWEN2, "hidden_size"), _turned("qwen2_vl_text")),
    Outer(
        "qwen2_5_vl",
        "qwen2_5_vl",
        "qwen2",
        "Qwen2.5-VL",
        _qwen(_QWEN | _TOWER, "out_hidden_size"),
        _turned("qwen2_5_vl_text"),
    ),
    Outer(
        "qwen3_vl",
        "qwen3_vl",
        "qwen3",
        "Qwen3-VL",
        _qwen(_QWEN3, "out_hidden_size"),
        _turned("qwen3_vl_text", mrope_interleaved=True),
    ),
    Outer(
        "qwen3_vl_moe",
        "qwen3_vl_moe",
        "qwen3_moe",
        "Qwen3-VL-30B-A3B, 235B-A22B",
        _qwen(_QWEN3, "out_hidden_size"),
        _turned("qwen3_vl_moe_text", mrope_interleaved=True),
    ),
    Outer("aria_vision", "aria", "aria", "Aria", _tower(projector_patch_to_query_dict={"4": 4})),
    Outer(
        "cohere_compass_vision", "cohere_compass", "cohere_compass", "Cohere Compass", _qwen(_QWEN3, "out_hidden_size")
    ),
    Outer("qwen4_exp_vision", "qwen4_exp", "qwen4_exp", "Qwen4 (experimental)", _qwen(_QWEN3, "out_hidden_size")),
    Outer("fuyu", "fuyu", "persimmon", "Fuyu", _fuyu),
    Outer("kimi_k25", "kimi_k25", "deepseek_v3", "Kimi-K2.5", _tower(), lambda size: {"model_type": "kimi_k2"}),
)
