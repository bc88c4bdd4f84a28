"""Tokens of prompts that a GiB of host memory holds for hybrid models: Stowage's chunks, and vLLM's own offloading.

    python -m benchmarks.capacity [--measure [FAMILY ...]]

Computed from published configs, for prompts of one length that have nothing in common, with a host arena that is full:

- *again*: tokens that need not be computed when every stored prompt is asked again;
- *parted*: the same when each is asked again with another ending, and the place where it parts is anywhere, all places
  equally likely. Windows and states that were not kept in the middle of a prompt make this less.

Ours is laid out by the code that the plugin uses, with its setting ``resume_points`` at the default and at others. The
default learns what to keep (``benchmarks.retention`` replays that): counted is what it has come to when all prompts are
asked again, and when all part.
vLLM's follows its release 0.32 (``kv_offload`` and the offloading
connector): a host chunk is one block of one cache group, and has the size of the widest group's block. What is stored
depends on ``--prefix-cache-retention-interval``: 0, its default, keeps windows and states for a prompt's end only; a
number keeps them every so many tokens too; none keeps everything. ``--measure`` checks both layouts on tiny models of
the same shape: real engines of vLLM's CPU build, filled beyond their host memory (needs ``make bench-env``).

For several ranks: tokens per GiB, by the plugin's own division of a block between them. vLLM's offloading stores an
MLA latent once where there is tensor parallelism alone, LMCache's first rank stores it; else each rank stores its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._peer import PYTHON
from benchmarks._report import RESULTS, write_result
from stowage.core.geometry import Geometry, Group, Kind, round_up, split_arena
from stowage.core.groups import strategy
from stowage.core.resume_points import tail_of
from stowage.core.retention import Learner
from stowage.plugins.vllm.division import Heads, Naming, Piece, Rank, divide
from stowage.plugins.vllm.settings import read, retention, state_spacing

GIB = 1 << 30
LENGTHS = (4096, 8192, 32768)
STEP_TOKENS = 2048
"""``--max-num-batched-tokens`` of vLLM's API server where it has no better idea."""
INTERVAL = 2048
MEASURED_HOST, MEASURED_PROMPTS, MEASURED_LENGTH = 48 << 20, 40, 2000
SCRIPT = Path(__file__).parent / "peers" / "vllm_capacity.py"


@dataclass(frozen=True)
class Model:
    """``token_bytes``: keys and values of one token in one attention layer. ``state_bytes``: of one recurrent layer.
    ``source``: whose config.json the numbers are from.
    """

    source: str
    token_bytes: int
    full: int
    sliding: int = 0
    window: int = 0
    recurrent: int = 0
    state_bytes: int = 0
    align: int = 16

    @property
    def block_tokens(self) -> int:
        """vLLM's on an accelerator: 16; with states so many that a block of attention takes no less than a state."""
        return self.align * max(1, math.ceil(self.state_bytes / (self.align * self.token_bytes)))

    def groups(self) -> list[tuple[Kind, int]]:
        """vLLM's cache groups and their layers: each kind is cut into groups of as many layers as the kind with the
        fewest has (as many as the largest has, where it is not half as large again).
        """
        kinds = {Kind.FULL: self.full, Kind.SLIDING: self.sliding, Kind.RECURRENT: self.recurrent}
        counts = [count for count in kinds.values() if count]
        size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
        found = []
        for kind, count in kinds.items():
            parts = math.ceil(count / size)
            found += [(kind, len(range(part, count, parts))) for part in range(parts)]
        return found


def _attention(heads: int, head_dim: int) -> int:
    return 2 * heads * head_dim * 2  # bfloat16


def _delta_net(key_heads: int, value_heads: int, head_dim: int, kernel: int) -> int:
    return (value_heads * head_dim * head_dim + (2 * key_heads + value_heads) * head_dim * (kernel - 1)) * 2


