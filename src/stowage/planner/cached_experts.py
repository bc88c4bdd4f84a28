"""The experts of a model as what a cache holds: how large it must and can be, and how often an expert is there."""

from __future__ import annotations

from dataclasses import dataclass

from stowage.planner.shapes import Model
from stowage.weights.placement import PAGE_BYTES

_STACKS = 2
"""Parameters that a layer's experts are stacked in."""


@dataclass(frozen=True, slots=True)
class Cached:
    """The experts of a model as what a cache holds. ``edge_bytes``: pages that two neighbours share, which stay."""

    count: int
    nbytes: int
    frame_bytes: int
    edge_bytes: int
    layer_most: int

    @classmethod
    def of(cls, model: Model) -> Cached:
        layers = [layer for layer in model.layers if layer.experts]
        return cls(
            count=sum(layer.experts for layer in layers),
            nbytes=sum(layer.experts * layer.expert_bytes for layer in layers),
            frame_bytes=max((layer.expert_bytes for layer in layers), default=0),
            edge_bytes=sum(_STACKS * (layer.experts + 1) * PAGE_BYTES for layer in layers),
            layer_most=max((layer.experts for layer in layers), default=0),
        )

    @property
    def least_bytes(self) -> int:
        """A prompt may choose all experts of a layer; one frame more is what an expert that is offloaded reads as."""
        return self.edge_bytes + self.frame_bytes * (self.layer_most + 1)

    @property
    def most_bytes(self) -> int:
        return self.edge_bytes + self.frame_bytes * (self.count + 1)

    def held_share(self, cache_bytes: int) -> float:
        """Of all experts, those that are in a cache of so many bytes: how often one is there, if the router chooses
        evenly. Text prefers some, and then a cache has more of what is chosen.
        """
        frames = (cache_bytes - self.edge_bytes) // self.frame_bytes - 1
        return min(1.0, frames / self.count)
