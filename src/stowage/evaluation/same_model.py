"""Checks that the engine computes the same model as Transformers, up to a measured rounding error.

The checkpoint is loaded again after the engine is closed, so weights that were wrong in its memory are seen. Of each
prompt and its answer the log-probabilities that the engine reported are compared with what Transformers computes in
float32. Transformers' own errors in the engine's dtype, with this model and these tokens, say how large errors of
rounding are: the largest of four runs, of which one computes prompts in the engine's pieces, since states of recurrent
layers that are rounded more often have larger errors, and two have embeddings that are rounded otherwise. The engine's
error may be that, times a small factor. Medians are taken, of prompts and answers by themselves; and of prompts the
root mean square, which sees what is wrong in few tokens, as at the end of a window. Of answers it says little: a router
that chooses another expert after rounding changes all that follows.

A model in float32, or one that would not fit into memory in float32, is the reference itself, and the factor is larger.
Not seen is what both sides share: a damaged checkpoint, and windows and rotary scaling beyond the longest prompt.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from stowage.config.memory import ram_total_bytes
from stowage.engine.request import Completion
from stowage.engine.sampling import TokenLogprob
from stowage.evaluation import widened
from stowage.models.state_access import forward, keeper_of
from stowage.weights.quantized.modules import is_packed

Times = Mapping[tuple[str, str], float]
"""By part (``prompt`` or ``answer``) and measure (``median`` or ``rms``) how many times Transformers' own error."""
WIDE_TIMES: Times = {("prompt", "median"): 1.5, ("prompt", "rms"): 2.0, ("answer", "median"): 1.5}
"""Where the reference is computed in float32."""
SELF_TIMES: Times = dict.fromkeys(WIDE_TIMES, 2.5)
"""Where a model is its own reference."""
PARTS = ("prompt", "answer")
_LEAST: Mapping[torch.dtype, float] = {torch.float32: 1e-4}
"""The least bound: on a few prompts Transformers' own error may be small by luck. Real errors are far larger."""
_APART_TIMES = 4.0
"""How many times the largest error of all two runs of one token may be apart."""
_SINGLES = 8
"""Of the prompt's last tokens, that Transformers computes one by one where the engine has no pieces."""
_MOVED_EVERY, _MOVED_AT = 16, (3, 11)
_ROWS = 64
_SHARE_MOST = 0.9

Answers = Sequence[tuple[Sequence[int], Completion]]
"""Prompts, and what the engine gave with log-probabilities of the answer, and perhaps of the prompt."""
_Found = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Error:
    """A measured difference of log-probabilities (natural logarithm): ``measure`` (``median`` or ``rms``) of the
    engine's differences from the reference in one ``part`` (``prompt`` or ``answer``), ``own``: of Transformers', and
    the ``bound`` of the first.
    """

    part: str
    measure: str
    engine: float
    own: float
    bound: float

    @property
    def small(self) -> bool:
        """Never with a NaN."""
        return self.engine <= self.bound


@dataclass(frozen=True, slots=True)
class SameModel:
    """Whether both run one model. ``reference``: the dtype that the reference was computed in; ``fits``: false where
    float32 would have been better and was too large; ``tolerance``: how far single log-probabilities may be apart in
    two runs whose sums have another order; ``finite``: whether Transformers computes numbers.
    """

    errors: tuple[Error, ...]
    reference: str
    fits: bool
    tolerance: float
    finite: bool

    @property
    def same(self) -> bool:
        return self.finite and all(error.small for error in self.errors)

    def as_json(self) -> dict[str, Any]:
        errors = [asdict(error) | {"small": error.small} for error in self.errors]
        said = {"reference": self.reference, "float32_fits": self.fits, "finite": self.finite}
        return {"same": self.same, **said, "errors": errors}


class _Asked:
    """A prompt and its answer. ``reports``: rows, tokens and log-probabilities of all that was said of a part."""

    def __init__(self, prompt: Sequence[int], answer: Completion) -> None:
        self.prompt_tokens = len(prompt)
        self.tokens = [*prompt, *answer.token_ids[:-1]]
        self.reports = {
            "prompt": _listed(dict(enumerate((answer.prompt_logprobs or ())[1:]))),
            "answer": _listed(dict(enumerate(answer.logprobs or (), start=len(prompt) - 1))),
        }

    def pieces(self, piece_tokens: int) -> list[int]:
        """Sizes of forwards: of the prompt in pieces, 0: all but the last tokens at once; of the rest one by one."""
        whole = self.prompt_tokens if piece_tokens else max(1, self.prompt_tokens - _SINGLES)
        step = piece_tokens or whole
        sizes = [min(step, whole - begin) for begin in range(0, whole, step)]
        return sizes + [1] * (len(self.tokens) - whole)

    def pick(self, logits: Tensor) -> dict[str, Tensor]:
        """Of ``logits`` ``[tokens, vocab]`` the log-probabilities of what was reported, by part."""
        total = torch.cat([logits[at : at + _ROWS].logsumexp(-1) for at in range(0, len(logits), _ROWS)])
        return {part: logits[rows, tokens] - total[rows] for part, (rows, tokens, _) in self.reports.items()}


def _listed(reports: Mapping[int, TokenLogprob | None]) -> tuple[Tensor, Tensor, Tensor]:
    rows, tokens, logprobs = list[int](), list[int](), list[float]()
    for row, report in reports.items():
        said = {**dict(report.top), report.token_id: report.logprob} if report is not None else {}
        rows += [row] * len(said)
        tokens += said
        logprobs += said.values()
    return torch.tensor(rows, dtype=torch.long), torch.tensor(tokens, dtype=torch.long), torch.tensor(logprobs)


