"""Detects hooks that users have put on a model's modules. A replay would not call them, so while there are any, the
model's own code runs; and what is computed with them has another name than what is computed without. A model that was
given another type, or moved, is refused: its cache and its replays are of the first.

This is checked before each step, so it must cost next to nothing: torch numbers all hooks, and the modules are
inspected only where that number has grown, or where there were hooks before.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from stowage.core.key import namespace
from stowage.errors import ModelError
from stowage.weights.module_code import hooks_of_others
from stowage.weights.source import WeightSource


class Hooks:
    """The hooks on the modules of ``model``, except those that deliver its ``weights``."""

    def __init__(self, model: nn.Module, weights: WeightSource | None) -> None:
        self._model, self._weights = model, weights
        self._numbered = -1
        self._now: frozenset[int] = frozenset()
        self.changes = 0
        """How often others were there than before, when somebody looked: who runs the model, before each step."""
        self._own = os.urandom(16)
        # One is enough, since all of them are moved together; those that are placed refuse it themselves.
        own: Iterable[nn.Parameter] = () if weights is not None else model.parameters()
        self._weight = next((one for one in own if one.is_floating_point()), None)
        self._began = self._form()
        self.look()
        self._first = self._now

    @property
    def there(self) -> bool:
        """Whether there are any now."""
        self.look()
        return bool(self._now)

    def look(self) -> None:
        """Notice those that have come and gone. Raises ModelError where the weights have another type or place now."""
        if (form := self._form()) != self._began:
            (dtype, device), (before, there) = form, self._began
            raise ModelError(
                f"the engine's model is in {dtype} on {device} now, and was in {before} on {there} when the engine was "
                "opened, as what it caches still is: change the model back, or open another Engine with it."
            )
        if self._now or self._numbered != RemovableHandle.next_id:
            self._numbered = RemovableHandle.next_id
            own = self._weights.hooks if self._weights is not None else frozenset()
            now = hooks_of_others(self._model, own)
            if now != self._now:
                self._now, self.changes = now, self.changes + 1

    def _form(self) -> tuple[Any, ...]:
        return (self._weight.dtype, self._weight.device) if self._weight is not None else ()

    def seen(self) -> SeenHooks:
        """Those that are there now."""
        self.look()
        changes = self.changes  # first: what changes meanwhile is then a change since
        return SeenHooks(self, changes, b"" if self._now == self._first else self._name(self._now))

    def _name(self, numbers: frozenset[int]) -> bytes:
        return namespace({"hooks": self._own, "numbers": sorted(numbers)})


@dataclass(frozen=True, slots=True)
class SeenHooks:
    """The hooks of one moment. ``name``: empty for those that were there first, which the model's identity knows."""

    hooks: Hooks
    changes: int
    name: bytes

    @property
    def are_others(self) -> bool:
        """Whether others are there now, or were meanwhile."""
        return self.hooks.changes != self.changes

    def apart(self, name: bytes) -> bytes:
        """The namespace of what is computed with them under ``name``."""
        return namespace({"engine": name, "hooks": self.name}) if self.name else name