MODELS: Mapping[str, Model] = {
    "Gemma-3 27B": Model("google/gemma-3-27b-it", _attention(16, 128), full=10, sliding=52, window=1024),
    "Gemma-3 12B": Model("google/gemma-3-12b-it", _attention(8, 256), full=8, sliding=40, window=1024),
    "GPT-OSS 20B": Model("openai/gpt-oss-20b", _attention(8, 64), full=12, sliding=12, window=128),
    "GPT-OSS 120B": Model("openai/gpt-oss-120b", _attention(8, 64), full=18, sliding=18, window=128),
    "Qwen3-Next 80B": Model(
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        _attention(2, 256),
        full=12,
        recurrent=36,
        state_bytes=_delta_net(16, 32, 128, 4),
    ),
}


@dataclass(frozen=True)
class SwappedBlocks:
    """Of full host memory: prompts, and tokens that need not be computed."""

    prompts: float
    again: float
    parted: float


def reused(length: int, boundaries: Sequence[int]) -> tuple[int, float]:
    """Of one prompt that can be resumed at ``boundaries``: tokens reused when it is asked again, and on average over
    all places where another one may part from it.
    """
    ends = sorted({0, *(at for at in boundaries if at < length)})
    lengths = [(after - at) * at for at, after in itertools.pairwise([*ends, length])]
    return ends[-1], sum(lengths) / length


