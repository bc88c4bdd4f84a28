"""A request's handle, its deltas, its progress and its completion."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from stowage.engine.sampling import TokenLogprob
from stowage.errors import RequestError, StowageError

logger = logging.getLogger("stowage.engine")


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request.

    ``finish_reason``: ``stop`` (end of sequence, stop token or stop string), ``length``, ``cancelled``.
    ``stop_text``: the stop string that ended it.
    ``reused_tokens``: prompt tokens that were not computed, by where they came from (``device``, ``host``, ``disk``).
    ``prompt_logprobs``: one for each prompt token, ``None`` where there is none: the first, and those before
    ``prompt_logprobs_from``. ``ttft_s``: seconds from submission to the first token. ``decode_tokens_per_s``: tokens
    after the first over the seconds that they took, 0 for a single token. ``exact``: its bits do not depend on tiers,
    nor on what was computed beside it (``docs/internals.md#exact-answers``).
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    reused_tokens: Mapping[str, int]
    ttft_s: float
    decode_tokens_per_s: float
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    preemptions: int = 0
    exact: bool = False
    stop_text: str | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a completion as it grows: text that is certain, and the tokens since the last piece (with their
    log-probabilities, where those were asked for). The first has ``prompt_logprobs``, the last ``completion``.
    """

    text: str
    token_ids: list[int]
    completion: Completion | None = None
    error: StowageError | None = None
    logprobs: Sequence[TokenLogprob] = ()
    prompt_logprobs: Sequence[TokenLogprob | None] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a request is. ``phase``: ``waiting``, ``loading`` (its prefix is on its way), ``computing`` (its prompt),
    ``answering``, ``preempted``, ``finished``. ``reused_tokens`` as in ``Completion``, empty while it is not known;
    ``computed_tokens``: the other tokens of the prompt, as far as they are computed; ``new_tokens``: of the answer.

    Seconds after its submission, ``None`` while it has not happened: ``admitted_s`` its prefix was looked up,
    ``started_s`` its prefix was in place, ``first_token_s``, ``finished_s``; ``now_s`` is the time of asking.
    """

    phase: str
    prompt_tokens: int
    reused_tokens: Mapping[str, int]
    computed_tokens: int
    new_tokens: int
    preemptions: int
    now_s: float
    admitted_s: float | None
    started_s: float | None
    first_token_s: float | None
    finished_s: float | None


@dataclass(eq=False, slots=True)
class Request:
    """The handle of a submitted prompt. ``on_delta`` is called on the engine's thread and must not block; when it
    raises, the request ends with that as its error. ``progress`` says how far it is: at any time, from any thread,
    without waiting for the engine.
    """

    id: int
    on_delta: Callable[[Delta], None] | None
    progress: Callable[[], Progress]
    completion: Completion | None = None
    error: StowageError | None = None
    cancelled: bool = False
    _done: threading.Event = field(default_factory=threading.Event)

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the request has ended, at most ``timeout_s``; whether it has."""
        return self._done.wait(timeout_s)

    def result(self) -> Completion:
        """The completion of a request that has ended. Raises the request's own error."""
        if self.error is not None:
            raise self.error
        assert self.completion is not None, "the request has not ended"
        return self.completion

    def deliver(self, delta: Delta) -> None:
        """Pass a delta to ``on_delta``; called by the engine. Never raises: an ``on_delta`` that raises is not called
        again, and the engine cancels the request before the next step.
        """
        over = delta.completion is not None or delta.error is not None
        if over:
            self.completion, self.error = delta.completion, self.error or delta.error
        try:
            if self.on_delta is not None:
                with torch.inference_mode(False):  # what it does with torch is its own affair
                    self.on_delta(delta)
        except BaseException as error:  # it must not stop the engine, which other requests use
            logger.warning("on_delta raised: its request ends", exc_info=True, extra={"stowage_event": "on-delta"})
            self.on_delta, self.cancelled = None, True
            self.error = self.error or _raised(error)
        if over:
            self._done.set()

    def end(self, error: StowageError) -> None:
        """Wake waiting threads with ``error``, before any ``on_delta`` is called."""
        self.error = self.error or error
        self._done.set()


def _raised(cause: BaseException) -> RequestError:
    error = RequestError(f"on_delta raised {cause!r}, so this request was ended; no other one is affected.")
    error.__cause__ = cause
    return error


def failed_alone(cause: BaseException) -> StowageError:
    """The error of a request that failed alone."""
    error = StowageError(f"this request failed ({cause!r}), and no other one with it; the log has the traceback.")
    error.__cause__ = cause
    return error
