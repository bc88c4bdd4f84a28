"""A model without a forward: its keys and values are hashes of the tokens before them, and so are its logits.

So every answer is known beforehand, and every byte that a query reads can be compared with the only one that may be
there, wherever it has been meanwhile: in a device block, in host memory, in a tier, on its way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stowage.core.geometry import ALIGNMENT_BYTES, Kind
from stowage.engine.sampling import Sampler, TokenLogprob, logprobs_of
from stowage.engine.sampling_params import SamplingParams
from stowage.errors import StorageError
from stowage.executor.batch import Work
from stowage.executor.block_pool import PADDING_BLOCK, BlockPool
from stowage.executor.block_table import OFFLOADED
from stowage.executor.hooks import Hooks
from stowage.models.layout import visible
from stowage.testing.engine_sim.profile import EngineFaults
from stowage.testing.sim.content import Violation
from stowage.testing.sim.loop import Loop

VOCAB: Final = 32
EOS: Final = 0
SAYS_NAN: Final = 31
"""A token after which the logits are NaN."""
RAISES: Final = 30
"""One that no forward can compute."""
DRAWN_MAX: Final = 28
"""Tokens from here on are never drawn."""
ROW: Final = torch.int64
"""The one cached value of a token: the hash of all tokens up to it."""
JUNK: Final = 0x0BAD_BAD0_BAD0_BAD0
STEP_S: Final = 0.002
TOKEN_S: Final = 0.005


def _logit_rows() -> Tensor:
    rows = np.random.RandomState(11).randn(97, VOCAB).astype(np.float32)
    rows[:, EOS] -= 1.0
    rows[:, DRAWN_MAX:] = -np.inf
    return torch.from_numpy(rows)


_LOGITS: Final = _logit_rows()


def hashes_of(tokens: Sequence[int], known: list[int]) -> list[int]:
    """The hash of each prefix of `tokens`; those in `known` are not computed again, and what is new is put there."""
    value = known[-1] if known else 1
    for token in tokens[len(known) :]:
        value = (value * 6364136223846793005 + token + 1442695040888963407) & ((1 << 62) - 1)
        known.append(value)
    return known


def logits_after(value: int) -> Tensor:
    """The logits `[vocab]` after a prefix with that hash."""
    return _LOGITS[value % len(_LOGITS)]


class PlayedTokenizer:
    """One letter for a token."""

    all_special_ids = (EOS,)

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return "".join(chr(ord("A") + token) for token in tokens if token != EOS)


class Answer:
    """What an engine must answer."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.text = ""
        self.reason = ""


def answer(prompt: list[int], params: SamplingParams, room: int) -> Answer:
    """The completion of `prompt`, which may have `room` new tokens, drawn without an engine."""
    found, sampler, tokenizer = Answer(), Sampler(params, prompt, frozenset([EOS])), PlayedTokenizer()
    known: list[int] = []
    while not found.reason:
        value = hashes_of([*prompt, *found.tokens], known)[-1]
        token, report = sampler.sample(logits_after(value))
        found.tokens.append(token)
        if report is not None:
            found.logprobs.append(report)
        ends = token == EOS and not params.ignore_eos
        text = tokenizer.decode(found.tokens)
        counts = len(text) > len(found.text) and len(found.tokens) > params.min_tokens
        begins = [len(text) - len(stop) for stop in params.stop if counts and text.endswith(stop)]
        found.text = text[: min(begins)] if begins else text
        if begins or ends or token in params.stop_token_ids:
            found.reason = "stop"
        elif len(found.tokens) >= min(params.max_new_tokens, room):
            found.reason = "length"
    return found


def prompt_logprobs(prompt: list[int], params: SamplingParams) -> list[TokenLogprob | None] | None:
    """The log-probabilities of the prompt's tokens that are asked for."""
    if params.prompt_logprobs is None:
        return None
    first = max(1, params.prompt_logprobs_from)
    if first >= len(prompt):
        return [None] * len(prompt)
    hashes = hashes_of(prompt, [])
    rows = torch.stack([logits_after(value) for value in hashes[first - 1 : -1]])
    return [*[None] * min(first, len(prompt)), *logprobs_of(rows, prompt[first:], params.prompt_logprobs)]


