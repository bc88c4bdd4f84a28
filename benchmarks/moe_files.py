"""A mixture of `benchmarks.moe_model` on disk, made wider: as such a model is published, and the same weights as a GGUF
file.

`gpt_oss`: experts in MXFP4 and everything else in bfloat16, in both files, so that both have the same values.
`deepseek_v3`: matrices in FP8 with a scale for each 128 x 128, of which llama.cpp has no kind: its file has the values
that they mean in Q8_0. Stacks are written layer by layer, as repeated bytes of the small model's.

Source of names and shapes: Transformers' models; `convert_hf_to_gguf.py` of llama.cpp, and the package `gguf`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from benchmarks import moe_model
from benchmarks.gguf_llama import add_sizes
from stowage.weights.quantized.formats import Spec, dequantized

_METHODS: Final[Mapping[str, dict[str, Any]]] = {
    "gpt_oss": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    "deepseek_v3": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}
GGUF_TYPE: Final = {"gpt_oss": "MXFP4", "deepseek_v3": "Q8_0"}
_ARCHITECTURES: Final = {"gpt_oss": gguf.MODEL_ARCH.GPT_OSS, "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2}
_NO_PROJECTION: Final = ("embed_tokens.weight", "lm_head.weight", "gate.weight", "router.weight")
_MIDDLES: Final = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
"""Between the values that 4 bits can have."""
_E4M3_LARGEST: Final = 448.0
_SIDE: Final = 128
Parts = dict[str, Tensor]


def write(small: Any, family: str, wider: int, inner: int, directory: Path) -> None:
    """The published form in ``directory``, and the GGUF file beside it; ``wider``, ``inner``: see ``moe_model``."""
    directory.mkdir(parents=True)
    config = moe_model.config(family, wider, inner)
    config.architectures, config.dtype = [type(small).__name__], torch.bfloat16
    config.quantization_config = _METHODS[family]
    config.save_pretrained(directory)
    files = _Gguf(directory.with_suffix(".gguf"), family, config)
    owners: dict[str, str] = {}
    for number, tensors in enumerate(_pieces(small, family, wider, inner, files)):
        name = f"model-{number + 1:05}-of-{moe_model.LAYERS + 1:05}.safetensors"
        save_file({key: value.contiguous() for key, value in tensors.items()}, directory / name)
        owners |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": owners}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    files.close()


def _pieces(small: Any, family: str, wider: int, inner: int, files: _Gguf) -> Iterator[Parts]:
    """The tensors of the published form, a stack of experts or everything else at a time; ``files`` has got them."""
    rest: Parts = {}
    for name, value in small.state_dict().items():
        if value.dim() == 3:
            continue
        wide = moe_model.widened(name, value.detach().float(), wider, inner)
        if family == "deepseek_v3" and wide.dim() == 2 and not name.endswith(_NO_PROJECTION):
            spec, parts = _fp8(wide)
            rest[name], rest[f"{name}_scale_inv"] = parts["codes"], parts["scales"]
            files.add(name, dequantized(spec, parts), gguf.GGMLQuantizationType.Q8_0)
        else:
            kept = torch.float32 if name.endswith("correction_bias") else torch.bfloat16
            rest[name] = wide.to(kept)
            files.add(name, rest[name])
    yield rest
    for name, module in small.named_modules():
        if name.endswith(".experts"):
            stacks = moe_model.experts_of(family, module)
            repeated = {
                part: _Stack(family, stack, *((wider, inner) if part == "down" else (inner, wider)))
                for part, stack in stacks.items()
            }
            for part, stack in repeated.items():
                files.add_stack(f"{name}.{part}_proj", stack)
            yield _published(family, name, repeated)


class _Stack:
    """Experts (experts, outputs, inputs) whose outputs and inputs are repeated, as both files have them."""

    def __init__(self, family: str, stack: Tensor, outputs: int, inputs: int) -> None:
        self.family, self.times = family, (outputs, inputs)
        self.shape = (len(stack), stack.shape[1] * outputs, stack.shape[2] * inputs)
        self.units = [self._unit(values.float() / inputs) for values in stack]

    def _unit(self, values: Tensor) -> tuple[Spec, Parts]:
        if self.family == "gpt_oss":
            return _mxfp4(values)
        return _fp8(values.repeat(_SIDE // values.shape[0], _SIDE // values.shape[1]))

    def published(self, expert: int) -> Parts:
        spec, parts = self.units[expert]
        outputs, inputs = self.shape[1] // spec.outputs, self.shape[2] // spec.inputs
        return {
            part: values.view(torch.uint8 if values.dtype.itemsize == 1 else values.dtype)
            .repeat(outputs, inputs, *(1,) * (values.dim() - 2))
            .view(values.dtype)
            for part, values in parts.items()
        }

    def raw(self, expert: int) -> NDArray[np.uint8]:
        """Rows of bytes of the type of the GGUF file."""
        spec, parts = self.units[expert]
        if self.family == "gpt_oss":
            low, high = parts["blocks"] & 15, parts["blocks"] >> 4
            codes = torch.stack([low, high], -1).flatten(-2)  # one a byte, in order
            halves = codes[..., :16] | codes[..., 16:] << 4
            row = torch.cat([parts["scales"][..., None], halves], -1).flatten(1).numpy()
        else:
            row = gguf.quants.quantize(dequantized(spec, parts).numpy(), gguf.GGMLQuantizationType.Q8_0)
        return np.tile(row, (self.shape[1] // spec.outputs, self.shape[2] // spec.inputs))


def _published(family: str, name: str, stacks: Mapping[str, _Stack]) -> Parts:
    """The tensors of one layer's experts."""
    experts = range(stacks["down"].shape[0])
    found: Parts = {}
    if family == "deepseek_v3":
        for part, stack in stacks.items():
            for expert in experts:
                own = stack.published(expert)
                found[f"{name}.{expert}.{part}_proj.weight"] = own["codes"]
                found[f"{name}.{expert}.{part}_proj.weight_scale_inv"] = own["scales"]
        return found
    for expert in experts:
        gate, up, down = (stacks[part].published(expert) for part in ("gate", "up", "down"))
        for part in ("blocks", "scales"):
            both = torch.stack([gate[part], up[part]], 1).flatten(0, 1)  # in turn
            for own, values in (("gate_up_proj", both), ("down_proj", down[part])):
                key = f"{name}.{own}_{part}"
                if key not in found:
                    found[key] = torch.empty((len(experts), *values.shape), dtype=values.dtype)
                found[key][expert] = values
    return found


