"""Ports for servers that tests start."""

from __future__ import annotations

import random
import socket
from typing import Final

# Below what Linux gives to those who ask for any port and to clients (32768 and up): a server binds its port seconds
# after it was chosen here, and any connection of a neighbouring test may have it by then.
RANGE: Final = (12_000, 32_000)


def free_port() -> int:
    """A port that nobody listens on, and that nobody gets who does not ask for it by number."""
    choose = random.SystemRandom()
    for _ in range(100):
        port = choose.randrange(*RANGE)
        with socket.socket() as one:
            try:
                one.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"no port of {RANGE[0]} to {RANGE[1]} is free")
