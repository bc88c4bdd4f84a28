"""The two ends of a request: what a prompt is made of, and when and with what a completion ends."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any

from stowage.core.key import tenant_namespace
from stowage.engine.request import Completion, Delta, Progress
from stowage.engine.sequence import Phase, Sequence
from stowage.errors import RequestError
from stowage.models.layout import ModelLayout

_TRIAL = "stowage"


def prompt_tokens(prompt: Any, tokenizer: Any, layout: ModelLayout) -> list[int]:
    """Token ids of a prompt: text, token ids, or chat messages (``[{"role": ..., "content": ...}]``, through the
    model's template).

    Raises ``RequestError`` for an empty prompt, one longer than the context, a token outside the vocabulary, or text
    without a tokenizer.
    """
    tokens = tokenize(prompt, tokenizer)
    if not tokens:
        raise RequestError("the prompt is empty; give at least one token.")
    if len(tokens) > layout.context_tokens:
        raise RequestError(
            f"the prompt is {len(tokens)} tokens long, above the context of {layout.context_tokens}: shorten it."
        )
    wrong = next((t for t in tokens if not 0 <= t < layout.vocab), None)
    if wrong is not None:
        raise RequestError(f"token {wrong} is outside the model's vocabulary of {layout.vocab}.")
    if layout.placeholders and not layout.placeholders.isdisjoint(tokens):
        picture = next(t for t in tokens if t in layout.placeholders)
        raise RequestError(f"token {picture} stands for a picture or a sound, and of this model only text is run.")
    return tokens


def tokenize(prompt: Any, tokenizer: Any) -> list[int]:
    """``prompt_tokens`` without its checks of length and vocabulary. Raises ``RequestError``."""
    if isinstance(prompt, Items) and not isinstance(prompt, str | bytes) and all(isinstance(t, int) for t in prompt):
        return list(prompt)
    if tokenizer is None:
        raise RequestError("this model has no tokenizer; give the prompt as token ids.")
    if isinstance(prompt, str):
        ids: list[int] = tokenizer(_encodable(prompt))["input_ids"]
        return list(ids)
    if not isinstance(prompt, Items) or isinstance(prompt, bytes) or not all(map(_is_message, prompt)):
        raise RequestError("a prompt is text, a list of token ids, or a list of messages with role and content.")
    return _apply_chat_template(prompt, tokenizer)


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    return isinstance(content, str) or (isinstance(content, list) and all(isinstance(part, dict) for part in content))


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the prompt is no text: it has half a surrogate pair at {error.start}.") from error
    return text


def _apply_chat_template(messages: Any, tokenizer: Any) -> list[int]:
    from jinja2 import TemplateError

    if not getattr(tokenizer, "chat_template", None):
        raise RequestError("this model's tokenizer has no chat template; give the prompt as text.")
    try:
        if _takes_parts(tokenizer):
            messages = [{**m, "content": _parts(m["content"])} for m in messages]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:  # as values in it may be odd
        raise RequestError(f"the model's chat template refuses these messages: {error}") from error
    return list(tokenizer(_encodable(text), add_special_tokens=False)["input_ids"])


def _takes_parts(tokenizer: Any) -> bool:
    """Whether the template leaves out what is given as plain text, or fails at it, and takes lists of parts: so do some
    of models that take pictures.
    """
    from jinja2 import TemplateError

    for content in (_TRIAL, _parts(_TRIAL)):
        try:
            if _TRIAL in tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False):
                return content is not _TRIAL
        except (TemplateError, TypeError):
            continue
    return False


def _parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def namespace_of(engine: bytes, salt: str | bytes) -> bytes:
    """The namespace of a request's keys: requests with different salts share nothing. Raises ``RequestError``."""
    if not isinstance(salt, str | bytes):
        raise RequestError(f"a salt is text or bytes, not {type(salt).__name__}.")
    try:
        return tenant_namespace(engine, salt)
    except ValueError as error:
        raise RequestError(f"this salt has no UTF-8 form ({error}); give it as bytes.") from error


def is_over(sequence: Sequence, token: int, eos: frozenset[int]) -> str:
    """Why ``sequence`` ends with ``token``, or an empty string."""
    params = sequence.params
    if sequence.text.stopped or token in params.stop_token_ids or (token in eos and not params.ignore_eos):
        return "stop"
    if len(sequence.tokens) - sequence.prompt_tokens >= sequence.new_tokens_max:
        return "length"
    return ""


def piece(sequence: Sequence, text: str) -> Delta:
    """What the token just drawn brings: ``text`` is what it made certain."""
    first = len(sequence.tokens) == sequence.prompt_tokens + 1
    return Delta(
        text,
        sequence.tokens[-1:],
        logprobs=sequence.logprobs[-1:],
        prompt_logprobs=sequence.prompt_logprobs if first else (),
    )


def last_piece(sequence: Sequence, text: str, reason: str) -> Delta:
    """The end of a sequence: with its last token, unless it was cancelled between two."""
    done = complete(sequence, reason)
    return Delta(text, [], done) if reason == "cancelled" else replace(piece(sequence, text), completion=done)


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
    )
