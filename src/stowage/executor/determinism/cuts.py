"""How prompts are cut so that a token's bits are its own: the ways to exact answers, the best one first.

    by rows       kernels compute every row by itself (``row_invariance``): a prompt may be cut anywhere, and generated
                  tokens are a prompt's. Recurrent layers too, where the kernels compute them (``recurrent_layers``);
                  where torch does, prompts are cut at multiples of the scan's own chunk
    by pieces     each piece of a prompt is a forward of its own, of the same tokens at the same positions: the same
                  shapes give the same bits, whatever computes them. Generated tokens are computed one by one, and are
                  not shared: a later prompt that contains them computes them in pieces. Where there are kernels, single
                  tokens of many sequences are one forward; on a GPU too, of always so many rows (``device_rows``); else
                  each is one

A model whose layers continue from a state with single tokens only is computed token by token throughout. It has one
computation, so nothing is asked of it either.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any

import torch

from stowage.config.memory import Memory
from stowage.errors import BudgetError, ConfigError
from stowage.executor import kernels
from stowage.executor.fused.recurrent_layers import whole_prompts
from stowage.executor.sequence_state import SequenceState
from stowage.models.families import ALONE
from stowage.models.layout import ModelLayout
from stowage.native import is_wanted
from stowage.weights.quantized.modules import has_packed_experts
from stowage.weights.quantized.stacks import has_grouped_products

SCAN_TOKENS = 64
"""Of a gated delta rule's chunks in Transformers, which no config states."""
PIECE_TOKENS = 64
"""Of a prompt, that are computed by themselves without kernels: fewer are slow, more are shared less often."""
TILE_PIECE_TOKENS = 256
"""The same where torch multiplies whole tiles of bfloat16 and the kernels do not: that takes many rows to be quick."""
_ROWS, _ROWS_MOST = 32, 256
DEVICES = frozenset({"cuda"})
"""Devices, besides the CPU, whose products and sums were seen to depend on shapes alone (cuBLAS on an H100: for a given
number of rows neither on the other rows, nor on a row's place, nor on being replayed in a graph).
"""
_CHUNKS = ("chunk_size", "mamba_chunk_size")
_CPU = torch.device("cpu")


class Exactness(enum.Enum):
    """What is asked of an engine. USUAL: exact answers where they are possible, and a warning where not. REQUIRED: it
    does not open without. BATCH_DEPENDENT: the last bits of an answer may depend on what is computed beside it.
    """

    USUAL = "usual"
    REQUIRED = "required"
    BATCH_DEPENDENT = "batch-dependent"


def exactness_of(deterministic: bool, batch_dependent: bool) -> Exactness:
    """What these two settings ask for. Raises ``ConfigError`` for both."""
    if deterministic and batch_dependent:
        raise ConfigError("deterministic and batch_dependent contradict each other: give one of them, or neither.")
    if batch_dependent:
        return Exactness.BATCH_DEPENDENT
    return Exactness.REQUIRED if deterministic else Exactness.USUAL


