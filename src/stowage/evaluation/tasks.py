"""Scored tasks with and without offloading: questions from a file, with every tier off and on.

    questions ──> every tier off ──> computed and stored ──> from host memory ──> from a lower tier, after a restart

The first questions of the file are few-shot examples before each of the others, as in task harnesses: a long prefix
that all share. Each run gives the share of right answers and the perplexity of the reference answers. A run passes when
every answer is the same as with every tier off, except for tokens that were equally likely.

A question is a line of JSON. ``{"question": ..., "answer": ...}`` is asked as "Question: ... Answer:" (the format of
GSM8K; Cobbe et al., arXiv:2110.14168: what follows "####" is the answer, and numbers are compared as numbers);
``{"prompt": ..., "answer": ...}`` as it stands.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.engine.request import Completion
from stowage.engine.sampling_params import SamplingParams
from stowage.errors import ConfigError, ModelError, RequestError
from stowage.evaluation import runs as trials

SHOTS, NEW_TOKENS = 5, 256
_MARK = "####"
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_AT_ONCE = 64
"""Prompts that are submitted to the engine together."""


@dataclass(frozen=True, slots=True)
class Question:
    """One scored question. ``prompt``: what the model is asked; ``reference``: the answer, with its leading space."""

    prompt: str
    reference: str
    stop: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """All questions once. ``right``: answered as the reference. ``changed``: other tokens than with every tier off.
    ``unexplained``: where the other token was not as likely, or log-probabilities differ. ``perplexity``: of the
    references, per token.
    """

    name: str
    right: int
    accuracy: float
    perplexity: float
    changed: int
    unexplained: int
    prompt_tokens: int
    reused_tokens: dict[str, int]
    seconds: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The results of a scored task. ``runs``: the first one has every tier off. ``parity``: all others pass."""

    questions: int
    dtype: str
    runs: tuple[Run, ...]
    parity: bool

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Answers:
    written: list[Completion]
    scored: list[Completion]
    seconds: float


def evaluate(
    model: str | Path,
    memory: Memory,
    asked: Sequence[Question],
    *,
    max_new_tokens: int = NEW_TOKENS,
    progress: Callable[[str, int, int], None] = lambda _name, _done, _all: None,
    **computed: Any,
) -> Evaluation:
    """Ask all questions, with every tier off and on. ``progress`` is told the run, how many answers there are, of how
    many; ``computed``: how, as ``Engine`` takes it. Raises ModelError for a model without a tokenizer, RequestError for
    a question that does not fit, and whatever opening the engine raises.
    """
    runs: list[tuple[str, str, _Answers]] = []
    opened = partial(trials.opened, model, computed=computed)

    def take(name: str, engine: Engine, tier: str = "") -> None:
        """One run, in which ``tier`` has to serve something."""
        engine.forget_costs()
        runs.append((name, tier, _ask(engine, asked, max_new_tokens, lambda done, of: progress(name, done, of))))

    with trials.temporary_directory() as directory:
        tiered = trials.with_tiers(memory, directory)
        with opened(trials.plain(memory)) as engine:
            if engine.tokenizer is None:
                raise ModelError(f"{model} has no tokenizer, and questions are text: add its tokenizer's files.")
            computed_in = str(engine.model.dtype).removeprefix("torch.")
            exact = engine.exact
            take("every tier off", engine)
        with opened(tiered) as engine:
            take("computed and stored", engine)
            trials.leave_only(engine, "host")
            take("from host", engine, "host")
            trials.flush(engine)
        for tier in trials.lower_tiers(tiered):
            with opened(trials.with_only(tiered, tier)) as engine:
                take(f"from {tier}, after a restart", engine, tier)
    allowed = trials.tolerance(computed_in, exact)
    compared = tuple(_compare(name, asked, found, runs[0][2], allowed) for name, _, found in runs)
    served = all(run.reused_tokens.get(tier) for run, (_, tier, _) in zip(compared, runs, strict=True) if tier)
    alike = all(abs(math.log(run.perplexity / compared[0].perplexity)) <= allowed for run in compared)
    return Evaluation(len(asked), computed_in, compared, served and alike and not any(r.unexplained for r in compared))


