"""A simulator of the tiered store: real code on a fake clock, disk and device; any failure replays from one number.

    python -m stowage.testing.sim --seeds 1000        run worlds, report what happened in them
    python -m stowage.testing.sim --first 17 --seeds 1 replay one

See docs/internals.md#the-simulator. Needs the extra `stowage[testing]`.
"""

from stowage.testing.sim.content import Violation
from stowage.testing.sim.world import Failure, Result, simulate

__all__ = ["Failure", "Result", "Violation", "simulate"]
