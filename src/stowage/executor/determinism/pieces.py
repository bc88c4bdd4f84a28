"""Chunked prefill with exact answers: where prompts may be cut so that a token's bits never depend on the batch.

    by rows       kernels compute every row independently (``row_invariance``): a prompt may be cut anywhere, and
                  generated tokens are computed like a prompt's. Recurrent layers too, if the kernels compute them
                  (``recurrent_layers``); if torch does, prompts are cut at multiples of the scan's own chunk
    by pieces     each piece of a prompt is a forward of its own, of the same tokens at the same positions: the same
                  shapes give the same bits. Generated tokens are computed one by one, and are not shared: a later
                  prompt that contains them computes them in pieces. With kernels, single tokens of many sequences are
                  one forward; on a GPU too, padded to a fixed number of rows (``device_rows``); else each is one

A model whose layers can continue from a state only with single tokens is computed token by token throughout.
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
"""Chunk size of Transformers' gated delta rule, which no config states."""
PIECE_TOKENS = 64
"""Size of a piece without kernels: smaller ones are slow, larger ones are shared less often."""
TILE_PIECE_TOKENS = 256
"""Size of a piece where torch uses bfloat16 tiles (AMX) and the kernels do not: tiles need many rows to be fast."""
_ROWS, _ROWS_MOST = 32, 256
DEVICES = frozenset({"cuda"})
"""Devices, besides the CPU, whose matrix products and sums depend on shapes alone, as observed: for a given number of
rows, cuBLAS on an H100 depends neither on the other rows, nor on a row's index, nor on graph replay.
"""
_CHUNKS = ("chunk_size", "mamba_chunk_size")
_CPU = torch.device("cpu")


class Exactness(enum.Enum):
    """USUAL: exact answers if possible, else a warning. REQUIRED: exact answers, else the engine does not open.
    BATCH_DEPENDENT: the last bits of an answer may depend on the batch.
    """

    USUAL = "usual"
    REQUIRED = "required"
    BATCH_DEPENDENT = "batch-dependent"


def exactness_of(deterministic: bool, batch_dependent: bool) -> Exactness:
    """The ``Exactness`` of these two settings. Raises ``ConfigError`` if both are set."""
    if deterministic and batch_dependent:
        raise ConfigError("deterministic and batch_dependent contradict each other: give one of them, or neither.")
    if batch_dependent:
        return Exactness.BATCH_DEPENDENT
    return Exactness.REQUIRED if deterministic else Exactness.USUAL


@dataclass(frozen=True, slots=True)
class Pieces:
    """How prompts are cut: ``grid``: at its multiples, or the end; 1: anywhere. ``alone``: one forward for each."""

    grid: int = 1
    alone: bool = False

    @property
    def whole(self) -> bool:
        """Whether generated tokens are computed like a prompt's, and may be shared like them."""
        return self.grid == 1

    def cut(self, sequence: SequenceState, count: int) -> int:
        """How many of the next ``count`` tokens of ``sequence`` may be computed at once; 0: too few for a piece.

        A single token left over at a prompt's end is always computed alone: it is a decode step, not a scan.
        """
        if self.whole:
            return count
        start, prompt = sequence.computed, sequence.prompt_tokens
        scanned = prompt - 1 if prompt % self.grid == 1 else prompt
        if start >= scanned:
            return min(count, 1)
        end = start + count
        return (scanned if end >= scanned else end // self.grid * self.grid) - start


def exact_candidates(model: Any) -> list[Pieces]:
    """Candidates for exact answers of ``model``, the best first; ``trial`` checks each. Raises ``ConfigError`` on
    devices without one.
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
    return [by_pieces, *by_rows] if kernels.torch_is_faster(model.dtype) else [*by_rows, by_pieces]


def simplified(pieces: Pieces, layout: ModelLayout) -> Pieces:
    """``pieces`` without what a model with this cache layout does not need: no grid without a scan, or if it is
    computed token by token anyway.
    """
    if layout.alone:
        return pieces
    if pieces.alone:
        return pieces if layout.continues else Pieces(alone=True)
    return pieces if layout.recurrent is not None and layout.continues else Pieces()


def device_rows(max_num_seqs: int) -> int:
    """Rows of a decode forward on a GPU, padding included: 32, or the next power of two from ``max_num_seqs`` on. On an
    H100, padding 1 row to 32 took 2.5 % longer, to 64 4 %, to 256 24 %.
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
    return no_kernels_reason(model)


def remedy(no_offload: str) -> str:
    """What an error for a sequence longer than the device adds, where this reason excludes offloaded keys."""
    return no_offload and f" Only --batch-dependent lets a sequence be longer than the device here: {no_offload}"


def no_kernels_reason(model: Any) -> str:
    """Why there are no kernels for ``model``, so that exact answers are slower; empty: there are."""
    if model.device.type != "cpu" or kernels.wanted(model.device, model.dtype) or model.config.model_type in ALONE:
        return ""
    if not kernels.is_built():
        return "Stowage's kernels were not built. Install it again where there is a C compiler (apt install gcc)."
    if model.dtype not in kernels.DTYPES:
        return f"there are no kernels for {model.dtype}: give --dtype bfloat16 or float32."
    return "STOWAGE_PURE_PYTHON is set, which switches Stowage's kernels off: unset it."


def slow_path_reason(model: Any) -> str:
    """Why prefill of ``model`` does not use this processor's fastest path; empty: it does."""
    if (
        not kernels.TILES_REFUSED
        or not kernels.wanted(model.device, model.dtype)
        or not kernels.torch_is_faster(model.dtype)
    ):
        return ""
    return f"{kernels.TILES_REFUSED}: prompts are computed by torch, in pieces of {TILE_PIECE_TOKENS} tokens."


def exact_name(pieces: Pieces, device: torch.device = _CPU) -> str:
    """Everything that exact bits depend on besides the model. Part of the namespace: other bits are not reused."""
    if device.type != "cpu":
        return f"exact/{torch_name(device)}/{pieces.grid}/alone"
    ours = f"{kernels.instructions()}/{kernels.REVISION}" if is_wanted() else "none"
    alone = "/alone" if pieces.alone else ""
    return f"exact/{ours}/{torch_name(device)}/{pieces.grid}{alone}"


def torch_name(device: torch.device) -> str:
    """What the bits of torch's own forwards depend on besides shapes and the model."""
    if device.type != "cpu":
        return f"{_device_name(device)}/torch/{torch.__version__}"
    return f"torch/{torch.__version__}/{torch.backends.cpu.get_cpu_capability()}/{torch.get_num_threads()}"


def _device_name(device: torch.device) -> str:
    """The device and the settings that select its kernels."""
    if device.type != "cuda":
        return device.type
    matmul = torch.backends.cuda.matmul
    reduced = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    return f"{torch.cuda.get_device_name(device)}/{torch.version.cuda}/{matmul.allow_tf32}/{reduced}"


def check_steps(pieces: Pieces, memory: Memory, context_tokens: int) -> None:
    """Raise ``BudgetError`` if a piece may never fit into a step."""
    least = min(pieces.grid, context_tokens) + memory.max_num_seqs
    if not pieces.whole and memory.max_num_batched_tokens < least:
        raise BudgetError(
            f"exact answers of this model need steps of {least} tokens at least, and --max-num-batched-tokens "
            f"is {memory.max_num_batched_tokens}. Give --max-num-batched-tokens {least}, or lower --max-num-seqs "
            f"({memory.max_num_seqs})."
        )
