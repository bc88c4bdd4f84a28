"""The models that benchmarks run: random weights of a real size, built once and kept in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 32_000
SMALL_CONTEXT_TOKENS = 2048
_HALF_BILLION: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


def native_dtype() -> str:
    """``bfloat16`` where the processor has instructions for it, else ``float32``."""
    import torch

    return "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"


def half_billion(dtype: str, context_tokens: int = 8192) -> Any:
    """A Llama-like model of 0.48 B parameters: 24 layers, hidden 1,024, 16 heads over 4 KV heads."""
    return _build("llama", dtype, **_HALF_BILLION | {"max_position_embeddings": context_tokens})


def from_checkpoint(directory: Path, dtype: str) -> Any:
    """The model that lies in ``directory``."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))


def half_billion_windowed(dtype: str) -> Any:
    """The same size as Gemma-3 has its layers: five with a window of 512 tokens to each with full attention."""
    return _build(
        "gemma3_text",
        dtype,
        **_HALF_BILLION,
        sliding_window=512,
        query_pre_attn_scalar=64,
        layer_types=["full_attention" if at % 6 == 5 else "sliding_attention" for at in range(24)],
    )


def half_billion_recurrent(dtype: str) -> Any:
    """The same size as Qwen3-Next has its layers, without experts: three with a delta rule to each with attention."""
    return _build(
        "qwen3_next",
        dtype,
        **_HALF_BILLION,
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        mlp_only_layers=list(range(24)),
        num_experts=4,
        layer_types=["full_attention" if at % 4 == 3 else "linear_attention" for at in range(24)],
    )


def half_billion_state_space(dtype: str) -> Any:
    """The same size as Bamba and Granite-4 have their layers: three of Mamba-2 to each with attention."""
    return _build(
        "bamba",
        dtype,
        **_HALF_BILLION,
        mamba_n_heads=32,
        mamba_d_head=64,
        mamba_n_groups=1,
        mamba_d_state=128,
        mamba_expand=2,
        attn_layer_indices=[at for at in range(24) if at % 4 == 3],
    )


def half_billion_bytes_per_token(dtype: str) -> int:
    """Of keys and values: 24 layers, 4 KV heads of 64."""
    return 24 * 2 * 4 * 64 * (2 if dtype == "bfloat16" else 4)


def small(dtype: str, context_tokens: int = SMALL_CONTEXT_TOKENS) -> Any:
    """A Llama-like model of 0.04 B parameters: 8 layers, hidden 512, 8 heads over 2 KV heads."""
    return _build(
        "llama",
        dtype,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=context_tokens,
        tie_word_embeddings=True,
    )


def small_bytes_per_token(dtype: str) -> int:
    """Of keys and values: 8 layers, 2 KV heads of 64."""
    return 8 * 2 * 2 * 64 * (2 if dtype == "bfloat16" else 4)


def random_tokens(count: int, seed: int) -> list[int]:
    """``count`` token ids, the same for the same seed."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(5, VOCAB, (count,), generator=generator).tolist()
    return tokens


def _build(family: str, dtype: str, **fields: Any) -> Any:
    """Heads of 64; the same weights for the same fields."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, head_dim=64, vocab_size=VOCAB, **fields)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
