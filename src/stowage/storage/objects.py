"""ObjectTier: chunks as objects of S3, Google Cloud Storage, Azure, or a directory that machines share.

One object per chunk: `prefix/namespace/first two digits of the key/key`, all hex. Nothing is listed, ever: what another
machine stored is found by reading the heads of few objects (`Search`). Several chunks in one object would make fewer
requests, and would need an index that machines change together; docs/sharing.md has the numbers.

The store is asked through obstore, with the credentials that it finds in the environment. Its errors are told apart by
kind and code only, because their texts hold names of objects.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import unquote, urlsplit

from stowage.config.addresses import parse_object
from stowage.errors import BudgetError, ConfigError, DirectoryError
from stowage.storage.format.object_envelope import sealed_bytes
from stowage.storage.remote.backend import Answer, Bounds, Cause, Failure
from stowage.storage.remote.quota import Quota
from stowage.storage.remote.tier import RemoteTier

BOUNDS: Final = Bounds(batch_keys=1, batch_bytes=1, reads_max=32, writes_max=16, probes_max=64, search_widths=(8, 48))
PART_BYTES: Final = 8 << 20
"""Long objects are read, and written, in parts of that length at the same time: one connection brings little."""
WHOLE_BYTES: Final = 12 << 20
"""Up to that they are read whole: a chunk of 8 MiB, and its head, are not worth two requests."""
MULTIPART_BYTES: Final = 32 << 20
PARTS_MAX: Final = 4
CONNECT_S: Final = 5.0
ABSENT_S: Final = 5.0

_STATUS: Final = re.compile(r"status code: (\d{3})")
_CODE: Final = re.compile(r"<Code>(\w{1,60})</Code>")
_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound")
_NO_SPACE: Final = ("No space left on device", "Disk quota exceeded", "os error 28", "os error 122")
_EMPTY: Final = "StartTooLarge"


class ObjectTier(RemoteTier):
    """Chunks in an object store, or in a directory that machines share. `url`: see `config.addresses`. `limit_bytes`
    (0: none) bounds the objects that this process has stored and not removed again: the oldest of them go. What earlier
    processes stored, a lifecycle rule of the bucket must remove.

    `chunk_bytes_max` (0: not known): the longest payload to be stored. Other options: see `RemoteTier`. Raises
    ConfigError for an address that cannot be used and a package that is missing, BudgetError for a limit that holds no
    chunk, DirectoryError for a directory that cannot be made.
    """

    def __init__(
        self,
        url: str,
        namespace: bytes,
        *,
        limit_bytes: int = 0,
        chunk_bytes_max: int = 0,
        bounds: Bounds = BOUNDS,
        absent_s: float = ABSENT_S,
        request_timeout_s: float = 10.0,
        **options: Any,
    ) -> None:
        if 0 < limit_bytes < sealed_bytes(chunk_bytes_max):
            raise BudgetError(
                f"An object limit of {limit_bytes} bytes holds no chunk of {chunk_bytes_max} bytes. The least that "
                f"works is {sealed_bytes(chunk_bytes_max)} bytes."
            )
        url = parse_object(url)
        backend = _ObjectBackend(_open(url, request_timeout_s), bounds, limit_bytes, self._removed)
        root = namespace.hex()
        super().__init__(
            "object",
            backend,
            namespace,
            lambda key: f"{root}/{key.hex()[:2]}/{key.hex()}",
            absent_s=absent_s,
            request_timeout_s=request_timeout_s,
            **options,
        )

    def _removed(self, name: str) -> None:
        self._presence.discard([bytes.fromhex(name.rpartition("/")[2])])


def _open(url: str, request_timeout_s: float) -> Any:
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError as error:
        raise ConfigError(
            "The object tier needs the package obstore, which is not installed. "
            "Install it: pip install 'stowage[object]'"
        ) from error
    scheme = urlsplit(url).scheme
    if scheme == "memory":
        return from_url(url)
    if scheme == "file":
        _make_directory(Path(unquote(urlsplit(url).path)))
        return from_url(url)
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    options: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "timeout": timedelta(seconds=request_timeout_s),
    }
    if scheme == "s3" and endpoint.startswith("http://"):
        options["allow_http"] = True  # whoever writes http:// there wants it
    try:
        return from_url(url, client_options=options, retry_config={"max_retries": 0})  # type: ignore[call-overload]
    except (BaseError, ValueError) as error:
        raise ConfigError(f"The object store {url!r} cannot be opened: {str(error).splitlines()[0]}") from error


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        what = f"The directory {path} of the object tier cannot be made: {error.strerror}. Choose another."
        raise DirectoryError(what) from error


class _ObjectBackend:
    """Objects by name. See `Backend`."""

    def __init__(self, store: Any, bounds: Bounds, limit_bytes: int, removed: Callable[[str], None]) -> None:
        import obstore

        self._library = obstore
        self._store = store
        self.bounds = bounds
        self._quota = Quota(limit_bytes)
        self._making_room = asyncio.Lock()
        self._writing: Counter[str] = Counter()
        """Objects that are being written: removing one now would not keep it from appearing afterwards."""
        self._wrote = asyncio.Event()
        self._removed = removed

    async def head(self, names: Sequence[str], length: int) -> Sequence[Answer]:
        return await asyncio.gather(*(self._head(name, length) for name in names))

    async def _head(self, name: str, length: int) -> Answer:
        try:
            result = await self._library.get_async(self._store, name, options={"range": (0, length)})
            return cast(Answer, await result.bytes_async())
        except Exception as error:  # noqa: BLE001 - whatever the library raises is an answer
            return _failure(error, reading=True)

    async def get(self, names: Sequence[str], lengths: Sequence[int]) -> Sequence[Answer]:
        return await asyncio.gather(*map(self._get, names, lengths))

    async def _get(self, name: str, length: int) -> Answer:
        """The whole object, or nothing of it if it is longer than said."""
        try:
            first = length if length <= WHOLE_BYTES else PART_BYTES
            result = await self._library.get_async(self._store, name, options={"range": (0, first)})
            size = int(result.meta["size"])
            if size > length:
                return b""
            if size <= first:
                return cast(Answer, await result.bytes_async())
            return await self._get_parts(name, size, result)
        except Exception as error:  # noqa: BLE001 - whatever the library raises is an answer
            return _failure(error, reading=True)

    async def _get_parts(self, name: str, length: int, first: Any) -> Answer:
        """All parts are of the same object: one that is replaced meanwhile is asked for again."""
        whole = bytearray(length)
        begins = iter(range(PART_BYTES, length, PART_BYTES))
        same = {"if_match": first.meta["e_tag"]} if first.meta["e_tag"] else {}

        async def fill(begin: int, body: Any) -> None:
            part = memoryview(await body.bytes_async())
            whole[begin : begin + part.nbytes] = part
            if begin + part.nbytes > length or part.nbytes != min(PART_BYTES, length - begin):
                raise EOFError

        async def fill_some() -> None:
            for begin in begins:
                options = {"range": (begin, min(begin + PART_BYTES, length)), **same}
                await fill(begin, await self._library.get_async(self._store, name, options=options))

        async with asyncio.TaskGroup() as group:
            group.create_task(fill(0, first))
            for _ in range(PARTS_MAX - 1):
                group.create_task(fill_some())
        return whole

    async def put(self, names: Sequence[str], values: Sequence[bytearray]) -> Sequence[Failure | None]:
        return await asyncio.gather(*map(self._put, names, values))

    async def _put(self, name: str, value: bytearray) -> Failure | None:
        if not self._quota.fits(len(value)):
            return Failure(Cause.REFUSED, "an object is longer than the limit")
        try:
            async with self._making_room:
                await self._make_room(name, len(value))
                self._quota.add(name, len(value))
                self._writing[name] += 1
            try:
                large = len(value) > MULTIPART_BYTES
                await self._library.put_async(
                    self._store, name, value, use_multipart=large, chunk_size=PART_BYTES, max_concurrency=PARTS_MAX
                )
            finally:
                self._writing -= Counter((name,))  # none is kept at 0
                self._wrote.set()
        except Exception as error:  # noqa: BLE001 - whatever the library raises is an answer
            failure = _failure(error, reading=False)
            assert isinstance(failure, Failure)
            return failure
        return None

    async def _make_room(self, name: str, length: int) -> None:
        while not self._quota.has_room(name, length):
            if (oldest := self._quota.oldest(self._writing)) is not None:
                await self._remove(oldest)
            else:
                self._wrote.clear()
                await self._wrote.wait()

    async def _remove(self, name: str) -> None:
        self._removed(name)
        with contextlib.suppress(FileNotFoundError):  # it was never written, or somebody else removed it
            await self._library.delete_async(self._store, name)
        self._quota.removed(name)

    async def close(self) -> None:
        """Connections go with the store."""

    def stats(self) -> dict[str, int | float | str]:
        return self._quota.stats()


def _failure(error: BaseException, reading: bool) -> Answer:
    """What the library's error means. Its text is searched for codes, and not passed on."""
    if isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    text = str(error)
    status, code = _STATUS.search(text), _CODE.search(text)
    said = " ".join(found[1] for found in (status, code) if found) or type(error).__name__
    if code and code[1] in _NO_BUCKET:
        return Failure(Cause.REFUSED, f"the bucket does not exist ({said})")
    if isinstance(error, FileNotFoundError):
        return None if reading else Failure(Cause.REFUSED, said)
    if reading and ((status and status[1] == "416") or _EMPTY in text):
        return b""  # there is an object, and nothing in it
    if any(words in text for words in _NO_SPACE):
        return Failure(Cause.FULL, "no space left")
    if isinstance(error, EOFError):
        return Failure(Cause.NETWORK, "a part of an object came back short")
    if type(error).__name__ == "PreconditionError":
        return Failure(Cause.NETWORK, "an object was replaced while it was read")
    if status and status[1].startswith("4") and status[1] not in ("408", "429"):
        return Failure(Cause.REFUSED, f"the store refused ({said})")
    if type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError", "NotSupportedError"):
        return Failure(Cause.REFUSED, f"the store refused ({said})")
    return Failure(Cause.NETWORK, f"no answer, or one of trouble ({said})")
