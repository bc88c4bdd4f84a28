"""Accounts for the memory of requests: bodies, what reading them takes, and answers that wait for their clients.

    body --take--> text, tokenizer --take--> prompts ... answer --note--> client

Owns one sum for the whole server, and its limit. Memory for reading is taken before the work begins, and refused above
the limit. What the engine computes cannot be refused: it is noted, and above the limit the request that holds the most
is ended. An eighth is reserved for small requests, and one client may hold at most three quarters. The numbers are
estimates from the sizes of Python objects, on the large side.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from stowage.engine.request import Delta
from stowage.engine.sampling import TokenLogprob
from stowage.server.api_errors import ApiError
from stowage.server.apis.generation_request import GenerationRequest

SMALL_BYTES: Final = 1 << 20
"""Requests that hold no more may use the reserved eighth."""
TOKENIZER_BYTES: Final = 100
"""What a tokenizer takes per character: the normalized text with its offsets, and the tokens with theirs."""
_COPIES, _WIDE_COPIES = 4, 12
"""Bytes per byte of a text while it is read: the body, its JSON value, and the chat template's output. The second
number is for texts that are not ASCII, which may take four bytes per character.
"""
_VALUE_BYTES, _OBJECT_BYTES, _TOKEN_BYTES, _LOGPROB_BYTES, _PIECE_BYTES = 72, 240, 72, 160, 512
_ENCODED_BYTES: Final = 800
"""What one log-probability of an answer takes: as an object with its bytes, and as JSON."""


class RequestMemory:
    """Thread-safe. ``held_bytes`` is what all requests hold now."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.refused = 0
        self._of: dict[str, int] = {}
        self._lock = threading.Lock()

    def take(self, client: str, nbytes: int, *, small: bool) -> bool:
        """Take ``nbytes`` for ``client`` if the limits allow it; returns whether they do."""
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
        """Add ``nbytes``, which may be negative, for ``client``. Returns whether the sum is within the limit."""
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
    """The memory of one request. Closing it returns the memory; after that nothing can be taken."""

    def __init__(self, memory: RequestMemory, client: str) -> None:
        self.client = client
        self.bytes = 0
        self._memory = memory
        self._closed = False
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> None:
        """Take ``nbytes`` before they are used. Raises ApiError: 429 where there is no room now, 413 where never."""
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
        """Add ``nbytes``, which may be negative. Returns whether the server's sum is within its limit."""
        with self._lock:
            if self._closed:
                return True
            self.bytes += nbytes
            return self._memory.note(self.client, nbytes)

    def shrink(self, nbytes: int) -> None:
        """Return all but ``nbytes``."""
        self.note(min(0, nbytes - self.bytes))

    def tokenizing(self, check: Callable[[], None]) -> Callable[[int], None]:
        """A callback for `Prompts.read`, which calls it with the number of characters before it tokenizes them, and
        with 0 at the end. It calls `check`, which may raise, and replaces what the call before took.
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
    """What parsing a JSON body takes besides the body: its values, and copies of texts."""
    objects, values = body.count(b"{"), body.count(b",") + body.count(b"[") + body.count(b":")
    copies = _COPIES if body.isascii() and b"\\u" not in body else _WIDE_COPIES
    return copies * len(body) + _OBJECT_BYTES * objects + _VALUE_BYTES * (values + 1)


def bytes_asked(request: GenerationRequest) -> int:
    """What a parsed request takes until its answer ends, in the server and in the engine."""
    return sum(
        _TOKEN_BYTES * len(prompt.tokens) + 4 * len(prompt.text) for prompt in request.prompts
    ) + _PIECE_BYTES * (request.choices)


def bytes_of_piece(delta: Delta) -> int:
    """What a piece of an answer takes until it is sent."""
    nbytes = _PIECE_BYTES + 4 * len(delta.text) + _TOKEN_BYTES * len(delta.token_ids)
    if delta.completion is not None:
        nbytes += 4 * len(delta.completion.text) + _TOKEN_BYTES * len(delta.completion.token_ids)
    return nbytes + _LOGPROB_BYTES * (entries(delta.logprobs) + entries(delta.prompt_logprobs))


def bytes_encoded(logprobs: int, characters: int) -> int:
    """What encoding an answer as JSON takes."""
    return _ENCODED_BYTES * logprobs + 16 * characters


def entries(reports: Sequence[TokenLogprob | None]) -> int:
    """The number of log-probabilities in these reports."""
    return sum(1 + len(report.top) for report in reports if report is not None)
