"""A request's namespace, deltas, finish reason and completion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from stowage.core.key import tenant_namespace
from stowage.engine.request import Completion, Delta, Progress
from stowage.engine.sequence import Phase, Sequence
from stowage.errors import RequestError


def namespace_of(engine: bytes, salt: str | bytes) -> bytes:
    """The namespace of a request's keys: requests with different salts share nothing. Raises ``RequestError``."""
    if not isinstance(salt, str | bytes):
        raise RequestError(f"a salt is text or bytes, not {type(salt).__name__}.")
    try:
        return tenant_namespace(engine, salt)
    except ValueError as error:
        raise RequestError(f"this salt has no UTF-8 form ({error}); give it as bytes.") from error


def finish_reason(sequence: Sequence, token: int, eos: frozenset[int]) -> str:
    """``stop`` or ``length`` if ``sequence`` ends with ``token``, else an empty string."""
    params = sequence.params
    ends = token in params.stop_token_ids or (token in eos and not params.ignore_eos)
    if ends or sequence.text.stopped or sequence.sampler.finished:
        return "stop"
    if len(sequence.tokens) - sequence.prompt_tokens >= sequence.new_tokens_max:
        return "length"
    return ""


def token_delta(sequence: Sequence, text: str) -> Delta:
    """The delta of the token just sampled; ``text``: characters that are final now."""
    first = len(sequence.tokens) == sequence.prompt_tokens + 1
    return Delta(
        text,
        sequence.tokens[-1:],
        logprobs=sequence.logprobs[-1:],
        prompt_logprobs=sequence.prompt_logprobs if first else (),
    )


def final_delta(sequence: Sequence, text: str, reason: str) -> Delta:
    """The last delta of a sequence, with its last token unless it was cancelled."""
    done = complete(sequence, reason)
    return Delta(text, [], done) if reason == "cancelled" else replace(token_delta(sequence, text), completion=done)


def progress_of(sequence: Sequence, clock: Callable[[], float]) -> Progress:
    """How far a sequence is. For any thread: every field is read once, and the engine may be changing the others."""
    times, reused = sequence.times, sequence.reused
    phase = sequence.phase.value
    if sequence.phase is Phase.RUNNING:
        phase = "answering" if times.first_token_s else "computing"

    def after(moment_s: float) -> float | None:
        return moment_s - times.arrived_s if moment_s else None

    return Progress(
        phase=phase,
        prompt_tokens=sequence.prompt_tokens,
        reused_tokens=dict(reused),
        computed_tokens=max(0, min(sequence.computed, sequence.prompt_tokens) - sum(reused.values())),
        new_tokens=len(sequence.tokens) - sequence.prompt_tokens,
        preemptions=sequence.preemptions,
        now_s=clock() - times.arrived_s,
        admitted_s=after(times.admitted_s),
        started_s=after(times.started_s),
        first_token_s=after(times.first_token_s),
        finished_s=after(times.finished_s),
    )


def complete(sequence: Sequence, reason: str) -> Completion:
    """The completion of a sequence that has ended."""
    times, new = sequence.times, sequence.new_tokens
    decode_s = times.finished_s - times.first_token_s
    return Completion(
        text=sequence.text.text,
        token_ids=new,
        finish_reason=reason,
        prompt_tokens=sequence.prompt_tokens,
        reused_tokens=dict(sequence.reused),
        ttft_s=max(0.0, times.first_token_s - times.arrived_s),
        decode_tokens_per_s=(len(new) - 1) / decode_s if len(new) > 1 and decode_s > 0 else 0.0,
        logprobs=sequence.logprobs if sequence.params.logprobs else None,
        prompt_logprobs=sequence.prompt_logprobs or None,
        preemptions=sequence.preemptions,
        exact=sequence.exact,
        stop_text=sequence.text.stop_text,
    )
