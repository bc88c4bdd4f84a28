"""Predicts how long a prompt and a token take for a placement of weights. Arithmetic only; no clock, no files.

Computing, copies over the link and disk reads overlap, so a step takes as long as the slowest of them: resident layers
are spread evenly, and a ring is filled ahead. Computing slows down while weights are fetched, which matters only where
it is the slowest. An offloaded layer is fetched with all its experts, although only the chosen ones are computed;
cached experts are read when they are chosen, while computing waits. Routers are assumed to choose evenly, the worst
case for a cache.

More parameters in memory never make a prediction slower.
"""

from __future__ import annotations

from dataclasses import dataclass

from stowage.planner.machine import Machine
from stowage.planner.shapes import DENSE, EXPERTS, HEAD, MLP, SHARED, Layer, Model

STEP_TOKENS = 1024
BLOCK_TOKENS = 16
_GATED = 3
"""Matrices of a gated feed-forward part, which nearly all models have."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests that a prediction is made for: ``batch`` sequences of up to ``context_tokens`` each. Speeds are
    predicted for a prompt of ``prompt_tokens`` and an answer of ``answer_tokens``; prompts are computed in forwards of
    ``step_tokens``.
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
        """Tokens of a sequence in the middle of its answer."""
        return max(1, min(self.context_tokens, self.prompt + self.answer_tokens // 2))

    @property
    def piece(self) -> int:
        """Tokens of the largest forward."""
        return max(self.batch, min(self.step_tokens, self.batch * self.prompt))


@dataclass(frozen=True, slots=True)
class Offloaded:
    """Bytes of weights that a forward must fetch: over the device's link, and from the disk. Bytes from the disk to a
    device cross the link too, so ``link_bytes`` include ``disk_bytes``. ``missed_share``: the miss rate of the expert
    cache; a missing expert is read when its layer is computed, not ahead. ``mapped_bytes`` are read by kernels from the
    page cache.
    """

    link_bytes: int = 0
    disk_bytes: int = 0
    missed_share: float = 0.0
    mapped_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One forward: seconds of each part, and ``total_s``; bytes that are read from the disk and over the link.

    ``missed_s``: the time to read ``missed_bytes`` of experts, for which computing waits. ``overlap_loss``: of
    ``Machine``, for the forward's rows.
    """

    compute_s: float
    link_s: float
    disk_s: float
    link_bytes: int
    disk_bytes: int
    overlap_loss: float = 0.0
    missed_s: float = 0.0
    missed_bytes: int = 0

    @property
    def total_s(self) -> float:
        fetched_s = max(self.link_s, self.disk_s)
        return max(fetched_s, self.compute_s + self.overlap_loss * fetched_s) + self.missed_s

    @property
    def limit(self) -> str:
        """The bottleneck of the step."""
        parts = {"compute": self.compute_s, "link": self.link_s, "disk": self.disk_s + self.missed_s}
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted times and rates. ``ttft_s``: of one prompt alone; ``ttft_batch_s``: of the last of a whole batch."""

    decode: Step
    tokens_per_s: float
    ttft_s: float
    ttft_batch_s: float
    prefill_tokens_per_s: float


def predict(model: Model, machine: Machine, workload: Workload, offloaded: Offloaded) -> Prediction:
    """Predicted speeds of ``model`` with ``offloaded`` weights."""
    decode = decode_step(model, machine, workload, offloaded)
    one_s = prompt_s(model, machine, workload, offloaded, 1)
    batch_s = prompt_s(model, machine, workload, offloaded, workload.batch) if workload.batch > 1 else one_s
    return Prediction(decode, workload.batch / decode.total_s, one_s, batch_s, workload.prompt / one_s)


def decode_step(model: Model, machine: Machine, workload: Workload, offloaded: Offloaded) -> Step:
    """One token for each sequence of the batch."""
    compute_s = _products_s(model, machine, workload.batch, workload.batch)
    reading_s = model.step_bytes(workload.length) / machine.cache_bytes_per_s(model.dtype)
    attending_s = machine.attend_step_s(model.step_operations(workload.length), workload.batch)
    compute_s += workload.batch * (reading_s + attending_s)
    return _step(model, machine, offloaded, compute_s, workload.batch)


def prompt_s(model: Model, machine: Machine, workload: Workload, offloaded: Offloaded, prompts: int) -> float:
    """Seconds of ``prompts`` prompts of the workload, one after the other, in forwards of at most ``Workload.piece``
    tokens, each of which fetches all offloaded weights anew.
    """
    total, done = prompts * workload.prompt, 0
    seconds = 0.0
    attend_s = machine.attend_s(model.attended or model.dtype, prompts * model.prompt_pair_operations(workload.prompt))
    while done < total:
        tokens = min(max(1, workload.step_tokens), total - done)
        ended = max(1, (done + tokens) // workload.prompt - done // workload.prompt)
        compute_s = _products_s(model, machine, tokens, ended) + attend_s * tokens / total
        seconds += _step(model, machine, offloaded, compute_s, tokens).total_s
        done += tokens
    return seconds


def _products_s(model: Model, machine: Machine, tokens: int, logits: int) -> float:
    """Seconds of all matrix products of a forward, and of what layers cost besides."""
    dense = sum(layer.multiplied for layer in model.layers)
    seconds = _multiply_s(model, machine, DENSE, dense, tokens)
    seconds += _multiply_s(model, machine, HEAD, model.head_reads, logits)
    for layer, count in _alike(model):
        met = layer.distinct_experts(tokens)
        if met:
            rows = max(1.0, tokens * layer.experts_per_token / met)
            seconds += count * _multiply_s(model, machine, EXPERTS, met * layer.expert_parameters, rows)
            seconds += count * (machine.mixture_s + met * machine.expert_s)
    return seconds + _besides_s(model, machine, tokens, logits)


def _multiply_s(model: Model, machine: Machine, part: str, parameters: float, rows: float) -> float:
    """Seconds to multiply with ``parameters`` of a part of the model, in the part's mix of formats and widths."""
    times = machine.format_times(model.dtype, model.format_shares(part), rows)
    times = max(times + machine.narrow_times(model.dtype, model.narrow_outputs(part), rows), 0.0)
    return machine.multiply_s(model.dtype, parameters, rows) * times


