"""Whether chunks at rest are packed, and the packing of one chunk for a key-value store.

Lossless (`core.lossless`), and never more than a way to write: whoever reads takes either form.
"""

from __future__ import annotations

import enum

from stowage.core import lossless


class Compression(enum.StrEnum):
    """When chunks at rest are compressed, without loss. AUTO: where compiled code does it and it makes loads no slower.
    ON: wherever it saves space.
    """

    AUTO = "auto"
    OFF = "off"
    ON = "on"

    @property
    def is_wanted(self) -> bool:
        """Whether it is worth trying in this process."""
        return self is Compression.ON or (self is Compression.AUTO and lossless.is_quick())


def packed_payload(payload: memoryview) -> memoryview | None:
    """The payload in fewer bytes, in memory of its own; None: it does not pay."""
    most = lossless.worth_bytes(payload.nbytes)
    room = memoryview(bytearray(most))
    length = lossless.pack(payload, room) if most else 0
    return room[:length] if length else None
