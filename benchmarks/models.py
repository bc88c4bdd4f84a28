"""The models that benchmarks run: random weights of a real size, built once and kept in memory."""

from __future__ import annotations

from typing import Any

VOCAB = 32_000
SMALL_CONTEXT_TOKENS = 2048


def native_dtype() -> str:
    """``bfloat16`` where the processor has instructions for it, else ``float32``."""
    import torch

    return "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"


def half_billion(dtype: str, context_tokens: int = 8192) -> Any:
    """A Llama-like model of 0.48 B parameters: 24 layers, hidden 1,024, 16 heads over 4 KV heads."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama",
        hidden_size=1024,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=VOCAB,
        max_position_embeddings=context_tokens,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


def half_billion_bytes_per_token(dtype: str) -> int:
    """Of keys and values: 24 layers, 4 KV heads of 64."""
    return 24 * 2 * 4 * 64 * (2 if dtype == "bfloat16" else 4)


def small(dtype: str) -> Any:
    """A Llama-like model of 0.04 B parameters: 8 layers, hidden 512, 8 heads over 2 KV heads."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama",
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=VOCAB,
        max_position_embeddings=SMALL_CONTEXT_TOKENS,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


def small_bytes_per_token(dtype: str) -> int:
    """Of keys and values: 8 layers, 2 KV heads of 64."""
    return 8 * 2 * 2 * 64 * (2 if dtype == "bfloat16" else 4)


def random_tokens(count: int, seed: int) -> list[int]:
    """``count`` token ids, the same for the same seed."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(5, VOCAB, (count,), generator=generator).tolist()
    return tokens