def states(model: Model, length: int, step_tokens: int) -> list[int]:
    """Where vLLM leaves states of a prompt: where steps end, which is at ends of blocks, and after the last block."""
    block = model.block_tokens
    step = max(block, step_tokens // block * block)
    return sorted({*range(step, length, step), (length - 1) // block * block})


def cache_groups(model: Model, per_chunk: int) -> list[Group]:
    """With so many blocks per chunk of attention."""
    block = model.block_tokens
    groups = []
    for index, (kind, layers) in enumerate(model.groups()):
        nbytes = layers * (model.state_bytes if kind is Kind.RECURRENT else block * model.token_bytes)
        blocks = 1 if kind is Kind.RECURRENT else per_chunk
        groups.append(Group(index, kind, block, blocks, nbytes, model.window if kind is Kind.SLIDING else 0))
    return groups


def ours(
    model: Model, length: int, host: int = GIB, step_tokens: int = STEP_TOKENS, level: int = -1, **extra: Any
) -> SwappedBlocks:
    """With the plugin's settings, default but for ``extra``. ``level``: of the learner's, where the setting learns."""
    options = read({"host_memory": host, **extra})
    block = model.block_tokens
    groups = cache_groups(model, options.blocks_per_chunk(block))
    strategies = [strategy(group) for group in groups]
    learned = retention(options, strategies, step_tokens)
    keeps = learned.levels[level] if isinstance(learned, Learner) else learned
    tail = tail_of(length, math.lcm(*(group.chunk_tokens for group in groups)))
    masks, needed = [], {}
    for group in groups:
        kept = np.ones(length // group.chunk_tokens, np.bool_)
        if group.kind is Kind.RECURRENT:
            kept[:] = False
            ends = states(model, length, step_tokens)
            for before, end in itertools.pairwise([0, *ends]):
                kept[end // block - 1] = end >= tail or keeps.points.crossed(before, end)
        else:
            kept = keeps.kept(strategy(group), range(len(kept)), length, tail, 0)
        needed[group.index] = int(kept.sum())
        masks.append(np.where(kept, np.uint64(group.full_mask), np.uint64(0)))
    spacing = round_up(state_spacing(options, step_tokens), block) if model.recurrent else 1
    common = model.recurrent > 0 or not keeps.points.everywhere
    slabs = split_arena(Geometry(tuple(groups)), host, spacing, common=common)
    prompts = min(slab.slots / sum(needed[index] for index in slab.groups) for slab in slabs if slab.groups)
    served = [one.resume_points(mask, length, block) for one, mask in zip(strategies, masks, strict=True)]
    boundaries = np.flatnonzero(np.logical_and.reduce(served)) * block
    again, _ = reused(length, boundaries.tolist())
    _, parted = reused(length, boundaries[boundaries % groups[0].chunk_tokens == 0].tolist())  # a chunk is found whole
    return SwappedBlocks(prompts, prompts * again, prompts * parted)


def vllms(model: Model, length: int, interval: int | None, host: int = GIB) -> SwappedBlocks:
    """``interval``: ``--prefix-cache-retention-interval``, ``None``: without one, everything is kept."""
    block, groups = model.block_tokens, model.groups()
    chunk_bytes = round_up(max(layers for _, layers in groups) * block * model.token_bytes)
    tails = tail_blocks(model, length, interval)
    chunks = sum(length // block if kind is Kind.FULL else len(tails) for kind, _ in groups)
    behind = _behind(model)
    held = [
        at for at in range(1, length // block + 1) if all(at - back in tails for back in range(1, min(behind, at) + 1))
    ]
    again, parted = reused(length, [at * block for at in held])
    prompts = host // chunk_bytes / chunks
    return SwappedBlocks(prompts, prompts * again, prompts * parted)


def tail_blocks(model: Model, length: int, interval: int | None) -> set[int]:
    """Blocks of a prompt that are kept of each group with a window or states: those that a place needs before it."""
    block = model.block_tokens
    if interval is None:
        return set(range(length // block))
    step = math.ceil(interval / block) * block
    places = {(length - 1) // block * block, *(range(step, length + step, step) if interval else ())}
    ends = range(1, _behind(model) + 1)
    return {at // block - back for at in places for back in ends if 0 <= at // block - back < length // block}


def _behind(model: Model) -> int:
    """Blocks that a place needs before it: all that its window reaches, or one state."""
    return 1 if model.recurrent else math.ceil((model.window - 1) / model.block_tokens)


def compare(model: Model, length: int) -> dict[str, SwappedBlocks]:
    """All ways of keeping prompts of that length."""
    repeated, parted = ours(model, length, level=0), ours(model, length)
    return {
        "Stowage": SwappedBlocks(repeated.prompts, repeated.again, parted.parted),
        "Stowage, growing": ours(model, length, resume_points="growing"),
        f"Stowage, every {INTERVAL}": ours(model, length, resume_points=INTERVAL),
        "Stowage, all": ours(model, length, resume_points="all"),
        "Stowage, ends": ours(model, length, resume_points="ends"),
        "vLLM, default": vllms(model, length, 0),
        f"vLLM, every {INTERVAL}": vllms(model, length, INTERVAL),
        "vLLM, everything": vllms(model, length, None),
    }


# Measured


TINY: Mapping[str, tuple[Model, Mapping[str, Any]]] = {
    "gemma3": (
        Model("", _attention(2, 32) * 2, full=2, sliding=10, window=200, align=128),
        {"num_hidden_layers": 12, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2},
    ),
    "gpt_oss": (
        Model("", _attention(2, 64) * 2, full=4, sliding=4, window=128, align=128),
        {"num_hidden_layers": 8, "layer_types": ["sliding_attention", "full_attention"] * 4},
    ),
}


def measure(name: str, host: int, length: int, directory: Path) -> dict[str, Any]:
    """Fill both on real engines: tokens per prompt that can be resumed, and how many prompts are whole."""
    model, fields = TINY[name]
    found: dict[str, Any] = {}
    peers: Mapping[str, Mapping[str, int | None]] = {
        "Stowage": {},
        "Stowage, after repeated ones": {"repeats": 6},
        "vLLM, default": {"interval": 0},
        "vLLM, everything": {"interval": None},
    }
    for peer, more in peers.items():
        told = {
            "family": name,
            "fields": fields,
            "host": host,
            "length": length,
            "peer": peer,
            "prompts": MEASURED_PROMPTS,
            **more,
        }
        environment = os.environ | {"PYTHONPATH": "src:.", "OMP_NUM_THREADS": "1"}
        command = [str(PYTHON), str(SCRIPT), json.dumps(told), str(directory)]
        answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True).stdout
        found[peer] = json.loads(answer.splitlines()[-1])
        compute: Mapping[str, Callable[[], SwappedBlocks]] = {
            "Stowage": lambda: ours(model, length, host, 512),
            "Stowage, after repeated ones": lambda: ours(model, length, host, 512, 0),
            "vLLM, default": lambda: vllms(model, length, 0, host),
            "vLLM, everything": lambda: vllms(model, length, None, host),
        }
        found[peer]["computed"] = compute[peer]()
        print(f"{name:>10}  {peer:<18} {found[peer]}")
    return found


def _show(results: Mapping[str, Mapping[int, Mapping[str, SwappedBlocks]]]) -> None:
    for name, by_length in results.items():
        for length, held in by_length.items():
            print(f"{name}, prompts of {length:,} tokens; thousand tokens per GiB, and times vLLM's")
            for way, one in held.items():
                mine = held["Stowage"]
                print(
                    f"{way:>20}   again {one.again / 1e3:9.1f} ({mine.again / one.again:4.2f})"
                    f"   parted {one.parted / 1e3:8.1f} ({mine.parted / one.parted:5.2f})"
                )


def _plain(value: Any) -> Any:
    if isinstance(value, SwappedBlocks):
        return {name: round(number, 1) for name, number in asdict(value).items()}
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    return value


@dataclass(frozen=True)
class Ranked:
    """``heads``: of keys and values, with ``head_bytes`` of one token in one layer each; an MLA latent is one. The
    model has ``stages`` of ``tensor`` ranks.
    """

    layers: int
    heads: int
    head_bytes: int
    stages: int
    tensor: int


_LATENT, _HEAD = 2 * (512 + 64), 2 * 2 * 128
RANKED = {
    "DeepSeek-V3, 2 ranks": Ranked(61, 1, _LATENT, 1, 2),
    "DeepSeek-V3, 8 ranks": Ranked(61, 1, _LATENT, 1, 8),
    "DeepSeek-V3, 2 stages of 4": Ranked(61, 1, _LATENT, 2, 4),
    "Qwen3-30B-A3B, 8 ranks": Ranked(48, 4, _HEAD, 1, 8),
    "Qwen3-235B-A22B, 8 ranks": Ranked(94, 4, _HEAD, 1, 8),
}


def several_ranks(model: Ranked) -> dict[str, int | None]:
    """Tokens per GiB of host memory; ``before``: each rank's own, as long as the plugin stored that."""
    held: dict[Rank, list[list[Piece]]] = {}
    each = max(1, model.heads // model.tensor)
    for stage, rank in itertools.product(range(model.stages), range(model.tensor)):
        first = rank * model.heads // model.tensor
        layers = [f"layer {number}" for number in range(model.layers) if number % model.stages == stage]
        naming = Naming(rank, model.tensor, dict.fromkeys(layers, Heads(first, first + each, model.heads)))
        held[stage, rank] = [[Piece(naming.whole(layer), each * model.head_bytes, "") for layer in layers]]
    division = divide(held, by_name=False)
    once, own = round(GIB / division.bytes_per_block[0]), round(GIB / division.bytes_held[0])
    latent = model.heads == 1
    return {
        "before": own,
        "stowage": once,
        "vllm_offloading": once if latent and model.stages == 1 else own,
        "lmcache": (once if latent else own) if model.stages == 1 else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", nargs="*", choices=[*TINY], metavar="FAMILY", help="these tiny models, or all")
    options = parser.parse_args()
    results = {name: {length: compare(model, length) for length in LENGTHS} for name, model in MODELS.items()}
    _show(results)
    path = RESULTS / "capacity.json"
    measured = json.loads(path.read_text(encoding="utf-8")).get("measured", {}) if path.exists() else {}
    if options.measure is not None:
        if not PYTHON.exists():
            raise SystemExit("vLLM is not here. Make the peers' environment first: make bench-env")
        with tempfile.TemporaryDirectory(prefix="stowage-bench-") as directory:
            for name in options.measure or TINY:
                measured[name] = _plain(measure(name, MEASURED_HOST, MEASURED_LENGTH, Path(directory)))
    described = {name: asdict(model) | {"block_tokens": model.block_tokens} for name, model in MODELS.items()}
    computed = {"unit": "tokens per GiB", "step_tokens": STEP_TOKENS, "models": described, "computed": _plain(results)}
    computed["several_ranks"] = {name: asdict(model) | several_ranks(model) for name, model in RANKED.items()}
    for name, tokens in computed["several_ranks"].items():
        print(f"{name}: {tokens}")
    host = {"unit": "tokens", "host": MEASURED_HOST, "prompts": MEASURED_PROMPTS, "length": MEASURED_LENGTH}
    write_result("capacity", computed | {"measured_with": host, "measured": measured})


if __name__ == "__main__":
    main()
