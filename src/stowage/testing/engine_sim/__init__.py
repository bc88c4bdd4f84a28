"""The real engine with a played model, played tiers, played threads and a played clock, under seeded schedules.

python -m stowage.testing.sim --engine --seeds 100000
python -m stowage.testing.sim --engine --first 4711 --seeds 1     # one world again
"""

from stowage.testing.engine_sim.profile import FAULTS
from stowage.testing.engine_sim.world import HAPPENINGS, one_thread, simulate

__all__ = ["FAULTS", "HAPPENINGS", "one_thread", "simulate"]
