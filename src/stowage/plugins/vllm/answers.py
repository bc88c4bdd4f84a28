"""Stores chunks of generated tokens: their bytes go into free slots at once, and get their keys after the step.

Owns those slots. A step that completes chunks of many requests only reads where their blocks are, all of a group in one
go; keys are made, and the chunks found, when the workers have written them: beside the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from stowage.cache.store import TieredStore
from stowage.core.geometry import Group, IntArray
from stowage.plugins.vllm import adapter
from stowage.plugins.vllm.messages import WholeChunks
from stowage.plugins.vllm.requests import Tracked

_AHEAD_MAX, _AHEAD_SHARE = 256, 64
"""Slots at hand in each slab class: so many, or one in so many."""

Answer: TypeAlias = "tuple[Tracked, int, int]"
"""Request, group and number of a whole chunk that ends behind the prompt: its bytes go into a slot before it has a key.
"""


class Answers:
    """Into ``store``, of ``groups``. ``short``: slots at hand may not be enough for another step as the last one."""

    def __init__(self, store: TieredStore, groups: Sequence[Group]) -> None:
        self._store = store
        self._groups = groups
        self.short = False
        self._ahead: list[list[int]] = [[] for _ in store.slabs]
        slab_of = {group: number for number, slab in enumerate(store.slabs) for group in slab.groups}
        self._ahead_of_group = [self._ahead[slab_of[number]] for number in range(len(groups))]
        self._slab_of_group = np.array([slab_of[number] for number in range(len(groups))])
        self.make_ready()

    @property
    def at_hand(self) -> int:
        """Slots that wait for an answer."""
        return sum(map(len, self._ahead))

    def make_ready(self) -> None:
        """Have slots at hand for the chunks of answers to come: no step is to wait until others were evicted."""
        self.short = False
        for slab, ahead in zip(self._store.slabs, self._ahead, strict=True):
            missing = min(_AHEAD_MAX, slab.slots // _AHEAD_SHARE) - len(ahead)
            if missing > 0:
                slots = self._store.reserve_private(slab.groups[0], [b""] * missing)
                ahead[:0] = slots[slots >= 0].tolist()

    def place(
        self, answers: list[Answer], blocks: adapter.StepBlocks
    ) -> tuple[WholeChunks, list[Answer], list[Answer]]:
        """Of one group: slots for them; those that got one, in order; those for which there is none at hand, or of
        which not all blocks are there.
        """
        group = answers[0][1]
        ahead, width = self._ahead_of_group[group], self._groups[group].blocks_per_chunk
        placed, left = answers[: len(ahead)], answers[len(ahead) :]
        begins = [chunk * width for _, _, chunk in placed]
        numbers, missing = blocks.rows(group, [tracked.name for tracked, _, _ in placed], begins, width)
        if missing:
            left += [placed[index] for index in missing]
            placed = [answer for index, answer in enumerate(placed) if index not in missing]
        slots = ahead[len(ahead) - len(placed) :]
        del ahead[len(ahead) - len(placed) :]
        self.short = self.short or len(ahead) < len(answers) * len(self._groups)
        return WholeChunks(group, numbers, slots), placed, left

    def name(self, slots: IntArray, answers: Sequence[Answer]) -> None:
        """The chunks are written: they get their keys, and are found from now on."""
        groups = np.array([group for _, group, _ in answers])
        keys, after = [], []
        for tracked, group, chunk in answers:
            tracked.extend_keys((chunk + 1) * self._groups[group].chunk_tokens)
            key, before = tracked.keys.one_and_before(group, chunk)
            keys.append(key)
            after.append(before)
        slabs = self._slab_of_group[groups]
        for slab in np.unique(slabs).tolist():
            at = np.flatnonzero(slabs == slab)
            names, before_names = [keys[one] for one in at.tolist()], [after[one] for one in at.tolist()]
            self._store.commit(self._store.name_private(groups[at], slots[at], names, before_names))

    def drop(self, slots: IntArray) -> None:
        """Nothing was written there."""
        self._store.drop_private(slots)
