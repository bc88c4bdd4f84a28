"""Sizes and hit rate of a cache for a model's experts."""

from __future__ import annotations

from dataclasses import dataclass

from stowage.core.geometry import PAGE_BYTES
from stowage.planner.shapes import Model

_STACKS = 2
"""Parameters that a layer's experts are stacked in."""


@dataclass(frozen=True, slots=True)
class Cached:
    """The experts of a model, to be cached. ``edge_bytes``: pages that two neighbours share, which stay resident."""

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
        """All experts of a layer, which a prompt may choose, and one frame that offloaded experts are read from."""
        return self.edge_bytes + self.frame_bytes * (self.layer_most + 1)

    @property
    def most_bytes(self) -> int:
        return self.edge_bytes + self.frame_bytes * (self.count + 1)

    def held_share(self, cache_bytes: int) -> float:
        """The share of experts that fit into a cache of this size: its hit rate if the router chooses evenly. Real text
        prefers some experts, which gives more hits.
        """
        frames = (cache_bytes - self.edge_bytes) // self.frame_bytes - 1
        return min(1.0, frames / self.count)
