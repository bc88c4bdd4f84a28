"""All families that have a tiny model. Tests are parametrised by this table; ``docs/reference/models.md`` shows it."""

from __future__ import annotations

from collections.abc import Mapping

from stowage.testing.tiny_models.alone import ALONE as _ALONE
from stowage.testing.tiny_models.family import Family
from stowage.testing.tiny_models.full import FULL
from stowage.testing.tiny_models.outer import OUTER as _OUTER
from stowage.testing.tiny_models.outer import Outer
from stowage.testing.tiny_models.recurrent import RECURRENT
from stowage.testing.tiny_models.refused import REFUSED as _REFUSED
from stowage.testing.tiny_models.windowed import WINDOWED

KINDS: tuple[str, ...] = ("llama", "qwen3", "gemma3", "llama4", "deepseek_v3", "qwen3_next", "nemotron_h")
"""One family or two for each kind of group: what tests that are not about families run on."""
TABLE: Mapping[str, Family] = {family.name: family for family in (*FULL, *WINDOWED, *RECURRENT, *_ALONE)}
HYBRIDS: tuple[str, ...] = tuple(family.name for family in RECURRENT)
"""Those with recurrent layers."""
ALONE: tuple[str, ...] = tuple(family.name for family in _ALONE)
"""Those that the fallback executor runs, one sequence at a time."""
FAMILIES: tuple[str, ...] = tuple(TABLE)
REFUSED: Mapping[str, Family] = {family.name: family for family in _REFUSED}
"""Those that the engine refuses. They can be built as well, to see that."""
OUTER: Mapping[str, Outer] = {row.name: row for row in _OUTER}
"""Models that take pictures or sound as well, of which the engine runs the text part. Checkpoints only."""
