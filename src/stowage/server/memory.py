"""The memory of requests: bodies that arrive, what reading them takes, and answers that wait for their clients.

    body --take--> text, tokenizer --take--> prompts ... answer --note--> client

Owns one sum for the whole server, and its ceiling. What is to be read is asked for before work on it begins, and is
refused beyond the ceiling. What the engine computes cannot be refused: it is noted, and beyond the ceiling the request
that holds most has to go. An eighth is set aside for small requests, and one client has at most three quarters.
Numbers are estimates that err on the large side, from the sizes of Python's objects.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from stowage.engine.engine import Delta
from stowage.engine.sampling import TokenLogprob
from stowage.server.apis.ask import Ask
from stowage.server.refusal import ApiError

SMALL_BYTES: Final = 1 << 20
"""Requests that hold no more may use what is set aside."""
TOKENIZER_BYTES: Final = 100
"""Of a tokenizer for each character: the normalized text with its offsets, and the tokens with theirs."""
_COPIES, _WIDE_COPIES = 4, 12
"""Of a text, while it is read: of the body, of its value, and of what a chat template makes of it. One character that
is not ASCII may make four bytes of each.
"""
_VALUE_BYTES, _OBJECT_BYTES, _TOKEN_BYTES, _LOGPROB_BYTES, _PIECE_BYTES = 72, 240, 72, 160, 512
_ENCODED_BYTES: Final = 800
"""Of one log-probability in an answer: as an object with its bytes, and as JSON."""


class RequestMemory:
    """For any thread. ``held_bytes`` is what all requests hold now."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.refused = 0
        self._of: dict[str, int] = {}
        self._lock = threading.Lock()

    def take(self, client: str, nbytes: int, *, small: bool) -> bool:
        """Whether ``client`` may hold so many more bytes; then it does."""
        with self._lock:
            held = self._of.get(client, 0)
            most = self.limit_bytes if small else self.limit_bytes - self.limit_bytes // 8
            if self.held_bytes + nbytes > most or (not small and held + nbytes > self.alone_bytes):
                self.refused += 1
                return False
            self._of[client] = held + nbytes
            self.held_bytes += nbytes
            return True

    def note(self, client: str, nbytes: int) -> bool:
        """``client`` holds so many more bytes, or fewer. Whether that is within the ceiling."""
        with self._lock:
            held = self._of.pop(client, 0) + nbytes
            if held:
                self._of[client] = held
            self.held_bytes += nbytes
            return self.held_bytes <= self.limit_bytes

    @property
    def alone_bytes(self) -> int:
        """What one client may hold."""
        return self.limit_bytes - self.limit_bytes // 4


class Reservation:
    """What one request holds. Gives it back when it is closed; then nothing can be taken any more."""

    def __init__(self, memory: RequestMemory, client: str) -> None:
        self.client = client
        self.bytes = 0
        self._memory = memory
        self._closed = False
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> None:
        """Before so many bytes are used. Raises ApiError: 429 where there will be room later, 413 where never."""
        with self._lock:
            if self._closed:
                return
            small = self.bytes + nbytes <= SMALL_BYTES
            if self._memory.take(self.client, nbytes, small=small):
                self.bytes += nbytes
                return
        if self.bytes + nbytes > self._memory.alone_bytes:
            what = (
                f"Reading this request takes about {self.bytes + nbytes} bytes, and one client has at most "
                f"{self._memory.alone_bytes} of the server's request_memory. Send less at once."
            )
            raise ApiError(413, what, code="request_too_large", headers={"connection": "close"})
        raise ApiError(
            429, "Too many large requests at once; try again later.", code="rate_limit_exceeded",
            headers={"retry-after": "1", "connection": "close"},
        )  # fmt: skip

    def note(self, nbytes: int) -> bool:
        """So many bytes more, or fewer. Whether all is within the ceiling."""
        with self._lock:
            if self._closed:
                return True
            self.bytes += nbytes
            return self._memory.note(self.client, nbytes)

    def shrink(self, nbytes: int) -> None:
        """From now on it is no more than so many bytes."""
        self.note(min(0, nbytes - self.bytes))

    def tokenizing(self, check: Callable[[], None]) -> Callable[[int], None]:
        """For `Prompts.read`: called before so many characters are tokenized, and with 0 at the end. Calls `check`,
        which may raise, then takes what that needs instead of what was taken before.
        """
        taken = 0

        def begin(characters: int) -> None:
            nonlocal taken
            self.note(-taken)
            taken = 0
            if characters:
                check()
                self.take(TOKENIZER_BYTES * characters)
                taken = TOKENIZER_BYTES * characters

        return begin

    def close(self) -> None:
        """Closing again does nothing."""
        with self._lock:
            self._memory.note(self.client, -self.bytes)
            self.bytes, self._closed = 0, True


def bytes_to_read(body: bytes | bytearray) -> int:
    """What is held while a body is read as JSON, besides the body: its values, and texts in copies."""
    objects, values = body.count(b"{"), body.count(b",") + body.count(b"[") + body.count(b":")
    copies = _COPIES if body.isascii() and b"\\u" not in body else _WIDE_COPIES
    return copies * len(body) + _OBJECT_BYTES * objects + _VALUE_BYTES * (values + 1)


def bytes_asked(ask: Ask) -> int:
    """What is held of a request that was read, until its answer ends: for the server and for the engine."""
    return sum(_TOKEN_BYTES * len(prompt.tokens) + 4 * len(prompt.text) for prompt in ask.prompts) + _PIECE_BYTES * (
        ask.choices
    )


def bytes_of_piece(delta: Delta) -> int:
    """What a piece of an answer holds until it is sent."""
    nbytes = _PIECE_BYTES + 4 * len(delta.text) + _TOKEN_BYTES * len(delta.token_ids)
    if delta.completion is not None:
        nbytes += 4 * len(delta.completion.text) + _TOKEN_BYTES * len(delta.completion.token_ids)
    return nbytes + _LOGPROB_BYTES * (entries(delta.logprobs) + entries(delta.prompt_logprobs))


def bytes_encoded(logprobs: int, characters: int) -> int:
    """What it takes to make JSON of an answer."""
    return _ENCODED_BYTES * logprobs + 16 * characters


def entries(reports: Sequence[TokenLogprob | None]) -> int:
    """How many log-probabilities these are."""
    return sum(1 + len(report.top) for report in reports if report is not None)