def _mxfp4(values: Tensor) -> tuple[Spec, Parts]:
    outputs, inputs = values.shape
    groups = values.reshape(outputs, inputs // 32, 32)
    exponents = groups.abs().amax(-1).clamp(min=2.0**-100).log2().floor() - 2
    scaled = (groups / exponents.exp2()[..., None]).contiguous()
    codes = torch.bucketize(scaled.abs(), _MIDDLES) + 8 * (scaled < 0)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return Spec("mxfp4", outputs, inputs), {"blocks": blocks, "scales": (exponents + 127).to(torch.uint8)}


def _fp8(values: Tensor) -> tuple[Spec, Parts]:
    spec = Spec("fp8", *values.shape, _SIDE, _SIDE)
    (shape, _), scales = spec.tensors()["scales"], torch.empty(spec.tensors()["scales"][0])
    codes = torch.empty(values.shape, dtype=torch.float8_e4m3fn)
    for row in range(shape[0]):
        for column in range(shape[1]):
            at = slice(row * _SIDE, (row + 1) * _SIDE), slice(column * _SIDE, (column + 1) * _SIDE)
            scales[row, column] = values[at].abs().amax().clamp(min=1e-12) / _E4M3_LARGEST
            codes[at] = (values[at] / scales[row, column]).to(torch.float8_e4m3fn)
    return spec, {"codes": codes, "scales": scales}


class _Gguf:
    """The GGUF file. Tensors are said first, and written when all are known."""

    def __init__(self, path: Path, family: str, config: Any) -> None:
        architecture = _ARCHITECTURES[family]
        self._names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
        self._writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
        self._family, self._config, self._later = family, config, list[Any]()
        self._type = gguf.GGMLQuantizationType[GGUF_TYPE[family]]
        self._state()

    def _state(self) -> None:
        writer, config = self._writer, self._config
        add_sizes(writer, config)
        writer.add_expert_count(moe_model.EXPERTS)
        writer.add_expert_used_count(moe_model.CHOSEN)
        writer.add_tokenizer_model("none")
        if self._family == "gpt_oss":
            writer.add_head_count_kv(config.num_key_value_heads)
            writer.add_key_length(config.head_dim)
            writer.add_value_length(config.head_dim)
            writer.add_rope_dimension_count(config.head_dim)
            writer.add_sliding_window(config.sliding_window)
            writer.add_expert_feed_forward_length(config.intermediate_size)
            return
        writer.add_head_count_kv(1)  # of the latent, which all heads read
        writer.add_q_lora_rank(config.q_lora_rank)
        writer.add_kv_lora_rank(config.kv_lora_rank)
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
        writer.add_value_length_mla(config.v_head_dim)
        writer.add_rope_dimension_count(config.qk_rope_head_dim)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)

    def add(self, name: str, values: Tensor, kind: gguf.GGMLQuantizationType | None = None) -> None:
        """Of a parameter called ``name`` in the model; of ``kind``, or what its type has."""
        values = values.detach()
        if name.endswith("kv_b_proj.weight"):
            heads = values.view(self._config.num_attention_heads, -1, values.shape[1]).float()
            keys, rest = heads.split((self._config.qk_nope_head_dim, self._config.v_head_dim), 1)
            self.add(name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2), kind)
            self.add(name.replace("kv_b_proj", "v_b_proj"), rest, kind)
            return
        if name.endswith(("gate_up_proj_bias", "down_proj_bias")):
            own = {"down": values} if "down" in name else {"gate": values[:, ::2], "up": values[:, 1::2]}
            experts = name.rpartition(".")[0]
            for part, one in own.items():
                self._put(f"{self._names.get_name(f'{experts}.{part}_proj')}.bias", one.float().contiguous().numpy())
            return
        base, _, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):
            base, suffix = name.replace("_correction_bias", "_correction"), "bias" if "bias" in name else "weight"
        full = f"{self._names.get_name(base)}.{suffix}"
        if values.dim() == 1 or "ffn_gate_inp" in full:
            self._put(full, values.float().contiguous().numpy())
        elif kind is not None:
            self._put(full, gguf.quants.quantize(values.float().contiguous().numpy(), kind), kind)
        else:
            raw = values.contiguous().view(torch.uint8).numpy()
            self._put(full, raw, gguf.GGMLQuantizationType.BF16)

    def _put(self, name: str, data: NDArray[Any], kind: gguf.GGMLQuantizationType | None = None) -> None:
        self._writer.add_tensor_info(name, data.shape, data.dtype, data.nbytes, kind)
        self._later.append(lambda: data)

    def add_stack(self, name: str, stack: _Stack) -> None:
        shape = (*stack.shape[:2], stack.raw(0).shape[1])
        nbytes = shape[0] * shape[1] * shape[2]
        full = f"{self._names.get_name(name)}.weight"
        self._writer.add_tensor_info(full, shape, np.dtype(np.uint8), nbytes, self._type)
        self._later.append(lambda: np.stack([stack.raw(expert) for expert in range(shape[0])]))

    def close(self) -> None:
        """Everything is written."""
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_ti_data_to_file()
        for data in self._later:
            self._writer.write_tensor_data(data())
        self._writer.close()
