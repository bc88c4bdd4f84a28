"""Does offloading change an answer? Runs the same prompts with every tier off and on, and compares.

Owns which prompts are asked and what counts as parity. It cannot pass by not reusing: a prompt that is long enough to
be reused must come, in part, from the tier whose turn it is. Tiers are emptied between the runs (device, then host,
then all of the process's memory, by opening the engine anew on the same directory), so each answer is known to rest
on one tier.

The prompts are random tokens, different for each seed, so a directory that holds earlier runs does not disturb.
"""

from __future__ import annotations

import fcntl
import math
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stowage.config import Memory, ram_total_bytes
from stowage.core.geometry import Kind
from stowage.engine.engine import Engine
from stowage.engine.layers import ModelLayout
from stowage.engine.request import Completion
from stowage.engine.sampler import SamplingParams
from stowage.errors import ConfigError

NEW_TOKENS = 12
HOST_BYTES = 1 << 30
DISK_BYTES = 2 << 30
FLUSH_TIMEOUT_S = 120.0
SHARED_PART = 0.6
_PREFIX = "stowage-verify-"
_PARAMS = SamplingParams(max_new_tokens=NEW_TOKENS, logprobs=5, ignore_eos=True)
_TOLERANCE = {"float32": 1e-3}
_TOLERANCE_HALF = 0.25  # in 16 bits a token's logits depend on how many tokens were computed together

OK, SHORT, UNUSED, UNEXPECTED, DIFFERENT = (
    "ok",
    "too short to reuse",
    "not reused",
    "reused what was not stored",
    "different answer",
)


@dataclass(frozen=True, slots=True)
class Case:
    """One run compared with the run that had every tier off.

    ``tier``: the one that had to serve (``off``: none). ``identical``: the same tokens. ``max_logprob_difference``:
    over all tokens up to and including the first that differs, natural logarithm. ``exact``: bit for bit the
    log-probabilities of a run that computed the same tokens (for host and disk: after a hit on the device); ``None``
    where there is no such run. All verdicts but ``ok`` and ``too short to reuse`` break parity.
    """

    name: str
    prompt_tokens: int
    tier: str
    reused_tokens: dict[str, int]
    identical: bool
    max_logprob_difference: float
    exact: bool | None
    verdict: str


@dataclass(frozen=True, slots=True)
class Report:
    """All cases; ``seed`` repeats them."""

    cases: tuple[Case, ...]
    seed: int
    dtype: str

    @property
    def parity(self) -> bool:
        return bool(self.cases) and all(case.verdict in (OK, SHORT) for case in self.cases)

    def as_json(self) -> dict[str, Any]:
        return {
            "parity": self.parity,
            "seed": self.seed,
            "dtype": self.dtype,
            "cases": [asdict(case) for case in self.cases],
        }


@dataclass(frozen=True, slots=True)
class Prompt:
    """``reusable`` leading tokens are stored when it is asked in a warm state; 0: too short."""

    name: str
    tokens: tuple[int, ...]
    reusable: int


@dataclass(frozen=True, slots=True)
class Scenario:
    """A prompt, and for each place another prompt that shares only its first part.

    It has to be another one each time: once asked, all of it is stored. None where the context is too short for that.
    """

    prompt: Prompt
    middles: dict[str, Prompt]

    def asked_of(self, place: str) -> list[Prompt]:
        return [self.prompt, *(prompt for key, prompt in self.middles.items() if key == place)]


PLACES = ("device", "host", "disk", "restart")


