"""Brings chunks to and from a shared store, and asks it what it has: in batches, bounded, until a deadline.

Runs in the tier's event loop. Buffers that are lent are touched in short stretches without a wait between them: a value
is sealed into memory of our own before it is sent, and opened from such memory when all of it has come. So a transfer
can be given back the moment it is given up, whatever the network does, and what is still on its way touches nobody's
slot.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from stowage.core.prefix_search import Search
from stowage.errors import FormatError
from stowage.storage.flight import Flight
from stowage.storage.format import object_envelope
from stowage.storage.format.compression import Compression, packed_payload
from stowage.storage.format.protection import Protection
from stowage.storage.protocol import Inquiry, Transfer
from stowage.storage.remote.backend import Answer, Backend, Cause, Failure
from stowage.storage.remote.backoff import Backoff
from stowage.storage.remote.counters import Counters
from stowage.storage.remote.limiter import Limiter
from stowage.storage.remote.presence import Presence

TRIES_MAX: Final = 4
STAGING_BYTES: Final = 64 << 20
"""Values on their way, in memory of the tier's own, for each direction; one value may always be."""
RETRY_S: Final = 0.05
"""The longest pause before the first retry, doubled for each further one."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Under which name, in which seal and in which form chunks lie in the store."""

    namespace: bytes
    protection: Protection
    name_of: Callable[[bytes], str]
    random_bytes: Callable[[int], bytes]
    compression: Compression


