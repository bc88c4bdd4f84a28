"""Families that the engine refuses, for what its probe finds in them or for what Transformers does with them;
``engine.families`` says it in a user's words.
"""

from __future__ import annotations

from typing import Any

from stowage.testing.tiny_models.family import Family, TinySize, common
from stowage.testing.tiny_models.full import decoder


def _big_bird(size: TinySize) -> dict[str, Any]:
    return decoder(size) | {"attention_type": "original_full"}


def _cpmant(size: TinySize) -> dict[str, Any]:
    return common(size) | {"dim_head": size.head_dim, "dim_ff": size.hidden, "prompt_length": 4}


def _reformer(size: TinySize) -> dict[str, Any]:
    return decoder(size) | {
        "attn_layers": size.pattern("local", "lsh"),
        "axial_pos_embds": False,
        "num_buckets": 4,
        "feed_forward_size": size.hidden,
        "attention_head_size": size.head_dim,
    }


def _rembert(size: TinySize) -> dict[str, Any]:
    return decoder(size) | {"input_embedding_size": 32, "output_embedding_size": 32}


def _xlm(size: TinySize) -> dict[str, Any]:
    return common(size) | {"causal": True}


def _xlnet(size: TinySize) -> dict[str, Any]:
    """Its sequences have no limit."""
    fields = common(size) | {"d_head": size.head_dim, "d_inner": size.hidden}
    del fields["max_position_embeddings"]
    return fields


_ITSELF = "computes attention by itself"

REFUSED: tuple[Family, ...] = (
    Family("big_bird", "big_bird", _big_bird, "BigBird as a decoder", refused=_ITSELF),
    Family("cpmant", "cpmant", _cpmant, "CPM-Ant", refused=_ITSELF),
    Family("megatron_bert", "megatron-bert", decoder, "Megatron-BERT as a decoder", refused=_ITSELF),
    Family("rembert", "rembert", _rembert, "RemBERT as a decoder", refused=_ITSELF),
    Family("roformer", "roformer", decoder, "RoFormer as a decoder", refused=_ITSELF),
    Family("xlnet", "xlnet", _xlnet, "XLNet", refused=_ITSELF),
    Family("camembert", "camembert", decoder, "CamemBERT as a decoder"),
    Family("data2vec_text", "data2vec-text", decoder, "data2vec as a decoder"),
    Family("roberta", "roberta", decoder, "RoBERTa as a decoder"),
    Family("roberta_prelayernorm", "roberta-prelayernorm", decoder, "the same, normed before its layers"),
    Family("xlm_roberta", "xlm-roberta", decoder, "XLM-RoBERTa as a decoder"),
    Family("xlm_roberta_xl", "xlm-roberta-xl", decoder, "XLM-RoBERTa XL as a decoder"),
    Family("xmod", "xmod", lambda size: decoder(size) | {"default_language": "en_XX"}, "X-MOD as a decoder"),
    Family("openai_gpt", "openai-gpt", common, "GPT-1", refused=_ITSELF),
    Family("xlm", "xlm", _xlm, "XLM", refused=_ITSELF),
    Family("reformer", "reformer", _reformer, "Reformer", refused=_ITSELF),
)