def _besides_s(model: Model, machine: Machine, tokens: int, sequences: int) -> float:
    """Seconds of a forward besides products and reading keys."""
    each = machine.layer_s + max(0, sequences - 1) * machine.sequence_s
    seconds = machine.step_s + len(model.layers) * each
    seconds += sequences * model.vocab * machine.logit_s
    if machine.elements_per_s:
        inner = sum(inner_parameters(layer) for layer in model.layers) / (_GATED * model.hidden)
        seconds += tokens * (len(model.layers) * model.hidden + inner) / machine.elements_per_s
    return seconds


def inner_parameters(layer: Layer) -> int:
    """Parameters of the feed-forward part that one token uses; over the model's width, `_GATED` times its inner one."""
    dense = layer.parameters.get(MLP, 0) + layer.parameters.get(SHARED, 0)
    return dense + layer.experts_per_token * layer.expert_parameters


def _alike(model: Model) -> list[tuple[Layer, int]]:
    """Distinct layers with experts, and how many layers are like each."""
    found: dict[tuple[int, int, int, int], tuple[Layer, int]] = {}
    for layer in model.layers:
        if layer.experts:
            key = (layer.experts, layer.experts_per_token, layer.expert_parameters, layer.expert_bytes)
            first, count = found.get(key, (layer, 0))
            found[key] = (first, count + 1)
    return list(found.values())


def _step(model: Model, machine: Machine, offloaded: Offloaded, compute_s: float, tokens: int) -> Step:
    met_bytes = sum(count * layer.distinct_experts(tokens) * layer.expert_bytes for layer, count in _alike(model))
    missed_bytes = int(met_bytes * offloaded.missed_share)
    return Step(
        compute_s=compute_s + offloaded.mapped_bytes * machine.mapped_byte_s,
        link_s=offloaded.link_bytes / machine.link_in if machine.has_device else 0.0,
        disk_s=_over(offloaded.disk_bytes, machine.disk_bytes_per_s),
        link_bytes=offloaded.link_bytes,
        disk_bytes=offloaded.disk_bytes,
        overlap_loss=machine.overlap_loss_of(tokens),
        missed_s=_over(missed_bytes, machine.disk_bytes_per_s),
        missed_bytes=missed_bytes,
    )


def _over(nbytes: int, bytes_per_s: float) -> float:
    if not nbytes:
        return 0.0
    return nbytes / bytes_per_s if bytes_per_s else float("inf")