class RemoteTransfers:
    """Transfers and look-ups of a shared tier. `health`: whether the store answers; `room`: whether it takes more."""

    def __init__(
        self,
        backend: Backend,
        identity: Identity,
        presence: Presence,
        counters: Counters,
        clock: Callable[[], float],
        request_timeout_s: float,
    ) -> None:
        bounds = backend.bounds
        self._backend = backend
        self._identity = identity
        self._presence = presence
        self._counters = counters
        self._request_timeout_s = request_timeout_s
        self._reads = Limiter(bounds.reads_max, STAGING_BYTES)
        self._writes = Limiter(bounds.writes_max, STAGING_BYTES)
        self._probes = Limiter(bounds.probes_max, STAGING_BYTES)
        self.health = Backoff(clock)
        self.room = Backoff(clock)

    # Loads

    async def load(self, flight: Flight) -> None:
        """Fill what comes. Ends when all is settled; cancelled, it leaves the rest as it is."""
        number = self._presence.begin()
        try:
            async with asyncio.TaskGroup() as group:
                for indices in self._batches(flight.transfer):
                    group.create_task(self._load(flight, indices, number))
        finally:
            self._presence.end(number)

    async def _load(self, flight: Flight, indices: list[int], number: int) -> None:
        transfer = flight.transfer
        names = [self._identity.name_of(transfer.keys[index]) for index in indices]
        lengths = [object_envelope.sealed_bytes(transfer.buffers[index].nbytes) for index in indices]

        def get(some: list[int]) -> Awaitable[Sequence[Answer]]:
            self._counters.add("read_calls")
            return self._backend.get([names[at] for at in some], [lengths[at] for at in some])

        async with self._reads.passing(sum(lengths)):
            answers = await self._ask(get, len(indices))
            for index, answer in zip(indices, answers, strict=True):
                self._open(flight, index, answer, number)

    def _open(self, flight: Flight, index: int, answer: Answer, number: int) -> None:
        transfer, identity = flight.transfer, self._identity
        key, buffer = transfer.keys[index], transfer.buffers[index]
        if answer is None:
            self._fail(flight, "vanished", "absent")
        elif isinstance(answer, Failure):
            self._presence.unanswered(key)
            self._fail(flight, "read_errors", "failed", answer.text)
        else:
            try:
                value = memoryview(answer)
                mask = object_envelope.unseal(value, key, identity.namespace, identity.protection, buffer)
            except FormatError as error:
                self._fail(flight, _kind(error), "corrupt", str(error))
            else:
                flight.ok[index], flight.masks[index] = True, mask
                self._presence.correct(number, key, mask)
                self._counters.add("reads")
                self._counters.add("read_bytes", buffer.nbytes)

    # Stores

    async def store(self, flight: Flight) -> None:
        """Send what the store lacks. Ends when all is settled; cancelled, what was not sent is not kept."""
        async with asyncio.TaskGroup() as group:
            for indices in self._batches(flight.transfer):
                group.create_task(self._store(flight, indices))

    async def _store(self, flight: Flight, indices: list[int]) -> None:
        if not self.room.allows():
            flight.refused = True
            for _ in indices:
                self._fail(flight, "backed_off", "not tried: the store is full")
            return
        lacking = await self._lacking(flight, indices)
        if not lacking:
            return
        transfer, identity = flight.transfer, self._identity
        lengths = [object_envelope.sealed_bytes(transfer.buffers[index].nbytes) for index in lacking]
        async with self._writes.passing(sum(lengths)):
            names = [identity.name_of(transfer.keys[index]) for index in lacking]
            values = [self._sealed(transfer, index) for index in lacking]

            def put(some: list[int]) -> Awaitable[Sequence[Failure | None]]:
                self._counters.add("write_calls")
                return self._backend.put([names[at] for at in some], [values[at] for at in some])

            answers = await self._ask(put, len(lacking))
        for index, answer in zip(lacking, answers, strict=True):
            self._sent(flight, index, answer)

    def _sealed(self, transfer: Transfer, index: int) -> bytearray:
        identity, payload = self._identity, transfer.buffers[index]
        packed = packed_payload(payload) if identity.compression.is_wanted else None
        if packed is not None:
            self._counters.add("packed")
            self._counters.add("packed_bytes_saved", payload.nbytes - packed.nbytes)
        return object_envelope.seal(
            transfer.keys[index],
            identity.namespace,
            int(transfer.masks[index]),
            payload if packed is None else packed,
            identity.protection,
            identity.random_bytes,
            packed=packed is not None,
        )

    def _sent(self, flight: Flight, index: int, answer: Answer) -> None:
        if isinstance(answer, Failure):
            full = answer.cause is Cause.FULL
            if full:
                self.room.failed()
                flight.refused = True
            self._fail(flight, "no_room" if full else "write_errors", "not kept", answer.text)
            return
        self.room.succeeded()
        self._kept(flight, index, int(flight.transfer.masks[index]))
        self._counters.add("writes")
        self._counters.add("write_bytes", flight.transfer.buffers[index].nbytes)

    def _kept(self, flight: Flight, index: int, mask: int) -> None:
        flight.ok[index] = True
        self._presence.stored(flight.transfer.keys[index], mask)

    async def _lacking(self, flight: Flight, indices: list[int]) -> list[int]:
        """Which of the chunks to send: not those that another machine has put there meanwhile.

        Asking costs a twelfth of what sending one costs, and no bytes. A chunk of which something is known is not asked
        about: one that is there is sent because it gained blocks, one that may be damaged to repair it.
        """
        transfer = flight.transfer
        keys = [transfer.keys[index] for index in indices]
        known = self._presence.known(keys)
        unknown = [
            index
            for index, key, is_there in zip(indices, keys, known, strict=True)
            if is_there is None and not self._presence.must_write(key)
        ]
        masks = await self._heads([transfer.keys[index] for index in unknown])
        there = dict(zip(unknown, masks, strict=True))
        lacking = []
        for index in indices:
            mask, offered = there.get(index, 0), int(transfer.masks[index])
            if not offered or not transfer.buffers[index].nbytes:
                self._fail(flight, "refused", "empty")
            elif mask is None:
                self._fail(flight, "write_errors", "not kept")
            elif (mask | offered) == mask:
                self._kept(flight, index, mask)
                self._counters.add("already_there")
            else:
                lacking.append(index)
        return lacking

    # Questions

    async def greet(self) -> None:
        """Connect, so that the first prompt need not wait for that; `health` knows afterwards."""
        name = self._identity.name_of(bytes(32))
        async with self._probes.passing(object_envelope.HEAD_BYTES):
            await self._ask(lambda _: self._backend.head([name], object_envelope.HEAD_BYTES), 1)

    async def probe(self, inquiries: Sequence[Inquiry]) -> None:
        """Find out how far the store has these chains; `Presence` knows afterwards."""
        self._counters.add("probes")
        async with asyncio.TaskGroup() as group:
            for inquiry in inquiries:
                group.create_task(self._probe(inquiry))

    async def _probe(self, inquiry: Inquiry) -> None:
        keys, presence = inquiry.keys, self._presence
        widths = self._backend.bounds.search_widths
        known = presence.known(keys)
        search = Search(known, first=inquiry.first, stride=inquiry.stride, widths=widths, certain=inquiry.certain)
        number = presence.begin()
        try:
            while indices := search.ask():
                masks = await self._heads([keys[index] for index in indices])
                for index, mask in zip(indices, masks, strict=True):
                    if mask is not None:
                        presence.answer(number, keys[index], mask)
                if None in masks:
                    return
                search.answer(indices, [bool(mask) for mask in masks])
            presence.take(number, [keys[index] for index in search.assumed_present()], inquiry.mask)
            for index in search.assumed_absent():
                presence.answer(number, keys[index], 0)
        finally:
            presence.end(number)

    async def _heads(self, keys: Sequence[bytes]) -> list[int | None]:
        """The valid blocks of each key, 0 where the store has nothing that can be read. None: no answer."""
        count = self._backend.bounds.batch_keys
        parts = [keys[begin : begin + count] for begin in range(0, len(keys), count)]
        return [mask for part in await asyncio.gather(*map(self._some_heads, parts)) for mask in part]

    async def _some_heads(self, keys: Sequence[bytes]) -> list[int | None]:
        names = [self._identity.name_of(key) for key in keys]

        def head(some: list[int]) -> Awaitable[Sequence[Answer]]:
            return self._backend.head([names[at] for at in some], object_envelope.HEAD_BYTES)

        self._counters.add("probe_keys", len(keys))
        async with self._probes.passing(object_envelope.HEAD_BYTES * len(keys)):
            answers = await self._ask(head, len(keys))
        return [self._mask(key, answer) for key, answer in zip(keys, answers, strict=True)]

    def _mask(self, key: bytes, answer: Answer) -> int | None:
        if answer is None:
            return 0
        if isinstance(answer, Failure):
            self._counters.add("probe_errors", error=answer.text)
            return None
        try:
            identity = self._identity
            return object_envelope.parse_head(memoryview(answer), key, identity.namespace, identity.protection).mask
        except FormatError as error:
            self._counters.add(_kind(error), error=str(error))
            return 0

    # Asking

    async def _ask(self, call: Callable[[list[int]], Awaitable[Sequence[Answer]]], count: int) -> list[Answer]:
        """What `call` answers for the indices 0 to count - 1; those without an answer are asked for again."""
        answers: list[Answer] = [None] * count
        left = list(range(count))
        for attempt in range(TRIES_MAX):
            if attempt:
                self._counters.add("retries", len(left))
                await asyncio.sleep(RETRY_S * 2.0 ** (attempt - 1) * random.random())
            try:
                async with asyncio.timeout(self._request_timeout_s):
                    found = await call(left)
            except TimeoutError:
                found = [Failure(Cause.NETWORK, f"no answer within {self._request_timeout_s:g} s")] * len(left)
            for index, answer in zip(left, found, strict=True):
                answers[index] = answer
            left = [i for i in left if isinstance(one := answers[i], Failure) and one.cause is Cause.NETWORK]
            if not left:
                break
        if all(isinstance(answer, Failure) and answer.cause is not Cause.FULL for answer in answers):
            self.health.failed()
        else:
            self.health.succeeded()
        return answers

    def _batches(self, transfer: Transfer) -> list[list[int]]:
        """The indices of a transfer, in order, as many together as the store takes at once."""
        bounds = self._backend.bounds
        batches: list[list[int]] = []
        room_bytes = 0
        for index, buffer in enumerate(transfer.buffers):
            if not batches or len(batches[-1]) >= bounds.batch_keys or buffer.nbytes > room_bytes:
                batches.append([])
                room_bytes = bounds.batch_bytes
            batches[-1].append(index)
            room_bytes -= buffer.nbytes
        return batches

    def _fail(self, flight: Flight, counter: str, what: str, error: str = "") -> None:
        flight.failures[what] += 1
        if error:
            self._counters.add(counter, error=error)
        else:
            self._counters.add(counter)

    def check(self) -> None:
        """Assert the invariants. In the loop, or while nothing is under way."""
        for limiter in (self._reads, self._writes, self._probes):
            limiter.check()


def _kind(error: FormatError) -> str:
    return "unreadable" if isinstance(error, object_envelope.Unreadable) else "corrupt"
