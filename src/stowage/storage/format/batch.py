"""What is done for many payloads at a time: in C where that was built, else one after the other.

It (`native/checksums.c`, built with the package where there is a compiler) has no hash of its own: it calls the C
functions of the package xxhash, which lie open in its library, for a whole batch, without the interpreter's lock. The
package itself keeps the lock for payloads below 100 KB, and takes a call of Python's for each. Nothing of this is used
if the library hides its functions, if they do not give what the package gives, or if `STOWAGE_PURE_PYTHON` is set.
"""

from __future__ import annotations

import ctypes
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from stowage.native import extension as _native
from stowage.native.memory import address_of
from stowage.native.switches import PURE_PYTHON, is_on

FIELD_BYTES: Final = 112
"""An envelope's header without its digest."""
DIGEST_BYTES: Final = 16

Fields = NDArray[np.uint8]
"""[n, 112]: the fields of n headers, one after the other."""
Digests = NDArray[np.uint64]
"""[n, 2]: 16 bytes each, as they lie."""

_TRIAL_LENGTHS: Final = (1, 128, 144, 145, 240, 241, 1024, 5000)
"""Payloads with which an envelope's hash takes each of its ways."""


def digests_one_by_one(fields: Fields, payloads: list[memoryview]) -> Digests:
    """As `digests_of`, in Python."""
    found = []
    for row, payload in zip(fields, payloads, strict=True):
        state = xxhash.xxh3_128(row)
        state.update(payload)
        found.append(state.digest())
    return np.frombuffer(b"".join(found), np.uint64).reshape(-1, 2)


def _in_c(fields: Fields, payloads: list[memoryview]) -> Digests:
    found = np.empty((len(payloads), 2), np.uint64)
    _native.digests(fields, payloads, found)
    return found


def _connected() -> bool:
    """Whether the kernel is there, and hashes as the package does."""
    library = getattr(getattr(xxhash, "_xxhash", None), "__file__", None)
    if _native is None or library is None or not _native.connect(library):
        return False
    payloads = [memoryview(bytes(range(256)) * 20)[:length] for length in _TRIAL_LENGTHS]
    fields = np.arange(len(payloads) * FIELD_BYTES, dtype=np.uint8).reshape(-1, FIELD_BYTES)
    return bool((_in_c(fields, payloads) == digests_one_by_one(fields, payloads)).all())


_BUILT: Final = _connected()


def is_wanted() -> bool:
    """Whether the kernel is used."""
    return _BUILT and not is_on(PURE_PYTHON)


def digests_of(fields: Fields, payloads: list[memoryview]) -> Digests:
    """XXH3-128 of each row of fields followed by its payload, in canonical order of bytes."""
    return _in_c(fields, payloads) if is_wanted() else digests_one_by_one(fields, payloads)


def all_begin_on_one_by_one(payloads: list[memoryview], step: int) -> bool:
    """As `all_begin_on`, in Python."""
    return all(_address(payload) % step == 0 for payload in payloads)


def _address(payload: memoryview) -> int:
    if payload.readonly:  # which ctypes does not take; five times slower
        return address_of(payload)
    return ctypes.addressof(ctypes.c_char.from_buffer(payload))


def all_begin_on(payloads: list[memoryview], step: int) -> bool:
    """Whether the address of each is a multiple of `step`."""
    return _native.all_begin_on(payloads, step) if is_wanted() else all_begin_on_one_by_one(payloads, step)
