"""How long a prompt and a token take, given where the weights lie. Arithmetic only; no clock, no files.

What is computed, what comes over the link and what comes from the disk go on at the same time, so a step takes as long
as the slowest of them: residency is spread evenly, and a ring is filled ahead. A layer that is away is fetched with all
its experts, although only those that the router chooses are computed.

More parameters in memory never make a prediction slower.
"""

from __future__ import annotations

from dataclasses import dataclass

from stowage.planner.machine import Machine
from stowage.planner.shapes import Layer, Model, seen_pairs

STEP_TOKENS = 1024
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked of the model: ``batch`` sequences of up to ``context_tokens`` each. Speeds are predicted for a
    prompt of ``prompt_tokens`` and an answer of ``answer_tokens``; of prompts, ``step_tokens`` are computed at once.
    """

    context_tokens: int
    batch: int = 1
    prompt_tokens: int = 1024
    answer_tokens: int = 128
    step_tokens: int = STEP_TOKENS

    @property
    def prompt(self) -> int:
        return max(1, min(self.prompt_tokens, self.context_tokens))

    @property
    def length(self) -> int:
        """Of a sequence in the middle of its answer."""
        return max(1, min(self.context_tokens, self.prompt + self.answer_tokens // 2))

    @property
    def piece(self) -> int:
        """Tokens of the largest forward."""
        return max(self.batch, min(self.step_tokens, self.batch * self.prompt))


@dataclass(frozen=True, slots=True)
class Away:
    """Bytes of weights that a forward must fetch: over the device's link, and from the disk. What comes from the disk
    to a device crosses the link too, so ``link_bytes`` include ``disk_bytes``.
    """

    link_bytes: int = 0
    disk_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One forward: seconds of each part, and ``total_s``; bytes that are read from the disk and over the link."""

    compute_s: float
    link_s: float
    disk_s: float
    link_bytes: int
    disk_bytes: int

    @property
    def total_s(self) -> float:
        return max(self.compute_s, self.link_s, self.disk_s)

    @property
    def limit(self) -> str:
        """What the step waits for."""
        parts = {"compute": self.compute_s, "link": self.link_s, "disk": self.disk_s}
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True, slots=True)
class Prediction:
    """``ttft_s``: of one prompt on an idle machine; ``ttft_batch_s``: of the last of a batch of them at once."""

    decode: Step
    tokens_per_s: float
    ttft_s: float
    ttft_batch_s: float
    prefill_tokens_per_s: float


def predict(model: Model, machine: Machine, workload: Workload, away: Away) -> Prediction:
    """Speeds of ``model`` with these weights ``away``."""
    decode = decode_step(model, machine, workload, away)
    one_s = prompt_s(model, machine, workload, away, 1)
    batch_s = prompt_s(model, machine, workload, away, workload.batch) if workload.batch > 1 else one_s
    return Prediction(decode, workload.batch / decode.total_s, one_s, batch_s, workload.prompt / one_s)


def decode_step(model: Model, machine: Machine, workload: Workload, away: Away) -> Step:
    """One token for each sequence of the batch."""
    read = sum(
        layer.cache.tokens(workload.length) * layer.cache.read_elements * model.item_bytes
        + 2 * layer.cache.state_bytes(model.item_bytes)
        for layer in model.layers
    )
    compute_s = _products_s(model, machine, workload.batch, workload.batch)
    compute_s += workload.batch * read / machine.cache_bytes_per_s(model.dtype)
    return _step(machine, away, compute_s)


def prompt_s(model: Model, machine: Machine, workload: Workload, away: Away, prompts: int) -> float:
    """``prompts`` prompts of the workload, one after the other through forwards of at most a piece: all weights that
    are away are fetched anew for each.
    """
    total, done = prompts * workload.prompt, 0
    seconds = 0.0
    pairs = sum(
        layer.pair_operations * prompts * seen_pairs(workload.prompt, layer.cache.window) for layer in model.layers
    )
    attend_s = machine.attend_s(model.dtype, pairs)
    while done < total:
        tokens = min(max(1, workload.step_tokens), total - done)
        ended = max(1, (done + tokens) // workload.prompt - done // workload.prompt)
        compute_s = _products_s(model, machine, tokens, ended) + attend_s * tokens / total
        seconds += _step(machine, away, compute_s).total_s
        done += tokens
    return seconds


def _products_s(model: Model, machine: Machine, tokens: int, logits: int) -> float:
    """All matrix products of a forward, and what layers cost besides."""
    dense = sum(layer.multiplied for layer in model.layers)
    seconds = machine.multiply_s(model.dtype, dense, tokens) + machine.layer_s * len(model.layers)
    seconds += machine.multiply_s(model.dtype, model.head_reads, logits)
    for layer, count in _alike(model):
        met = layer.distinct_experts(tokens)
        if met:
            rows = max(1.0, tokens * layer.experts_per_token / met)
            seconds += count * machine.multiply_s(model.dtype, met * layer.expert_parameters, rows)
    return seconds


def _alike(model: Model) -> list[tuple[Layer, int]]:
    """Layers with experts, and how many are like each."""
    found: dict[tuple[int, int, int], tuple[Layer, int]] = {}
    for layer in model.layers:
        if layer.experts:
            key = (layer.experts, layer.experts_per_token, layer.expert_parameters)
            first, count = found.get(key, (layer, 0))
            found[key] = (first, count + 1)
    return list(found.values())


def _step(machine: Machine, away: Away, compute_s: float) -> Step:
    return Step(
        compute_s=compute_s,
        link_s=away.link_bytes / machine.link_in if machine.has_device else 0.0,
        disk_s=_over(away.disk_bytes, machine.disk_bytes_per_s),
        link_bytes=away.link_bytes,
        disk_bytes=away.disk_bytes,
    )


def _over(nbytes: int, bytes_per_s: float) -> float:
    if not nbytes:
        return 0.0
    return nbytes / bytes_per_s if bytes_per_s else float("inf")
