"""A Llama-like model of Transformers' as a GGUF file: names, rotation and types as llama.cpp's converter has them.

Without ``tokenizer`` it has none: who asks it gives tokens. Source: `convert_hf_to_gguf.py` of llama.cpp, and the
package `gguf`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def add_sizes(writer: Any, config: Any) -> None:
    """What a file of any family says of a decoder."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_vocab_size(config.vocab_size)


def write(model: Any, path: Path, tokenizer: Path | None = None) -> None:
    """``model`` to ``path``: matrices in its own type, bfloat16, float16 or float32, and norms in float32.
    ``tokenizer``: a tokenizer.json of byte pairs whose words go with it (OpenVINO reads no file without).
    """
    import gguf
    import torch

    config = model.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    writer = gguf.GGUFWriter(path, "llama")
    add_sizes(writer, config)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    types = {torch.float32: "ALL_F32", torch.float16: "MOSTLY_F16", torch.bfloat16: "MOSTLY_BF16"}
    writer.add_file_type(gguf.LlamaFileType[types[model.dtype]])
    if tokenizer is None:
        writer.add_tokenizer_model("none")
    else:
        _add_tokenizer(writer, tokenizer, config.vocab_size)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue  # whoever finds no `output` takes `token_embd`
        base = name.removesuffix(".weight").removeprefix("model.layers.")
        layer, _, own = base.partition(".")
        known = _NAMES.get(base) or _NAMES[own]
        values = tensor.detach()
        if known in heads:  # llama.cpp rotates neighbours, Transformers the two halves of a head
            halves = values.view(heads[known], 2, -1, values.shape[1])
            values = halves.transpose(1, 2).reshape(values.shape)
        full = f"{known}.weight" if base in _NAMES else f"blk.{layer}.{known}.weight"
        if values.dim() == 1 or values.dtype is not torch.bfloat16:
            values = values.float() if values.dim() == 1 else values
            writer.add_tensor(full, values.contiguous().numpy())
        else:
            raw = values.contiguous().view(torch.uint8).numpy()
            writer.add_tensor(full, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, path: Path, vocabulary: int) -> None:
    import gguf

    found = json.loads(path.read_text(encoding="utf-8"))
    words = [f"[unused {number}]" for number in range(vocabulary)]
    types = [gguf.TokenType.NORMAL] * vocabulary
    for word, number in found["model"]["vocab"].items():
        words[number] = word
    for added in found["added_tokens"]:
        words[added["id"]] = added["content"]
        types[added["id"]] = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types(types)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in found["model"]["merges"]])
    special = next(added["id"] for added in found["added_tokens"])
    writer.add_bos_token_id(special)
    writer.add_eos_token_id(special)
