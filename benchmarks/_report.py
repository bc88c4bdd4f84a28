"""What every benchmark shares: the machine it ran on, medians with their spread, result files."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stowage.planner.probe import cpu_name

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some rounds, the least and the largest of them, and how many there were."""

    median: float
    least: float
    largest: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.median:,.1f} ({self.least:,.1f} to {self.largest:,.1f})"


def median_spread(values: Sequence[float]) -> Spread:
    """Summarise the rounds of one measurement."""
    return Spread(statistics.median(values), min(values), max(values), len(values))


def describe_machine() -> dict[str, Any]:
    """The machine and how busy it is, as far as a number may depend on it. No name, no path, no user."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / (1 << 30), 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "load_1_min": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def write_result(name: str, data: Mapping[str, Any]) -> Path:
    """Write `results/<name>.json`: the data and the machine. Spreads may be anywhere in the data."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    content = {"benchmark": name, "machine": describe_machine(), **data}
    path.write_text(json.dumps(content, indent=2, default=_plain) + "\n", encoding="utf-8")
    return path


def read_result(name: str) -> dict[str, Any]:
    """What `write_result` wrote, with its spreads; nothing where there is no such file. A part that is measured alone
    replaces itself only.
    """
    path = RESULTS / f"{name}.json"
    found: dict[str, Any] = {}
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"), object_hook=_spread)
    return found


def _spread(of: dict[str, Any]) -> Any:
    return Spread(**of) if of.keys() == Spread.__dataclass_fields__.keys() else of


def _plain(value: object) -> Any:
    if isinstance(value, Spread):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} is not for a result file")
