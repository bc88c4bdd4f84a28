"""Hooks that others have put on a model. Lists of calls would not call them: while there are any, it computes as it is
written.

Owns that question, which is asked before each step and so must cost next to nothing: torch numbers all hooks, and only
where there are new ones, or were some, modules are looked at.
"""

from __future__ import annotations

from torch import nn
from torch.utils.hooks import RemovableHandle

from stowage.weights.source import WeightSource

__all__ = ["Hooks"]


class Hooks:
    """Those on the modules of ``model``, but for those that bring its ``weights``."""

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