def verify(
    model: str | Path,
    memory: Memory,
    *,
    dtype: str = "auto",
    seed: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Compare. ``progress`` is told each case's name. Raises whatever opening the engine raises."""
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    with _temporary_directory() as directory:
        tiered = _with_tiers(memory, directory)
        with _opened(model, replace(memory, host=0, disk=""), dtype) as engine:
            scenarios = _scenarios(engine.parts.layout, memory.snapshot_tokens, seed)
            computed_in = str(engine.model.dtype).removeprefix("torch.")
            comparison = _Comparison(computed_in, progress)
            comparison.cold(engine, scenarios)
        with _opened(model, tiered, dtype) as engine:
            for scenario in scenarios:
                comparison.warm(engine, scenario)
            _flush(engine)
        with _opened(model, tiered, dtype) as engine:
            for scenario in scenarios:
                comparison.after_restart(engine, scenario)
    return Report(tuple(comparison.cases), seed, computed_in)


class _Comparison:
    """Runs prompts, and remembers the answers with every tier off."""

    def __init__(self, dtype: str, progress: Callable[[str], None]) -> None:
        self._tolerance = _TOLERANCE.get(dtype, _TOLERANCE_HALF)
        self._near_ties = dtype not in _TOLERANCE
        self._progress = progress
        self._expected: dict[tuple[int, ...], Completion] = {}
        self._from_device: dict[tuple[int, ...], Completion] = {}
        self.cases: list[Case] = []

    def cold(self, engine: Engine, scenarios: Iterable[Scenario]) -> None:
        """With every tier off: what all later answers are compared with."""
        for scenario in scenarios:
            for prompt in (scenario.prompt, *scenario.middles.values()):
                engine.drop_device_cache()
                self._expected[prompt.tokens] = self._ask(engine, prompt)
                self._compare(prompt, self._expected[prompt.tokens], "off", "every tier off")

    def warm(self, engine: Engine, scenario: Scenario) -> None:
        """First computed, then served by the device, the host and the disk in turn."""
        self._compare(scenario.prompt, self._ask(engine, scenario.prompt), "off", "first time")
        for tier in ("device", "host", "disk"):
            for prompt in scenario.asked_of(tier):
                _empty_above(engine, tier)
                self._compare(prompt, self._ask(engine, prompt), tier)

    def after_restart(self, engine: Engine, scenario: Scenario) -> None:
        """Served by the disk, in an engine that has just been opened."""
        for prompt in scenario.asked_of("restart"):
            _empty_above(engine, "disk")
            self._compare(prompt, self._ask(engine, prompt), "disk", "after a restart")

    def _ask(self, engine: Engine, prompt: Prompt) -> Completion:
        self._progress(prompt.name)
        _load_whatever_it_takes(engine)
        return engine.generate([list(prompt.tokens)], _PARAMS)[0]

    def _compare(self, prompt: Prompt, found: Completion, tier: str, when: str = "") -> None:
        expected = self._expected[prompt.tokens]
        identical = list(found.token_ids) == list(expected.token_ids)
        reused = {"device": 0, "host": 0, "disk": 0} | {name: int(n) for name, n in found.reused_tokens.items()}
        worst = _difference(expected, found)
        tied = self._near_ties and _near_tie(expected, found, self._tolerance)
        exact = self._exact(prompt, found, tier)
        same = worst <= self._tolerance and (identical or tied) and exact is not False
        name = f"{prompt.name}, {when}" if when else prompt.name
        verdict = self._verdict(prompt, tier, reused, same)
        self.cases.append(Case(name, len(prompt.tokens), tier, reused, identical, worst, exact, verdict))

    def _exact(self, prompt: Prompt, found: Completion, tier: str) -> bool | None:
        if tier == "device":
            self._from_device[prompt.tokens] = found
            return None
        twin = self._expected[prompt.tokens] if tier == "off" else self._from_device.get(prompt.tokens)
        if twin is None or sum(twin.reused_tokens.values()) != sum(found.reused_tokens.values()):
            return None
        return twin.token_ids == found.token_ids and _difference(twin, found) == 0

    def _verdict(self, prompt: Prompt, tier: str, reused: Mapping[str, int], same: bool) -> str:
        if not same:
            return DIFFERENT
        if tier == "off":
            return UNEXPECTED if any(reused.values()) else OK
        if reused[tier]:
            return OK
        return UNUSED if prompt.reusable else SHORT


def _load_whatever_it_takes(engine: Engine) -> None:
    """Let the next prompt be loaded even if computing it is quicker, as it is for tiny models."""
    engine.forget_pace()


def _empty_above(engine: Engine, tier: str) -> None:
    """Leave what an answer needs in ``tier`` and below only."""
    if tier == "disk":
        _flush(engine)
        engine.drop_host()
    if tier != "device":
        engine.drop_device_cache()


def _with_tiers(memory: Memory, directory: Path) -> Memory:
    """``memory`` with a host arena and a disk: its own where it states them."""
    host = memory.host if memory.host_bytes else min(HOST_BYTES, ram_total_bytes() // 4)
    return replace(memory, host=host, disk=memory.disk or f"{directory / 'disk'}:{DISK_BYTES}")


@contextmanager
def _temporary_directory() -> Iterator[Path]:
    """A directory that is removed at the end, together with those that killed runs of this user left behind."""
    for old in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError), _locked(old) as mine:
            if mine:
                shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name, _locked(Path(name)):
        yield Path(name)


@contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Hold the lock of a directory of this user; False where it is somebody else's, or in use. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        mine = os.fstat(descriptor).st_uid == os.geteuid()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            mine = False
        yield mine
    finally:
        os.close(descriptor)


@contextmanager
def _opened(model: str | Path, memory: Memory, dtype: str) -> Iterator[Engine]:
    engine = Engine(model, memory, dtype=dtype)
    try:
        yield engine
    finally:
        engine.close()


def _flush(engine: Engine) -> None:
    if not engine.flush(FLUSH_TIMEOUT_S):
        raise ConfigError(
            f"The disk did not take what was stored within {FLUSH_TIMEOUT_S:.0f} s, so it cannot be verified. "
            "Choose a faster or emptier directory with --disk."
        )


def _scenarios(layout: ModelLayout, snapshot_tokens: int, seed: int) -> list[Scenario]:
    """Prompts of several lengths around the model's own chunk size, as far as its context allows."""
    unit = math.lcm(*(group.chunk_tokens for group in layout.groups))
    recurrent = any(group.kind is Kind.RECURRENT for group in layout.groups)
    middle_unit = math.lcm(unit, snapshot_tokens) if recurrent else unit
    draw = random.Random(seed)
    room = layout.context_tokens - NEW_TOKENS

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(layout.vocab) for _ in range(count))

    def prompt(name: str, count: int) -> Prompt:
        step = unit if (count - 1) % unit == 0 else middle_unit
        return Prompt(f"{name}, {count} tokens", tokens(count), (count - 1) // step * step)

    lengths = {
        "short": max(2, unit // 2),
        "one chunk": unit + 1,
        "some chunks": 3 * unit + 1,
        "a part more": 5 * unit // 2 + 1,
    }
    scenarios = [Scenario(prompt(name, count), {}) for name, count in lengths.items() if count <= room]
    shared = middle_unit * max(1, round(4 * unit / middle_unit))
    count = math.ceil(shared / SHARED_PART)
    if count <= room:
        whole = prompt("long", count)
        middles = {
            place: Prompt(f"first {shared} of the long one", whole.tokens[:shared] + tokens(count - shared), shared)
            for place in PLACES
        }
        scenarios.append(Scenario(whole, middles))
    return scenarios


def _difference(expected: Completion, found: Completion) -> float:
    """Largest difference of log-probabilities that both report, up to and including the first token that differs."""
    worst = 0.0
    for a, b in zip(expected.logprobs or [], found.logprobs or [], strict=False):
        left, right = dict(a.top) | {a.token_id: a.logprob}, dict(b.top) | {b.token_id: b.logprob}
        differences = [abs(left[token] - right[token]) for token in left.keys() & right.keys()]
        worst = max([worst, *(math.inf if math.isnan(d) else d for d in differences)])
        if a.token_id != b.token_id:
            break
    return worst


def _near_tie(expected: Completion, found: Completion, tolerance: float) -> bool:
    """Whether the first token that differs was, in the expected run, within ``tolerance`` of the chosen one."""
    for a, b in zip(expected.logprobs or [], found.logprobs or [], strict=False):
        if a.token_id != b.token_id:
            return a.logprob - dict(a.top).get(b.token_id, -math.inf) <= tolerance
    return True
