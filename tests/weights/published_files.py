"""Tiny checkpoints as the tools write them that publish quantised models, and the same values as plain bfloat16."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stowage.testing import tiny_models

Written = tuple[dict[str, Tensor], Tensor]
"""Tensors by what is put behind the name of a layer, and the values that they mean, in float32."""
SIZE = tiny_models.TinySize(hidden=256, layers=2)
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def packed(codes: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight codes along ``dim`` in a word: code ``order[i]`` of them in nibble ``i``."""
    eights = codes.to(torch.int64).movedim(dim, -1).unflatten(-1, (-1, 8))
    word = torch.stack([eights[..., code] << (4 * nibble) for nibble, code in enumerate(order)]).sum(0)
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32).movedim(-1, dim).contiguous()


def fp8(
    block_rows: int, group: int, scale_name: str, scale_dtype: torch.dtype = torch.float32
) -> Callable[[Tensor], Written]:
    """0: all outputs, or inputs, share a scale."""

    def write(values: Tensor) -> Written:
        n, k = values.shape
        high, wide = block_rows or n, group or k
        padded = torch.nn.functional.pad(values, (0, -k % wide, 0, -n % high))
        blocks = padded.view(-(-n // high), high, -(-k // wide), wide)
        scales = (blocks.abs().amax((1, 3)) / 448).to(scale_dtype)
        whole = scales.float().repeat_interleave(high, 0).repeat_interleave(wide, 1)[:n, :k]
        codes = (values / whole).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored = scales.view(()) if not block_rows and not group else scales
        return {"weight": codes, scale_name: stored}, codes.float() * whole

    return write


def int4(group: int, zeros: bool = False) -> Callable[[Tensor], Written]:
    """As compressed-tensors packs: along inputs, zero points along outputs."""

    def write(values: Tensor) -> Written:
        codes, scales, zero, meant = _coded(values, group, zeros, torch.bfloat16)
        parts = {"weight_packed": packed(codes, 1), "weight_scale": scales}
        parts["weight_shape"] = torch.tensor(values.shape)
        return parts | ({"weight_zero_point": packed(zero, 0)} if zeros else {}), meant

    return write


def int8(group: int, words: bool = False, bits: int = 8) -> Callable[[Tensor], Written]:
    """As compressed-tensors writes whole numbers: in a byte each, of fewer ``bits`` too; or four 128 more in a word."""

    def write(values: Tensor) -> Written:
        n, k = values.shape
        grouped = values.view(n, -1, group or k)
        scales = (grouped.abs().amax(2) / (2 ** (bits - 1) - 1)).to(torch.bfloat16)
        whole = scales.float()[..., None]
        codes = (grouped / whole).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        stored = codes.view(n, k).to(torch.int8)
        meant = (codes * whole).view(n, k)
        if not words:
            return {"weight": stored, "weight_scale": scales, "weight_zero_point": torch.zeros(n, 1).char()}, meant
        biased = (stored.to(torch.int16) + 128).to(torch.uint8)
        shape = torch.tensor(values.shape)
        return {"weight_packed": biased.view(torch.int32), "weight_scale": scales, "weight_shape": shape}, meant

    return write


def gptq(group: int) -> Callable[[Tensor], Written]:
    """As AutoGPTQ: along inputs, zero points less one."""

    def write(values: Tensor) -> Written:
        codes, scales, zero, meant = _coded(values, group, True, torch.float16)
        order = torch.arange(values.shape[1], dtype=torch.int32) // (group or values.shape[1])
        parts = {"qweight": packed(codes.t(), 0), "scales": scales.t().contiguous(), "g_idx": order}
        return parts | {"qzeros": packed((zero - 1).t() & 15, 1), "bias": torch.zeros(len(values)).half()}, meant

    return write


def awq(group: int) -> Callable[[Tensor], Written]:
    """As AutoAWQ: along outputs, in its order."""

    def write(values: Tensor) -> Written:
        codes, scales, zero, meant = _coded(values, group, True, torch.float16)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        words = {"qweight": packed(codes.t(), 1, order), "qzeros": packed(zero.t(), 1, order)}
        return words | {"scales": scales.t().contiguous()}, meant

    return write


def _coded(values: Tensor, group: int, zeros: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, scales, zero points (1 to 15) and what they mean."""
    n, k = values.shape
    grouped = values.view(n, -1, group or k)
    if zeros:
        least, most = grouped.amin(2), grouped.amax(2)
        scales = ((most - least) / 14).to(dtype)
        zero = (-least / scales.float()).round().clamp(1, 15).to(torch.int64)
    else:
        scales = (grouped.abs().amax(2) / 7).to(dtype)
        zero = torch.full(scales.shape, 8)
    codes = ((grouped / scales.float()[..., None]).round() + zero[..., None]).clamp(0, 15).to(torch.int64)
    meant = (codes - zero[..., None]).float() * scales.float()[..., None]
    return codes.view(n, k), scales, zero, meant.view(n, k)


def nvfp4(divides: bool) -> Callable[[Tensor], Written]:
    """As compressed-tensors (``divides``) or Model Optimizer write it; activations have a scale too."""

    def write(values: Tensor) -> Written:
        n, k = values.shape
        grouped = values.view(n, -1, 16)
        own = grouped.abs().amax() / (6 * 448)
        own = 1 / own if divides else own
        sizes = grouped.abs().amax(2) / 6
        scales = (sizes * own if divides else sizes / own).to(torch.float8_e4m3fn)
        whole = (scales.float() / own if divides else scales.float() * own)[..., None]
        codes = (grouped / whole.clamp(min=1e-9)).unsqueeze(-1).sub(FP4).abs().argmin(-1).to(torch.uint8).view(n, k)
        packed = codes[:, ::2] | codes[:, 1::2] << 4
        meant = (FP4[codes.long()].view(n, -1, 16) * whole).view(n, k)
        if divides:
            parts = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": own.view(1)}
            return parts | {"input_global_scale": torch.tensor([7.0])}, meant
        return {"weight": packed, "weight_scale": scales, "weight_scale_2": own, "input_scale": own / 3}, meant

    return write


def mxfp4_packed(values: Tensor) -> Written:
    """As compressed-tensors writes it."""
    blocks, scales, meant = mxfp4(values.t()[None])
    return {"weight_packed": blocks[0].view(len(values), -1), "weight_scale": scales[0]}, meant[0].t().contiguous()


def mxfp4(stack: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks and scales of experts (experts, inputs, outputs), as gpt-oss has them, and what they mean."""
    turned = stack.transpose(1, 2).contiguous()
    experts, outputs, inputs = turned.shape
    grouped = turned.view(experts, outputs, inputs // 32, 32)
    exponents = torch.log2(grouped.abs().amax(3).clamp(min=1e-9) / 6).ceil()
    nearest = (grouped / torch.exp2(exponents)[..., None])[..., None] - FP4
    codes = nearest.abs().argmin(-1).to(torch.uint8)
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    meant = (FP4[codes.long()] * torch.exp2(exponents)[..., None]).view(turned.shape)
    return blocks, (exponents + 127).to(torch.uint8), meant.transpose(1, 2).contiguous()


def write(
    family: str,
    directory: Path,
    method: Mapping[str, Any],
    quantiser: Callable[[Tensor], Written] | None = None,
    without: tuple[str, ...] = ("embed", "lm_head", "norm", "mlp.gate.", "moe.gate.", "router"),
    **changed: Any,
) -> tuple[Path, Path]:
    """A checkpoint of ``family`` in bfloat16 whose layers went through ``quantiser``, but those that have one of
    ``without`` in their name: as it is published with ``method`` in its config, and as plain bfloat16.
    """
    source = tiny_models.write(family, directory / "source", SIZE, dtype="bfloat16", **changed)
    state, published, plain = load_file(source / "model.safetensors"), dict[str, Tensor](), dict[str, Tensor]()
    for name, values in state.items():
        base = name.removesuffix(".weight")
        if quantiser is None and values.dim() == 3:
            blocks, scales, meant = mxfp4(values.float())
            published |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        elif quantiser is not None and values.dim() == 2 and not any(part in name for part in without):
            parts, meant = quantiser(values.float())
            if f"{base}.bias" in state:  # it keeps its own
                parts.pop("bias", None)
            published |= {f"{base}.{part}": tensor for part, tensor in parts.items()}
        else:
            published[name] = meant = values
        plain[name] = meant.to(torch.bfloat16)
    shutil.copytree(source, directory / "plain")
    shutil.copytree(source, directory / "published")
    save_file(plain, directory / "plain" / "model.safetensors", metadata={"format": "pt"})
    rewrite(directory / "published", published, quantization_config=dict(method))
    return directory / "published", directory / "plain"


def apart(published: Path, plain: Path, quantiser: Callable[[Tensor], Written]) -> None:
    """Take stacks of experts, which have inputs first, in both checkpoints that `write` made apart, as tools do that
    quantise linear layers.
    """
    state, meant = load_file(published / "model.safetensors"), load_file(plain / "model.safetensors")
    for name in [name for name, values in state.items() if values.dim() == 3 and "experts" in name]:
        base, _, own = name.rpartition(".")
        each = list[Tensor]()
        for expert, stored in enumerate(state.pop(name).float()):
            parts = ("gate_proj", "up_proj") if own == "gate_up_proj" else ("down_proj",)
            values = list[Tensor]()
            for part, rows in zip(parts, stored.t().chunk(len(parts)), strict=True):
                tensors, found = quantiser(rows.contiguous())
                state |= {f"{base}.{expert}.{part}.{kind}": tensor for kind, tensor in tensors.items()}
                values.append(found)
            each.append(torch.cat(values).t())
        meant[name] = torch.stack(each).to(torch.bfloat16)
    rewrite(published, state)
    rewrite(plain, meant)


def rewrite(directory: Path, tensors: Mapping[str, Tensor] | None = None, **entries: Any) -> Path:
    """Other tensors, and entries of the config, in a checkpoint."""
    if tensors is not None:
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(whole, directory / "model.safetensors", metadata={"format": "pt"})
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    return directory


def put_routers(directories: Iterable[Path], ending: str, dtype: torch.dtype) -> None:
    """The same random numbers of ``dtype`` in all checkpoints, as routers, whose names have the ``ending``."""
    for directory in directories:
        state = load_file(directory / "model.safetensors")
        torch.manual_seed(0)
        routers = {n: torch.randn(t.shape).to(dtype) for n, t in sorted(state.items()) if n.endswith(ending)}
        assert routers
        rewrite(directory, state | routers)