def _ask(
    engine: Engine, asked: Sequence[Question], max_new_tokens: int, progress: Callable[[int, int], None]
) -> _Answers:
    """Write an answer to each question, and score its reference."""
    assert engine.tokenizer is not None
    began_s = time.perf_counter()
    answers = _Answers([], [], 0.0)
    for begin in range(0, len(asked), _AT_ONCE):
        writing, scoring = [], []
        for question in asked[begin : begin + _AT_ONCE]:
            tokens = engine.prompts.read(question.prompt)
            whole = tokens + _reference(engine.tokenizer, question)
            params = SamplingParams(max_new_tokens=max_new_tokens, logprobs=5, stop=question.stop)
            score = SamplingParams(max_new_tokens=1, prompt_logprobs=0, prompt_logprobs_from=len(tokens))
            writing.append((tokens, params))
            scoring.append((whole, score))
        for into, jobs in ((answers.written, writing), (answers.scored, scoring)):
            handles = [engine.submit(tokens, params) for tokens, params in jobs]
            try:
                for handle in handles:
                    while not handle.wait(0.5):
                        pass
                    into.append(handle.result())
                    progress(len(answers.written) + len(answers.scored), 2 * len(asked))
            finally:
                for handle in handles:
                    engine.cancel(handle)
    return _Answers(answers.written, answers.scored, time.perf_counter() - began_s)


def _reference(tokenizer: Any, question: Question) -> list[int]:
    tokens = list(tokenizer.encode(question.reference, add_special_tokens=False))
    if not tokens:
        raise RequestError(f"the answer {question.reference!r} has no tokens in this model's vocabulary: leave it out.")
    return tokens


def _compare(name: str, asked: Sequence[Question], found: _Answers, off: _Answers, limit: float) -> Run:
    pairs = list(zip(off.written, found.written, strict=True))
    explained = [trials.difference(a, b) <= limit and trials.near_tie(a, b, limit) for a, b in pairs]
    scores = [p.logprob for one in found.scored for p in one.prompt_logprobs or [] if p is not None]
    reused: dict[str, int] = {}
    for one in (*found.written, *found.scored):
        for tier, count in one.reused_tokens.items():
            reused[tier] = reused.get(tier, 0) + int(count)
    count_right = sum(right(q.reference, one.text) for q, one in zip(asked, found.written, strict=True))
    return Run(
        name=name,
        right=count_right,
        accuracy=count_right / len(asked),
        perplexity=math.exp(-sum(scores) / len(scores)),
        changed=sum(a.token_ids != b.token_ids for a, b in pairs),
        unexplained=explained.count(False),
        prompt_tokens=sum(one.prompt_tokens for one in (*found.written, *found.scored)),
        reused_tokens=reused,
        seconds=found.seconds,
    )


def right(reference: str, text: str) -> bool:
    """Whether ``text`` says what ``reference`` does: the number behind ``####`` where it has one (of a text without,
    its last number), else its first line, whatever case and spaces.
    """
    if _MARK not in reference:
        return _plain(text) == _plain(reference)
    wanted = _number(reference.rpartition(_MARK)[2])
    _, marked, said = text.partition(_MARK)
    return wanted is not None and (_number(said) if marked else _number(text, last=True)) == wanted


def _number(text: str, last: bool = False) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1 if last else 0].replace(",", "")) if found else None


def _plain(text: str) -> str:
    line = next((line for line in text.splitlines() if line.strip()), "")
    return " ".join(line.casefold().split()).rstrip(".")


def questions(path: Path, shots: int = SHOTS, limit: int | None = None) -> list[Question]:
    """The questions of a file, the first ``shots`` of which are examples for the others; at most ``limit``.

    Raises ConfigError, which names the line, when the file cannot be used.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--eval {path} cannot be read ({error}). Give a file with one JSON object per line."
        ) from error
    items = [_item(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if len(items) <= shots:
        raise ConfigError(
            f"--eval {path} has {len(items)} questions, and {shots} of them are examples (--shots): none is left to "
            "ask. Give a longer file, or a smaller --shots."
        )
    before = "".join(f"{prompt}{answer}\n\n" for prompt, answer, _ in items[:shots])
    rest = items[shots:] if limit is None else items[shots : shots + limit]
    return [
        Question(before + prompt, answer, ("\n\n", "Question:") if framed else ()) for prompt, answer, framed in rest
    ]


def _item(path: Path, number: int, line: str) -> tuple[str, str, bool]:
    """Prompt, reference, and whether it is a question in our frame."""
    try:
        item = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"--eval {path}, line {number}: no JSON ({error}). Give one JSON object per line.") from error
    fields = item if isinstance(item, dict) else {}
    asked = {name: fields[name] for name in ("question", "prompt") if isinstance(fields.get(name), str)}
    answer = fields.get("answer")
    if not asked or not isinstance(answer, str) or not answer.strip():
        raise ConfigError(
            f'--eval {path}, line {number}: it needs "answer" and "question" (or "prompt"), texts that are not empty.'
        )
    if "question" in asked:
        return f"Question: {asked['question']}\nAnswer:", f" {answer}", True
    return asked["prompt"], answer, False
