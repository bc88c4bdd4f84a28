"""Cost and disk endurance of a simulated cluster, and the parsing of endurance ratings.

Prices are in any currency. A month is 30 days. A price of 0 leaves its part out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from stowage.config.memory import parse_size
from stowage.errors import ConfigError

DAY_S: Final = 86_400.0
MONTH_S: Final = 30 * DAY_S
WARRANTY_YEARS: Final = 5
"""The period that drive writes per day refer to."""
_PRICE_MAX: Final = 1e12
_GIB: Final = 1 << 30
_WRITES: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(PB|DWPD)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Prices:
    """Per hour of a node, per GiB and month of disk and objects, per GB (10^9 bytes) to or from the object store."""

    node_hour: float = 0.0
    disk_gib_month: float = 0.0
    object_gib_month: float = 0.0
    transfer_gb: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not 0 <= getattr(self, name) <= _PRICE_MAX:
                raise ConfigError(f"price_{name} is {getattr(self, name)}; it must be from 0 to {_PRICE_MAX:g}.")

    @property
    def any(self) -> bool:
        """Whether something has a price."""
        return any(getattr(self, name) for name in self.__slots__)

    def cost(self, node_s: float, disk_bytes: int, object_bytes: int, duration_s: float, transfer_bytes: int) -> float:
        """The cost of `node_s` seconds of nodes, of bytes held for `duration_s`, and of bytes transferred."""
        months = duration_s / MONTH_S
        return (
            self.node_hour * node_s / 3600
            + self.disk_gib_month * disk_bytes / _GIB * months
            + self.object_gib_month * object_bytes / _GIB * months
            + self.transfer_gb * transfer_bytes / 1e9
        )


@dataclass(frozen=True, slots=True)
class Endurance:
    """A disk's write endurance: `bytes_written` in all, or `drive_writes_per_day` for five years."""

    bytes_written: int = 0
    drive_writes_per_day: float = 0.0

    def years(self, bytes_per_day: float, disk_bytes: int) -> float | None:
        """How long a disk of that size lasts; None: nothing is written."""
        total = self.bytes_written or self.drive_writes_per_day * disk_bytes * 365 * WARRANTY_YEARS
        return total / (bytes_per_day * 365) if bytes_per_day else None


def parse_endurance(text: str) -> Endurance:
    """`600TB`, `1.2PB` (total bytes written) or `3DWPD` (drive writes per day). Raises ConfigError."""
    match = _WRITES.fullmatch(text.strip())
    if match is None:
        try:
            found = Endurance(bytes_written=parse_size(text))
        except ConfigError as error:
            raise ConfigError(
                f"The endurance {text!r} is not understood. Write what the disk may be written in all, such as 600TB "
                "or 1.2PB, or drive writes per day, such as 3DWPD."
            ) from error
    elif match[2].upper() == "PB":
        found = Endurance(bytes_written=int(float(match[1]) * 1e15))
    else:
        found = Endurance(drive_writes_per_day=float(match[1]))
    if not (found.bytes_written or found.drive_writes_per_day):
        raise ConfigError(f"The endurance {text!r} is nothing: such a disk could not be written at all.")
    return found
