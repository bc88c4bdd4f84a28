"""Tiny random models of every kind of architecture, large enough for their weights to move, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from stowage.testing import tiny_models

_BERT = {
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "vocab_size": 512,
}
_LLAMA = {**_BERT, "num_key_value_heads": 2, "max_position_embeddings": 512}
_CLIP = {
    "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
_T5 = {"d_model": 256, "d_kv": 64, "d_ff": 512, "num_layers": 3, "num_heads": 4, "vocab_size": 512}
_BART = {
    "d_model": 256, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512, "vocab_size": 512,
    "max_position_embeddings": 128,
}  # fmt: skip
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_QWEN_VISION = {
    "depth": 3, "embed_dim": 256, "num_heads": 4, "hidden_size": 256, "patch_size": 14, "spatial_merge_size": 2,
}  # fmt: skip
_QWEN_TEXT = {**_LLAMA, "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12]}}
_WAV = {
    **_BERT, "conv_dim": (256, 256), "conv_kernel": (10, 8), "conv_stride": (5, 4), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip
_PICTURE = 500

TABLE: Mapping[str, Callable[[], Any]] = {
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**_T5, **(_SPECIAL | {"decoder_start_token_id": 0}))),
    "bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(**_BART, **_SPECIAL)),
    "whisper": lambda: hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(
            **(_BART | {"vocab_size": 600}), **_SPECIAL, num_mel_bins=16, max_source_positions=32,
            max_target_positions=64, suppress_tokens=None, begin_suppress_tokens=None,
        )
    ),
    "llava": lambda: hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(
            vision_config=hf.CLIPVisionConfig(**_CLIP), text_config=hf.LlamaConfig(**_LLAMA),
            image_token_index=_PICTURE, image_seq_length=16,
        )
    ),
    "qwen2_vl": lambda: hf.Qwen2VLForConditionalGeneration(
        hf.Qwen2VLConfig(
            text_config=_QWEN_TEXT, vision_config=_QWEN_VISION, image_token_id=_PICTURE, video_token_id=501,
            vision_start_token_id=502, vision_end_token_id=503,
        )
    ),
    "gemma3": lambda: hf.Gemma3ForConditionalGeneration(
        hf.Gemma3Config(
            text_config=hf.Gemma3TextConfig(**_LLAMA, head_dim=64, sliding_window=16),
            vision_config=hf.SiglipVisionConfig(**_CLIP), mm_tokens_per_image=4, image_token_index=_PICTURE,
            boi_token_index=501, eoi_token_index=502,
        )
    ),
    "bert": lambda: hf.BertModel(hf.BertConfig(**_BERT)),
    "bert_masked": lambda: hf.BertForMaskedLM(hf.BertConfig(**_BERT)),
    "modernbert": lambda: hf.ModernBertModel(hf.ModernBertConfig(**_BERT, pad_token_id=0, reference_compile=False)),
    "classification": lambda: hf.BertForSequenceClassification(hf.BertConfig(**_BERT, num_labels=5)),
    "tokens": lambda: hf.RobertaForTokenClassification(hf.RobertaConfig(**_BERT, num_labels=7)),
    "llama_classification": lambda: hf.LlamaForSequenceClassification(
        hf.LlamaConfig(**_LLAMA, num_labels=3, pad_token_id=0)
    ),
    "embedding": lambda: hf.Qwen3Model(hf.Qwen3Config(**_LLAMA, head_dim=64)),
    "deberta": lambda: hf.DebertaV2ForSequenceClassification(
        hf.DebertaV2Config(**_BERT, relative_attention=True, pos_att_type=["p2c", "c2p"])
    ),
    "funnel": lambda: hf.FunnelModel(
        hf.FunnelConfig(d_model=256, block_sizes=[2, 1], n_head=4, d_head=64, d_inner=512, vocab_size=512)
    ),
    "perceiver": lambda: hf.PerceiverForSequenceClassification(
        hf.PerceiverConfig(
            vocab_size=512, d_model=256, d_latents=256, num_latents=128, num_self_attends_per_block=3,
            num_self_attention_heads=4, num_cross_attention_heads=4, max_position_embeddings=128,
        )
    ),
    "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**_CLIP, num_labels=5)),
    "clip": lambda: hf.CLIPModel(
        hf.CLIPConfig(text_config={**_BERT, "eos_token_id": 2}, vision_config={**_CLIP}, projection_dim=128)
    ),
    "wav2vec2": lambda: hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**_WAV)),
    "diffllama": lambda: hf.DiffLlamaForCausalLM(hf.DiffLlamaConfig(**_LLAMA)),
}  # fmt: skip


_TEXT: Mapping[str, Any] = {"max_new_tokens": 6, "do_sample": False}


def _prompted(given: Mapping[str, Any]) -> dict[str, Any]:
    return {**{key: value for key, value in given.items() if key != "decoder_input_ids"}, **_TEXT}


GENERATES: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = dict.fromkeys(
    ("t5", "bart", "whisper", "llava", "qwen2_vl", "gemma3", "diffllama"), _prompted
)
"""What ``generate`` is given, by what a forward is."""


def build(name: str) -> Any:
    torch.manual_seed(7)
    model = TABLE[name]()
    tiny_models.vary(model)
    return model.eval()


def inputs(name: str, model: Any) -> dict[str, Any]:
    """What a forward of it is given; for some, ``generate`` too."""
    ids = _ids(12)
    if name in ("t5", "bart"):
        return {"input_ids": ids, "decoder_input_ids": _ids(4, 1)}
    if name == "whisper":
        return {"input_features": _values(model, 1, 16, 64), "decoder_input_ids": _ids(4, 1)}
    if name == "wav2vec2":
        return {"input_values": _values(model, 1, 4000)}
    if name == "vit":
        return {"pixel_values": _values(model, 1, 3, 32, 32)}
    if name == "clip":
        return {"input_ids": ids, "pixel_values": _values(model, 1, 3, 32, 32)}
    if name == "qwen2_vl":
        grid = torch.tensor([[1, 4, 4]])
        shown = torch.cat([torch.tensor([[502]]), torch.full((1, 4), _PICTURE), torch.tensor([[503]]), ids], 1)
        return {
            "input_ids": shown, "pixel_values": _values(model, 16, 3 * 2 * 14 * 14), "image_grid_thw": grid,
            "mm_token_type_ids": (shown == _PICTURE).int(),
        }  # fmt: skip
    if name in ("llava", "gemma3"):
        count = 16 if name == "llava" else 4
        shown = torch.cat([torch.tensor([[1]]), torch.full((1, count), _PICTURE), ids], 1)
        kinds = {"token_type_ids": (shown == _PICTURE).int()} if name == "gemma3" else {}
        return {"input_ids": shown, "pixel_values": _values(model, 1, 3, 32, 32), **kinds}
    return {"input_ids": ids}


def _ids(length: int, seed: int = 0) -> Tensor:
    return torch.randint(5, 480, (1, length), generator=torch.Generator().manual_seed(seed))


def _values(model: Any, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(model.dtype)
