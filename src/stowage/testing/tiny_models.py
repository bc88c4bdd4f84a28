"""Tiny random checkpoints, one builder per family: what tests, ``stowage tiny`` and users' own trials run on.

Owns the sizes and the tokenizer of such checkpoints. Every checkpoint is a complete Hugging Face directory (config,
safetensors, tokenizer with a chat template), so it is loaded exactly as a real one is. Weights are drawn wide
(``initializer_range=0.2``), so that the greedy tokens of the untrained model vary and flip at the slightest corruption
of its KV cache.

Never reaches for a network; the same arguments give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stowage.errors import ConfigError

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<user>", "<assistant>")
VOCAB_LEAST = 256 + len(SPECIAL_TOKENS)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<user>' if message['role'] != 'assistant' else '<assistant>' }}{{ message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True, slots=True)
class TinySize:
    """Sizes shared by all families; a family derives the rest from them."""

    hidden: int = 64
    layers: int = 4
    vocab: int = 512
    heads: int = 4
    kv_heads: int = 2
    context_tokens: int = 4096

    def __post_init__(self) -> None:
        if self.hidden <= 0 or self.hidden % (2 * self.heads):
            raise ConfigError(f"--hidden must be a positive multiple of {2 * self.heads}, not {self.hidden}")
        if self.layers < 1:
            raise ConfigError(f"--layers must be at least 1, not {self.layers}")
        if self.vocab < VOCAB_LEAST:
            raise ConfigError(
                f"--vocab must be at least {VOCAB_LEAST} (256 bytes and the special tokens), not {self.vocab}"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


def _common(size: TinySize) -> dict[str, Any]:
    return {
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "vocab_size": size.vocab,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "intermediate_size": 2 * size.hidden,
        "max_position_embeddings": size.context_tokens,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }


def _llama(size: TinySize) -> dict[str, Any]:
    return _common(size) | {"head_dim": size.head_dim}


def _qwen3(size: TinySize) -> dict[str, Any]:
    return _common(size) | {"head_dim": size.head_dim}


def _gemma3(size: TinySize) -> dict[str, Any]:
    """Two sliding layers to each full one, and a window that is no multiple of a block."""
    kinds = ["full_attention" if i % 3 == 2 else "sliding_attention" for i in range(size.layers)]
    return _common(size) | {
        "head_dim": size.head_dim,
        "query_pre_attn_scalar": size.head_dim,
        "sliding_window": 72,
        "layer_types": kinds,
    }


def _llama4(size: TinySize) -> dict[str, Any]:
    """Chunked-local layers with rope, full ones without it, temperature on the latter, experts in every second
    layer.
    """
    return _common(size) | {
        "head_dim": size.head_dim,
        "intermediate_size_mlp": 2 * size.hidden,
        "attention_chunk_size": 96,
        "no_rope_layer_interval": 2,
        "interleave_moe_layer_step": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "attn_temperature_tuning": True,
        "floor_scale": 64,
        "attn_scale": 0.1,
    }


def _deepseek_v3(size: TinySize) -> dict[str, Any]:
    return _common(size) | {
        "num_key_value_heads": size.heads,
        "q_lora_rank": size.hidden // 2,
        "kv_lora_rank": size.hidden // 2,
        "qk_nope_head_dim": size.head_dim,
        "qk_rope_head_dim": size.head_dim // 2,
        "v_head_dim": size.head_dim,
        "moe_intermediate_size": size.hidden,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }


def _qwen3_next(size: TinySize) -> dict[str, Any]:
    kinds = ["full_attention" if i % 2 else "linear_attention" for i in range(size.layers)]
    return _common(size) | {
        "head_dim": size.head_dim,
        "layer_types": kinds,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": size.head_dim,
        "linear_value_head_dim": size.head_dim,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": size.hidden,
        "shared_expert_intermediate_size": size.hidden,
        "decoder_sparse_step": 2,
    }


def _nemotron_h(size: TinySize) -> dict[str, Any]:
    pattern = ("linear_attention", "mlp", "full_attention", "linear_attention")
    return _common(size) | {
        "head_dim": size.head_dim,
        "layers_block_type": [pattern[i % 4] for i in range(size.layers)],
        "mamba_num_heads": size.heads,
        "mamba_head_dim": size.head_dim,
        "ssm_state_size": 16,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 32,
        "use_mamba_kernels": False,
    }


_CONFIGS: Mapping[str, tuple[str, Callable[[TinySize], dict[str, Any]]]] = {
    "llama": ("llama", _llama),
    "qwen3": ("qwen3", _qwen3),
    "gemma3": ("gemma3_text", _gemma3),
    "llama4": ("llama4_text", _llama4),
    "deepseek_v3": ("deepseek_v3", _deepseek_v3),
    "qwen3_next": ("qwen3_next", _qwen3_next),
    "nemotron_h": ("nemotron_h", _nemotron_h),
}
FAMILIES: tuple[str, ...] = tuple(_CONFIGS)


def config(family: str, size: TinySize | None = None, **overrides: Any) -> Any:
    """The Transformers config of a tiny ``family``; ``overrides`` replace single fields.

    Raises ``ConfigError`` for a family that has no builder.
    """
    from transformers import AutoConfig

    if family not in _CONFIGS:
        raise ConfigError(f"no tiny model of family {family!r}; choose one of: {', '.join(FAMILIES)}")
    model_type, fields = _CONFIGS[family]
    kwargs = fields(size or TinySize()) | overrides
    if "layers_block_type" in kwargs:
        kwargs.pop("num_hidden_layers")  # derived from the pattern; Transformers warns about both
    return AutoConfig.for_model(model_type, **kwargs)


def build(family: str, size: TinySize | None = None, *, seed: int = 0, **overrides: Any) -> Any:
    """A tiny model of ``family`` in memory, float32, in evaluation mode."""
    import torch
    from transformers import AutoModelForCausalLM

    settings = config(family, size, **overrides)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(settings)
        _spread(model)
    return model.eval()


def _spread(model: Any) -> None:
    """Give state-space parameters and expert biases values that matter: a model's own initialisation leaves some of
    them constant.
    """
    import torch

    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "dt_bias", ".D")):
            parameter.data.copy_(torch.rand_like(parameter) + 0.2)


def tokenizer(vocab: int) -> Any:
    """A byte-level tokenizer with exactly ``vocab`` entries, every one of which decodes to some text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = [*SPECIAL_TOKENS, *alphabet]
    letters = [c for c in alphabet if c.isascii() and c.isalpha()]
    pairs = (a + b for a in letters for b in letters)
    triples = (a + b + c for a in letters for b in letters for c in letters)
    quadruples = (a + b + c + d for a in letters for b in letters for c in letters for d in letters)
    for source in (pairs, triples, quadruples):
        while len(entries) < vocab and (entry := next(source, None)) is not None:
            entries.append(entry)
    backend = Tokenizer(models.BPE(vocab={entry: i for i, entry in enumerate(entries)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>",
        additional_special_tokens=["<user>", "<assistant>"],
    )  # fmt: skip
    fast.chat_template = CHAT_TEMPLATE
    return fast


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
    model = build(family, sizes, seed=seed, **overrides).to(getattr(torch, dtype))
    path.mkdir(parents=True, exist_ok=True)
    model.config.dtype = getattr(torch, dtype)
    model.save_pretrained(path)
    tokenizer(sizes.vocab).save_pretrained(path)
    return path
