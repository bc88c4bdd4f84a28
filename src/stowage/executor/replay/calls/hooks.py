"""Detects hooks that users have put on a model's modules. A replay would not call them, so while there are any, the
model's own code runs.

This is checked before each step, so it must cost next to nothing: torch numbers all hooks, and the modules are
inspected only where that number has grown, or where there were hooks before.
"""

from __future__ import annotations

from torch import nn
from torch.utils.hooks import RemovableHandle

from stowage.weights.source import WeightSource


class Hooks:
    """The hooks on the modules of ``model``, except those that deliver its ``weights``."""

    def __init__(self, model: nn.Module, weights: WeightSource | None) -> None:
        self._model, self._weights = model, weights
        self._there = True
        self._numbered = 0

    @property
    def there(self) -> bool:
        """Whether there are any now."""
        if self._there or self._numbered != RemovableHandle.next_id:
            self._numbered = RemovableHandle.next_id
            own = self._weights.hooks if self._weights is not None else frozenset()
            self._there = any({*m._forward_hooks, *m._forward_pre_hooks} - own for m in self._model.modules())
        return self._there
