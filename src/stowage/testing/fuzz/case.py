"""One random case: a model with odd sizes, an engine with odd budgets, prompts that share beginnings, and what is done.

Everything is drawn from the seed, so the seed is the case. What is expected is computed twice, by others: every bit by
an engine with room for all, prompt by prompt, that never reuses anything; and in float32 the log-probabilities by
Transformers, within a bound that is measured with that very model (``evaluation.same_model``).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.engine.request import Completion
from stowage.engine.sampling_params import SamplingParams
from stowage.errors import StowageError
from stowage.evaluation import same_model
from stowage.testing import tiny_models

CONTEXT_TOKENS = 1024
PROMPT_TOKENS_MAX = 300
NEW_TOKENS = 6
ROUNDS = 5
_TIMES = dict.fromkeys(same_model.SELF_TIMES, 20.0)
"""As far as Transformers is from itself, at most: some random models are ill-conditioned, and many are tried."""
_ROOMY = Memory(kv_cache_memory="256MiB")
_ACTIONS = ("together", "one by one", "cancel", "drop device", "drop host", "restart", "damage")
_PARAMS = SamplingParams(max_new_tokens=NEW_TOKENS, logprobs=3, ignore_eos=True)


class Mismatch(AssertionError):
    """An answer that is not the expected one, or an error that is none of ours."""


@dataclass(frozen=True, slots=True)
class Case:
    """``memory``: settings of the engine that is tried, less its directory; ``actions``: by round, which prompts are
    asked and what is done before.
    """

    seed: int
    family: str
    size: tiny_models.TinySize
    dtype: str
    memory: dict[str, Any]
    disk_mib: int
    prompts: list[list[int]]
    actions: list[tuple[str, list[int]]]

    def __str__(self) -> str:
        told = ", ".join(f"{name}={value}" for name, value in self.memory.items())
        rounds = "; ".join(f"{action} {asked}" for action, asked in self.actions)
        lengths = [len(prompt) for prompt in self.prompts]
        return f"seed {self.seed}: {self.family} {self.size} {self.dtype}, {told}, prompts {lengths}, {rounds}"


@dataclass(slots=True)
class Outcome:
    """What a case has proved. ``refused``: an error of ours, at the opening or for a prompt."""

    answers: int = 0
    reused_tokens: int = 0
    preemptions: int = 0
    refused: list[str] = field(default_factory=list)
    inexact: bool = False
    beside_transformers: bool = False


def draw(seed: int, families: Sequence[str] = tiny_models.FAMILIES) -> Case:
    """The case of ``seed``."""
    chance = random.Random(seed)
    heads = chance.choice((2, 4))
    size = tiny_models.TinySize(
        hidden=chance.choice((32, 64, 96)) // (2 * heads) * 2 * heads or 2 * heads,
        layers=chance.choice((2, 4, 5, 8)),
        vocab=chance.choice((400, 512, 700)),
        heads=heads,
        kv_heads=chance.choice((1, 2)),
        context_tokens=CONTEXT_TOKENS,
    )
    memory = {
        "kv_cache_memory": f"{chance.choice((300, 700, 2000, 8000))}KiB",
        "host_memory": f"{chance.choice((0, 500, 4000, 32000))}KiB",
        "block_size": chance.choice((4, 8, 16, 24)),
        "chunk_blocks": chance.choice((1, 2, 3, 8)),
        "snapshot_tokens": chance.choice((48, 64, 128, 200)),
        "max_num_batched_tokens": chance.choice((90, 128, 300, 1024)),
        "max_num_seqs": chance.choice((1, 2, 3, 8)),
        "eviction_policy": chance.choice(("cost", "lru", "arc", "s3fifo")),
    }
    prompts: list[list[int]] = []
    for _ in range(chance.randint(2, 5)):
        begun = chance.choice(prompts) if prompts and chance.random() < 0.6 else []
        begun = begun[: chance.randint(0, len(begun))]
        drawn = [chance.randrange(5, 300) for _ in range(chance.randint(1, PROMPT_TOKENS_MAX))]
        prompts.append((begun + drawn)[:PROMPT_TOKENS_MAX])
    actions = []
    for _ in range(ROUNDS):
        asked = [chance.randrange(len(prompts)) for _ in range(chance.randint(1, 4))]
        actions.append((chance.choice(_ACTIONS), asked))
    family, dtype = chance.choice(list(families)), chance.choice(("float32", "bfloat16", "bfloat16"))
    return Case(seed, family, size, dtype, memory, chance.choice((0, 0, 16, 64)), prompts, actions)


def run(case: Case, directory: Path) -> Outcome:
    """Play ``case`` with a cache below ``directory``. Raises ``Mismatch``."""
    outcome = Outcome()
    path = _written(case, directory, outcome)
    if path is None:
        return outcome
    expected = _expected(case, path, outcome)
    if not expected:
        return outcome
    player = _Player(case, path, directory / "cache", outcome, expected)
    player.play()
    return outcome


def _written(case: Case, directory: Path, outcome: Outcome) -> Path | None:
    try:
        return tiny_models.write(case.family, directory / "model", case.size, seed=case.seed, dtype=case.dtype)
    except (StowageError, ValueError, ZeroDivisionError, RuntimeError) as error:  # sizes that Transformers refuses
        outcome.refused.append(f"model: {type(error).__name__}")
        return None


def _expected(case: Case, path: Path, outcome: Outcome) -> list[Completion]:
    """Each prompt by itself, computed whole."""
    try:
        engine = Engine(path, _ROOMY)
    except StowageError as error:
        outcome.refused.append(f"roomy: {type(error).__name__}: {error}")
        return []
    found = []
    with engine:
        outcome.inexact = not engine.exact
        for prompt in case.prompts:
            found += engine.generate([prompt], _PARAMS)
            engine.drop_device_cache()
    if case.dtype == "float32":
        asked = list(zip(case.prompts, found, strict=True))
        same = same_model.compare(lambda _: engine.model, asked, self_times=_TIMES)
        outcome.beside_transformers = True
        if not same.same:
            raise Mismatch(f"{case}\nanother model than Transformers': {same.as_json()}")
    return found


class _Player:
    """Opens, asks, restarts and damages."""

    def __init__(self, case: Case, path: Path, cache: Path, outcome: Outcome, expected: Sequence[Completion]) -> None:
        self._case, self._path, self._cache, self._outcome = case, path, cache, outcome
        self._expected = [(one.token_ids, one.logprobs) for one in expected]
        self._chance = random.Random(~case.seed)

    def play(self) -> None:
        """All rounds; whoever is restarted is closed in between."""
        rounds = iter(self._case.actions)
        while (first := next(rounds, None)) is not None:
            with self._opened() as engine:
                if engine is None:
                    return
                self._ask(engine, first[0], first[1])
                for action, asked in rounds:
                    if action in ("restart", "damage"):
                        self._ask(engine, "together", asked)
                        engine.flush()
                        break
                    self._ask(engine, action, asked)
                engine.check()
                self._outcome.preemptions += engine.stats()["engine"]["preemptions"]
            self._damage()

    @contextmanager
    def _opened(self) -> Iterator[Engine | None]:
        memory = dict(self._case.memory)
        if self._case.disk_mib and memory["host_memory"] != "0KiB":
            memory["disk"] = f"{self._cache}:{self._case.disk_mib}MiB"
        try:
            engine = Engine(self._path, Memory(**memory))
        except StowageError as error:
            self._outcome.refused.append(f"{type(error).__name__}: {error}")
            yield None
            return
        with engine:
            self._outcome.inexact |= not engine.exact
            engine.forget_costs()
            yield engine

    def _ask(self, engine: Engine, action: str, asked: list[int]) -> None:
        if action == "drop device":
            engine.drop_device_cache()
        elif action == "drop host":
            engine.flush()
            engine.drop_host()
            engine.drop_device_cache()
        requests = []
        for number in asked:
            try:
                request = engine.submit(self._case.prompts[number], _PARAMS)
            except StowageError as error:
                self._outcome.refused.append(f"{type(error).__name__}: {error}")
                continue
            if action == "cancel" and self._chance.random() < 0.5:
                engine.cancel(request)
                continue
            requests.append((number, request))
            if action == "one by one":
                request.wait(120)
        for number, request in requests:
            if not request.wait(120):
                raise Mismatch(f"{self._case}\nprompt {number}: no answer within two minutes")
            self._compare(number, request.result())

    def _compare(self, number: int, found: Completion) -> None:
        self._outcome.answers += 1
        self._outcome.reused_tokens += sum(found.reused_tokens.values())
        if not self._outcome.inexact and (found.token_ids, found.logprobs) != self._expected[number]:
            raise Mismatch(
                f"{self._case}\nprompt {number}, reused {dict(found.reused_tokens)}: {found.token_ids} {found.logprobs}"
                f", expected {self._expected[number]}"
            )

    def _damage(self) -> None:
        """A byte of the cache, or the end of a file, is no longer what it was."""
        files = sorted(path for path in self._cache.rglob("*") if path.is_file() and path.stat().st_size)
        if not files or self._chance.random() < 0.5:
            return
        path = self._chance.choice(files)
        data = bytearray(path.read_bytes())
        if self._chance.random() < 0.7:
            data[self._chance.randrange(len(data))] ^= 1 << self._chance.randrange(8)
        else:
            del data[self._chance.randrange(len(data)) :]
        path.write_bytes(data)
