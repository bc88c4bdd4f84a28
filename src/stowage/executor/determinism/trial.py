"""Checks at start-up that a model's answers are exact, for one candidate of ``pieces``.

Two prompts are computed at once, in pieces, together, and one token at a time beside each other. Every logit must be
the same to the bit; if not, the next candidate is tried.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence as Items

import torch
import transformers
from blake3 import blake3
from torch import Tensor

from stowage.core.geometry import Kind
from stowage.errors import BudgetError, UnsupportedModelError
from stowage.executor.batch import Work
from stowage.executor.block_pool import BlockPool
from stowage.executor.determinism.pieces import Pieces
from stowage.executor.fallback.runner import FallbackRunner
from stowage.executor.runner import Runner
from stowage.executor.sequence_state import SequenceState, probe_sequence, take_blocks
from stowage.models.layout import ModelLayout
from stowage.models.state_directory import Remembered, default_state_directory

_WENT_WELL, _AT_ONCE = "exact", "exact, pieces at once"
_MACHINE = f"{platform.node()}/{platform.release()}"
_VOCAB_MAX = 32768
_REVISION = 2
"""Version of the trial; incremented whenever it checks more."""
_PIECES_MOST = 16
"""Of a trial prompt whose pieces are one forward."""
_TOKENS, _SINGLES = 30, 3
"""Of a trial prompt beyond its grid, and of those how many are computed one by one."""


def try_rows_once(
    name: str, runner: Runner | FallbackRunner, pools: Items[BlockPool], pieces: Pieces, layout: ModelLayout, steps: int
) -> None:
    """``try_rows``, unless it passed before on this machine. ``name``: a namespace, of all that bits depend on."""
    known = Remembered(default_state_directory() / "exact.json")
    key = blake3(f"{_MACHINE}/{transformers.__version__}/{_REVISION}/{name}".encode()).hexdigest()
    if known.get(key) not in (_WENT_WELL, _AT_ONCE):
        try_rows(runner, pools, pieces, layout, steps)
        known[key] = _AT_ONCE if may_take_pieces_at_once(runner, pools, pieces, layout, steps) else _WENT_WELL
        known.save()
    if isinstance(runner, Runner):
        runner.forwards.pieces_at_once = known[key] == _AT_ONCE


@torch.inference_mode()
def may_take_pieces_at_once(
    runner: Runner | FallbackRunner, pools: Items[BlockPool], pieces: Pieces, layout: ModelLayout, step_tokens: int
) -> bool:
    """Whether several pieces in one forward (``Forwards.pieces_at_once``) give the same bits as one by one: the last
    token's logits and all stored KV. ``pools`` as in ``try_rows``.
    """
    most = min(_PIECES_MOST * pieces.grid, step_tokens, layout.context_tokens, _room(pools)) // pieces.grid
    if not isinstance(runner, Runner) or not runner.can_slice or most < 2:
        return False
    for count in {2, most}:
        trial = _Trial(runner, pools, layout, count * pieces.grid)
        runner.forwards.pieces_at_once = False
        expected = trial.stored([pieces.grid] * count)
        runner.forwards.pieces_at_once = True
        found = trial.stored([count * pieces.grid])
        if not all(torch.equal(here, there) for here, there in zip(found, expected, strict=True)):
            return False
    return True


def try_rows(
    runner: Runner | FallbackRunner, pools: Items[BlockPool], pieces: Pieces, layout: ModelLayout, step_tokens: int
) -> None:
    """Raise ``UnsupportedModelError`` if bits differ, ``BudgetError`` if there are too few blocks for the trial.
    ``pools`` must be empty, and are again afterwards.
    """
    begun = 0 if pieces.whole or pieces.grid >= layout.context_tokens else pieces.grid
    least = begun + 2 * _SINGLES
    more = least - begun if pieces.alone else _TOKENS
    count = min(begun + more, max(step_tokens, least), layout.context_tokens, _room(pools))
    if count < min(least, layout.context_tokens):
        raise BudgetError(
            f"whether this model's answers are exact is found out with two prompts of {least} tokens, and the device "
            f"has room for {count} of each: raise --kv-cache-memory."
        )
    trial = _Trial(runner, pools, layout, count)
    whole = trial.alone(0, [count])
    if pieces.whole or begun:  # else it is never cut
        _compare("cut in two", whole, trial.alone(0, [begun or count // 3, count - (begun or count // 3)]))
    singly = [trial.alone(prompt, [count - _SINGLES, *[1] * _SINGLES]) for prompt in (0, 1)]
    if pieces.whole:
        _compare("one token at a time", whole, singly[0])
    for expected, logits in zip(singly, trial.together(), strict=True):
        _compare("beside another prompt", expected, logits)


def _room(pools: Items[BlockPool]) -> int:
    """Tokens for which two prompts have room."""
    paged = [pool for pool in pools if pool.group.kind is not Kind.RECURRENT]
    return min((pool.blocks // 2 * pool.group.block_tokens for pool in paged), default=1 << 20)


def _compare(way: str, expected: Tensor, found: Tensor) -> None:
    if torch.equal(expected, found):
        return
    first = int((expected != found).any(-1).nonzero()[0])
    raise UnsupportedModelError(
        f"this model's answers are not exact: token {first} of a trial gave other bits when it was computed {way} "
        f"(they differ by up to {(expected - found).abs().max():.1e})."
    )


class _Trial:
    """Two prompts of ``count`` tokens, and room for them."""

    def __init__(
        self, runner: Runner | FallbackRunner, pools: Items[BlockPool], layout: ModelLayout, count: int
    ) -> None:
        self._runner, self._pools, self._layout, self._count = runner, pools, layout, count
        generator = torch.Generator().manual_seed(20)
        text = [token for token in range(min(layout.vocab, _VOCAB_MAX)) if token not in layout.placeholders]
        drawn = torch.randint(len(text), (2, count), generator=generator).tolist()
        self._prompts = [[text[index] for index in prompt] for prompt in drawn]

    def alone(self, prompt: int, pieces: list[int]) -> Tensor:
        """Logits ``[count, vocab]``."""
        sequence = self._begin(prompt)
        found = []
        for size in pieces:
            found += self._runner.run([Work(sequence, sequence.computed, size, True)])
            sequence.computed += size
        self._end(sequence)
        return torch.cat(found)

    def stored(self, pieces: list[int]) -> list[Tensor]:
        """Logits of the last token, and what every pool has then in the blocks of the prompt."""
        sequence = self._begin(0)
        for size in pieces:
            (logits,) = self._runner.run([Work(sequence, sequence.computed, size)])
            sequence.computed += size
        kept = [
            pool.storage[torch.as_tensor(table.blocks, device=pool.storage.device)].clone()
            for pool, table in zip(self._pools, sequence.tables, strict=True)
        ]
        self._end(sequence)
        return [logits, *kept]

    def together(self) -> list[Tensor]:
        """Both prompts' logits: begun in one step, ended token by token in steps of both."""
        sequences = [self._begin(0), self._begin(1)]
        found: list[list[Tensor]] = [[], []]
        for size in [self._count - _SINGLES, *[1] * _SINGLES]:
            outputs = self._runner.run([Work(s, s.computed, size, True) for s in sequences])
            for mine, sequence, logits in zip(found, sequences, outputs, strict=True):
                mine.append(logits)
                sequence.computed += size
        for sequence in sequences:
            self._end(sequence)
        return [torch.cat(logits) for logits in found]

    def _begin(self, prompt: int) -> SequenceState:
        sequence = probe_sequence(prompt, self._prompts[prompt], self._layout.groups)
        take_blocks(sequence, self._pools, self._count)
        return sequence

    def _end(self, sequence: SequenceState) -> None:
        for pool, table in zip(self._pools, sequence.tables, strict=True):
            pool.release(table.clear())
