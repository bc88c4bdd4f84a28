"""What ``--deterministic`` asks of prompts besides row invariance: where they may be cut, and what of them is shared.

    attention only    any piece gives the same bits (``row_invariance``), and a generated token the same as a prompt's:
                      nothing to ask
    recurrent state   the same where the kernels compute it (``recurrent_layers``). Where torch does, a prompt's scan
                      and a single step are two computations. Prompts are cut at multiples of the scan's own chunk, so
                      the scan is the same however they are cut. Generated tokens are always computed one by one and
                      are not shared: a later prompt that contains them scans them

A model whose layers continue from a state with single tokens only is computed token by token throughout. It has one
computation, so nothing is asked of it either.
"""

from __future__ import annotations

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

SCAN_TOKENS = 64
"""Of a gated delta rule's chunks in Transformers 5.17, which no config states."""
_CHUNKS = ("chunk_size", "mamba_chunk_size")


@dataclass(frozen=True, slots=True)
class Pieces:
    """``grid``: pieces of prompts end at its multiples, or at the prompt's end; 1: anywhere."""

    grid: int = 1

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


def exact_grids(model: Any) -> list[int]:
    """The multiples of tokens to try, the best one first, at which a model's scans, if it has some, are the same
    however its prompt was cut: 1 where the kernels compute all of them. Raises ``ConfigError`` where rows cannot be
    computed by themselves.
    """
    if not kernels.wanted(model.device, model.dtype):
        raise ConfigError(f"--deterministic is not possible here: {_missing(model)}")
    scanned = math.lcm(SCAN_TOKENS, *(int(size) for name in _CHUNKS if (size := getattr(model.config, name, None))))
    return [1, scanned] if model.config.model_type not in ALONE and whole_prompts(model) else [scanned]


def _missing(model: Any) -> str:
    if model.device.type != "cpu":
        return f"it needs kernels that there are for CPUs only, and the model is on {model.device}."
    if not kernels.is_built():
        return "its kernels were not built. Install Stowage again where there is a C compiler (apt install gcc)."
    if model.dtype not in kernels.DTYPES:
        return f"its kernels compute in float32 or bfloat16, not in {model.dtype}: give --dtype float32."
    return "STOWAGE_PURE_PYTHON is set, which switches its kernels off: unset it."


def exact_name(pieces: Pieces) -> str:
    """What exact bits depend on besides the model: a cache from elsewhere, whose bits may differ, is not reused."""
    torch_kernels = f"{torch.__version__}/{torch.backends.cpu.get_cpu_capability()}/{torch.get_num_threads()}"
    return f"exact/{kernels.instructions()}/{kernels.REVISION}/torch/{torch_kernels}/{pieces.grid}"


def check_steps(pieces: Pieces, memory: Memory, context_tokens: int) -> None:
    """Raise ``BudgetError`` where a piece of the grid may never find room in a step."""
    least = min(pieces.grid, context_tokens) + memory.max_num_seqs
    if not pieces.whole and memory.max_num_batched_tokens < least:
        raise BudgetError(
            f"deterministic answers of this model need steps of {least} tokens at least, and --max-num-batched-tokens "
            f"is {memory.max_num_batched_tokens}. Give --max-num-batched-tokens {least}, or lower --max-num-seqs "
            f"({memory.max_num_seqs})."
        )