class PlayedModel:
    """Stands for `Runner`. `excused`: sequences whose request may end with an error that is not its fault."""

    def __init__(
        self, loop: Loop, faults: EngineFaults, pools: Sequence[BlockPool], arena: NDArray[np.uint8] | None
    ) -> None:
        self._loop = loop
        self._faults = faults
        self._groups = [(pool, pool.storage.numpy().view(np.int64)) for pool in pools]
        self._arena = arena.view(np.int64) if arena is not None else None
        self._hashes: dict[int, list[int]] = {}
        self.hooks = Hooks(torch.nn.Module(), None)
        self.excused: set[int] = set()
        self.broken = False
        self.forwards = 0

    def check(self) -> None:
        """Nothing is kept between steps."""

    def close(self) -> None:
        """Nothing was put into a model."""

    def run(self, work: Sequence[Work]) -> list[Tensor]:
        self.forwards += 1
        self._loop.sleep(STEP_S + TOKEN_S * sum(item.count for item in work))
        if self._faults.strikes("undelivered"):
            self.excused.update(item.sequence.id for item in work)
            raise StorageError("weights could not be read")
        if self.broken or self._faults.strikes("broken"):
            self.broken = True
            self._spoil(work)
            raise RuntimeError("the kernel is gone")
        if work[0].sequence.id >= 0 and self._faults.strikes("hiccup"):
            if len(work) == 1:
                self.excused.add(work[0].sequence.id)
            self._spoil(work)
            raise RuntimeError("a forward raised, and will not again")
        if any(RAISES in self._new(item) for item in work):
            self._spoil(work)
            raise ValueError("this token cannot be computed")
        try:
            return [self._compute(item) for item in work]
        except Violation as violation:
            self._faults.violations.append(str(violation))
            raise

    def _new(self, item: Work) -> list[int]:
        return item.sequence.tokens[item.start : item.start + item.count]

    def _compute(self, item: Work) -> Tensor:
        sequence, start, end = item.sequence, item.start, item.start + item.count
        values = hashes_of(sequence.tokens[:end], self._hashes.setdefault(sequence.id, []))
        for pool, rows in self._groups:
            blocks = sequence.table(pool.group.index)
            if pool.group.kind is Kind.RECURRENT:
                self._state(rows, int(blocks[0]), values, start, end)
            else:
                addresses = sequence.tables[pool.group.index].addresses
                self._attend(pool, rows, addresses, values, start, end)
        logits = torch.stack([logits_after(values[at]) for at in range(start if item.every_logit else end - 1, end)])
        return torch.full_like(logits, torch.nan) if SAYS_NAN in self._new(item) else logits

    def _state(self, rows: NDArray[np.int64], block: int, values: list[int], start: int, end: int) -> None:
        if block <= PADDING_BLOCK:
            raise Violation("a recurrent state that is nowhere")
        if start and rows[block, 0] != values[start - 1]:
            raise Violation(f"a wrong recurrent state after {start} tokens")
        rows[block, 0] = values[end - 1]

    def _attend(
        self,
        pool: BlockPool,
        rows: NDArray[np.int64],
        addresses: NDArray[np.int64],
        values: list[int],
        start: int,
        end: int,
    ) -> None:
        group = pool.group
        size = group.block_tokens
        keys = np.arange(start)
        seen = keys[visible(group.kind, group.window, np.array([start]), keys)]
        lies_in, row = addresses[seen // size], seen % size
        if ((lies_in <= PADDING_BLOCK) & (lies_in > OFFLOADED)).any():
            raise Violation("a query needs a block that is nowhere")
        here = lies_in > PADDING_BLOCK
        found = np.empty(len(seen), np.int64)
        found[here] = rows[lies_in[here], row[here]]
        if not here.all():
            assert self._arena is not None
            found[~here] = self._arena[(OFFLOADED - lies_in[~here]) * (ALIGNMENT_BYTES // 8) + row[~here]]
        wrong = np.flatnonzero(found != np.array(values[:start], np.int64)[seen])
        if len(wrong):
            raise Violation(f"wrong bytes of token {seen[wrong[0]]} in group {group.index} ({group.kind.value})")
        self._write(rows, addresses, size, np.arange(start, end), np.array(values[start:end], np.int64))

    def _write(
        self,
        rows: NDArray[np.int64],
        addresses: NDArray[np.int64],
        size: int,
        positions: NDArray[np.int64],
        values: NDArray[np.int64],
    ) -> None:
        blocks = addresses[positions // size]
        if (blocks <= PADDING_BLOCK).any():
            raise Violation("a token has no block to go to")
        rows[blocks, positions % size] = values

    def _spoil(self, work: Sequence[Work]) -> None:
        """What a forward that raised may have left in the blocks that it was to fill."""
        for item in work:
            positions = np.arange(item.start, item.start + item.count)
            for pool, rows in self._groups:
                table = item.sequence.tables[pool.group.index]
                if pool.group.kind is Kind.RECURRENT:
                    rows[int(table.blocks[0]), 0] = JUNK
                else:
                    junk = np.full(len(positions), JUNK, np.int64)
                    self._write(rows, table.addresses, pool.group.block_tokens, positions, junk)