@torch.inference_mode()
def compare(
    load: Callable[[str], Any],
    answers: Answers,
    dtype: str = "auto",
    *,
    piece_tokens: int = 0,
    self_times: Times = SELF_TIMES,
) -> SameModel:
    """``load``: gives the model in a dtype, with Transformers' own attention. ``dtype``: the engine's;
    ``piece_tokens``: of prompts, that the engine computes at once; 0: any number. ``self_times``: instead of
    ``SELF_TIMES``.
    """
    asked = [_Asked(prompt, answer) for prompt, answer in answers]
    model = load(dtype)
    computed = model.dtype
    runs = [_computed(model, asked), _computed(model, asked, lambda one: one.pieces(piece_tokens))]
    for at in _MOVED_AT:
        with _rounded_otherwise(model, at):
            runs.append(_computed(model, asked))
    if computed is torch.float32:
        return _judged(asked, runs[0], runs[1:], computed, self_times, wide=False, fits=True)
    if not _fits(model):
        return _judged(asked, runs[0], runs[1:], computed, self_times, wide=False, fits=False)
    if is_packed(model):
        del model
        gc.collect()  # before the next is there
        reference = _computed(load("float32"), asked)
    else:
        with widened.widened(model):
            reference = _computed(model, asked)
    return _judged(asked, reference, runs, computed, WIDE_TIMES, wide=True, fits=True)


def _judged(
    asked: Sequence[_Asked],
    reference: _Found,
    own: Sequence[_Found],
    computed: torch.dtype,
    times: Times,
    *,
    wide: bool,
    fits: bool,
) -> SameModel:
    """``own``: what Transformers computes in ``computed``, the engine's dtype; ``wide``: in float32 instead."""
    least = _LEAST.get(computed, 0.0)
    engine = {part: torch.cat([one.reports[part][-1] for one in asked]) for part in PARTS}
    errors = []
    for (part, measure), most in times.items():
        part = part if len(engine[part]) else "answer"  # where prompts were not scored
        theirs = max(_measured(measure, found[part] - reference[part]) for found in own)
        ours = _measured(measure, engine[part] - reference[part])
        errors.append(Error(part, measure, ours, theirs, max(most * theirs, least)))
    largest = max(float((found["answer"] - reference["answer"]).abs().max()) for found in own)
    rounding = float(reference["answer"].abs().max()) * torch.finfo(computed).eps
    return SameModel(
        tuple(dict.fromkeys(errors)),
        str(torch.float32 if wide else computed).removeprefix("torch."),
        fits,
        max(_APART_TIMES * largest, rounding, least),
        all(bool(values.isfinite().all()) for found in (reference, *own) for values in found.values()),
    )


def _measured(measure: str, differences: Tensor) -> float:
    return float(differences.abs().median() if measure == "median" else differences.square().mean().sqrt())


def _computed(model: Any, asked: Sequence[_Asked], sizes: Callable[[_Asked], list[int]] | None = None) -> _Found:
    """What Transformers computes, by part. ``sizes``: of the forwards; a sequence is one forward otherwise."""
    found: dict[str, list[Tensor]] = {part: [] for part in PARTS}
    with _capping(model):
        for one in asked:
            logits = _logits(model, one.tokens, sizes(one) if sizes is not None else [len(one.tokens)])
            for part, values in one.pick(logits).items():
                found[part].append(values)
    return {part: torch.cat(values) for part, values in found.items()}


def _logits(model: Any, tokens: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Logits ``[tokens, vocab]``, computed in pieces of these sizes."""
    cache, begin, rows = keeper_of(model).fresh(model.config), 0, []
    for size in sizes:
        rows.append(forward(model, tokens[begin : begin + size], begin, cache, every_logit=True))
        begin += size
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _fits(model: Any) -> bool:
    """Whether there is memory for what float32 takes beside the model."""
    nbytes = widened.float32_bytes(model, at_once=is_packed(model))
    if model.device.type == "cuda":
        return bool(nbytes <= _SHARE_MOST * torch.cuda.mem_get_info(model.device)[0])
    held = sum(tensor.nbytes for tensor in {id(t): t for t in model.state_dict().values()}.values())
    return bool(held + nbytes <= _SHARE_MOST * ram_total_bytes())


@contextmanager
def _capping(model: Any) -> Iterator[None]:
    """Scores of attention are capped where the config says so: torch's own attention, which Transformers 5.17 takes by
    itself, leaves that out without a word.
    """
    config = model.config.get_text_config()
    before = config._attn_implementation
    leaves_out = before == "sdpa" and bool(getattr(config, "attn_logit_softcapping", None))
    if leaves_out:
        config._attn_implementation = "eager"
    try:
        yield
    finally:
        config._attn_implementation = before


@contextmanager
def _rounded_otherwise(model: Any, at: int) -> Iterator[None]:
    """One number of sixteen of an embedding is the next that its dtype has."""

    def moved(_module: Any, _inputs: Any, embedded: Tensor) -> Tensor:
        chosen = torch.arange(embedded.shape[-1], device=embedded.device) % _MOVED_EVERY == at
        return embedded * (1 + torch.finfo(embedded.dtype).eps * chosen).to(embedded.dtype)

    hook = model.get_input_embeddings().register_forward_hook(moved)
    try:
        yield
    finally:
        hook.remove()