@dataclass(frozen=True, slots=True)
class Pieces:
    """``grid``: pieces of prompts end at its multiples, or at the prompt's end; 1: anywhere. ``alone``: each such piece
    is a forward of its own.
    """

    grid: int = 1
    alone: bool = False

    @property
    def whole(self) -> bool:
        """Whether a generated token is computed like a prompt's, and may be shared like it."""
        return self.grid == 1

    def cut(self, sequence: SequenceState, count: int) -> int:
        """Of the next ``count`` tokens of ``sequence``, how many may be computed at once; 0: it takes more of them.

        A single token is no scan: one that is left over at a prompt's end is always computed alone.
        """
        if self.whole:
            return count
        start, prompt = sequence.computed, sequence.prompt_tokens
        scanned = prompt - 1 if prompt % self.grid == 1 else prompt
        if start >= scanned:
            return min(count, 1)
        end = start + count
        return (scanned if end >= scanned else end // self.grid * self.grid) - start


def exact_ways(model: Any) -> list[Pieces]:
    """How prompts may be cut for exact answers, the best way first: whether a model is exact that way, the trial says.
    Raises ``ConfigError`` on devices for which there is none.
    """
    on_cpu = model.device.type == "cpu"
    if not on_cpu and model.device.type not in DEVICES:
        raise ConfigError(
            f"exact answers are there on CPUs and CUDA devices, and the model is on {model.device}. Compute on the "
            "CPU: --device cpu."
        )
    if not on_cpu and _crowded_experts(model):
        raise ConfigError(
            f"on {model.device} how an expert's tokens are multiplied depends on how many chose it, neighbours' "
            "included: only torch's grouped products in bfloat16 do not, on GPUs of compute capability 9. Give --dtype "
            "bfloat16, or compute on the CPU: --device cpu."
        )
    scanned = math.lcm(SCAN_TOKENS, *(int(size) for name in _CHUNKS if (size := getattr(model.config, name, None))))
    if model.config.model_type in ALONE:
        return [Pieces(scanned)]
    if not on_cpu:
        return [Pieces(math.lcm(TILE_PIECE_TOKENS, scanned), alone=True)]
    if not kernels.wanted(model.device, model.dtype):
        return [Pieces(math.lcm(PIECE_TOKENS, scanned), alone=True)]
    by_pieces = Pieces(math.lcm(TILE_PIECE_TOKENS, scanned), alone=True)
    by_rows = [Pieces(1), Pieces(scanned)] if whole_prompts(model) else [Pieces(scanned)]
    return [by_pieces, *by_rows] if kernels.outdone(model.dtype) else [*by_rows, by_pieces]


def settled(way: Pieces, layout: ModelLayout) -> Pieces:
    """``way`` as it is for a model that caches this: where there is no scan, rows may be cut anywhere; what is computed
    token by token has one shape throughout.
    """
    if layout.alone:
        return way
    if way.alone:
        return way if layout.continues else Pieces(alone=True)
    return way if layout.recurrent is not None and layout.continues else Pieces()


def device_rows(max_num_seqs: int) -> int:
    """How many single tokens are one forward on a GPU, used or not: 32, or as many as ``max_num_seqs`` needs of a power
    of two. Filling 1 row up to 32 took an H100 2.5 % longer, up to 64 4 %, up to 256 24 %.
    """
    return min(_ROWS_MOST, max(_ROWS, 1 << (max_num_seqs - 1).bit_length()))


def _crowded_experts(model: Any) -> bool:
    """Whether a token's product with an expert depends on how many other tokens chose that expert."""
    if not any("expert" in name or "moe" in name for name, _ in model.named_parameters()):
        return False
    looped = getattr(model.config, "_experts_implementation", None) != "grouped_mm" or has_packed_experts(model)
    return looped or not has_grouped_products(model.device, model.dtype)


def no_offload_reason(model: Any) -> str:
    """Why exact answers of ``model`` exclude offloaded keys; empty: they do not."""
    if model.device.type != "cpu":
        return "a GPU sums offloaded keys in another order."
    return lacking(model)


def lacking(model: Any) -> str:
    """Why exact answers of ``model`` cost more than they could; empty: they do not."""
    if model.device.type != "cpu" or kernels.wanted(model.device, model.dtype) or model.config.model_type in ALONE:
        return ""
    if not kernels.is_built():
        return "Stowage's kernels were not built. Install it again where there is a C compiler (apt install gcc)."
    if model.dtype not in kernels.DTYPES:
        return f"there are no kernels for {model.dtype}: give --dtype bfloat16 or float32."
    return "STOWAGE_PURE_PYTHON is set, which switches Stowage's kernels off: unset it."


def slowed(model: Any) -> str:
    """Why prompts of ``model`` are computed in a slower exact way than this processor allows; empty: they are not."""
    if not kernels.TILES_REFUSED or not kernels.wanted(model.device, model.dtype) or not kernels.outdone(model.dtype):
        return ""
    return f"{kernels.TILES_REFUSED}: prompts are computed by torch, in pieces of {TILE_PIECE_TOKENS} tokens."


def exact_name(pieces: Pieces, device: torch.device = _CPU) -> str:
    """What exact bits depend on besides the model: a cache from elsewhere, whose bits may differ, is not reused."""
    if device.type != "cpu":
        return f"exact/{_device_name(device)}/torch/{torch.__version__}/{pieces.grid}/alone"
    torch_kernels = f"{torch.__version__}/{torch.backends.cpu.get_cpu_capability()}/{torch.get_num_threads()}"
    ours = f"{kernels.instructions()}/{kernels.REVISION}" if is_wanted() else "none"
    alone = "/alone" if pieces.alone else ""
    return f"exact/{ours}/torch/{torch_kernels}/{pieces.grid}{alone}"


def _device_name(device: torch.device) -> str:
    """Which kernels ``device`` is given."""
    if device.type != "cuda":
        return device.type
    matmul = torch.backends.cuda.matmul
    reduced = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    return f"{torch.cuda.get_device_name(device)}/{torch.version.cuda}/{matmul.allow_tf32}/{reduced}"


def check_steps(pieces: Pieces, memory: Memory, context_tokens: int) -> None:
    """Raise ``BudgetError`` where a piece of the grid may never find room in a step."""
    least = min(pieces.grid, context_tokens) + memory.max_num_seqs
    if not pieces.whole and memory.max_num_batched_tokens < least:
        raise BudgetError(
            f"exact answers of this model need steps of {least} tokens at least, and --max-num-batched-tokens "
            f"is {memory.max_num_batched_tokens}. Give --max-num-batched-tokens {least}, or lower --max-num-seqs "
            f"({memory.max_num_seqs})."
        )
