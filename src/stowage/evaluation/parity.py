"""Parity: runs the same prompts with every tier off and on, and compares the answers.

Owns the prompts and the criteria of parity. A run that reuses nothing cannot pass: a prompt that is long enough must be
served, in part, by the tier under test. Tiers are emptied between the runs (device, then host, then all of the
process's memory, by reopening the engine with one of the lower tiers), so each answer depends on one known tier. With
every tier off all weights are in memory, so a weight budget is compared as well.

The prompts are random tokens, different for each seed, and asked with a salt that is new in each run, so what earlier
runs left in the same directory or store does not matter.
"""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from stowage.config.memory import Memory
from stowage.core.geometry import Kind
from stowage.engine.engine import Engine
from stowage.engine.request import Completion
from stowage.engine.sampling_params import SamplingParams
from stowage.errors import ConfigError
from stowage.evaluation import runs, same_model
from stowage.evaluation.same_model import SameModel
from stowage.models import hub, loading
from stowage.models.blobs import check_blobs
from stowage.models.layout import ModelLayout

NEW_TOKENS = 12
LONG_TOKENS = 300
SHARED_PART = 0.6
_PARAMS = SamplingParams(max_new_tokens=NEW_TOKENS, logprobs=5, ignore_eos=True)
_SCORED = replace(_PARAMS, prompt_logprobs=5)

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

    ``tier``: the one that had to serve (``off``: none). ``feature``: what the case is an example of. ``identical``: the
    same tokens. ``max_logprob_difference``: over all tokens up to and including the first that differs, natural
    logarithm. ``exact``: bit for bit the log-probabilities of a run that computed the same tokens (for tiers below the
    device: after a hit on the device; with every weight in memory for what is computed); ``None`` where there is no
    such run. All verdicts but ``ok`` and ``too short to reuse`` break parity.
    """

    name: str
    feature: str
    prompt_tokens: int
    tier: str
    reused_tokens: dict[str, int]
    identical: bool
    max_logprob_difference: float
    exact: bool | None
    verdict: str


@dataclass(frozen=True, slots=True)
class Report:
    """All cases; ``seed`` repeats them. ``executor``, ``exact``: as in ``Engine``. ``model``: beside Transformers;
    ``None``: with activations in 8 bits, which Transformers does not have. ``hub_files``: files of the checkpoint that
    were compared with the hub's digests.
    """

    cases: tuple[Case, ...]
    seed: int
    dtype: str
    executor: str = "paged"
    exact: bool = False
    model: SameModel | None = None
    hub_files: int = 0

    @property
    def tiers(self) -> bool:
        """Whether no tier changed an answer; of an exact engine, a bit of one. Each tier has served a prompt."""
        return bool(self.cases) and not self.untried and all(case.verdict in (OK, SHORT) for case in self.cases)

    @property
    def untried(self) -> tuple[str, ...]:
        """Tiers that served nothing because every prompt was too short for them."""
        found: dict[str, set[str]] = {}
        for case in self.cases:
            found.setdefault(case.tier, set()).add(case.verdict)
        return tuple(tier for tier, verdicts in found.items() if verdicts == {SHORT})

    @property
    def parity(self) -> bool:
        return self.tiers and (self.model is None or self.model.same)

    def features(self) -> dict[str, str]:
        """One verdict per feature: the first that breaks parity, else ``ok`` if any case is."""
        found: dict[str, str] = {}
        for case in self.cases:
            rank = (OK, UNUSED, UNEXPECTED, DIFFERENT)
            now = found.get(case.feature, SHORT)
            if case.verdict in rank and (now not in rank or rank.index(case.verdict) > rank.index(now)):
                now = case.verdict
            found[case.feature] = now
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            "parity": self.parity,
            "tiers": self.tiers,
            "untried": list(self.untried),
            "model": self.model.as_json() if self.model is not None else None,
            "features": self.features(),
            "seed": self.seed,
            "dtype": self.dtype,
            "executor": self.executor,
            "exact": self.exact,
            "hub_files": self.hub_files,
            "cases": [asdict(case) for case in self.cases],
        }


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of the parity scenarios. ``reusable``: its leading tokens that a warm state has; 0: too short."""

    name: str
    tokens: tuple[int, ...]
    reusable: int


@dataclass(frozen=True, slots=True)
class Scenario:
    """A prompt, and for each tier another prompt that shares only its first part.

    It has to be another one each time: once asked, all of it is stored. None where the context is too short for that.
    """

    prompt: Prompt
    middles: dict[str, Prompt]

    def asked_of(self, tier: str) -> list[Prompt]:
        return [self.prompt, *(prompt for key, prompt in self.middles.items() if key == tier)]


def verify(
    model: str | Path,
    memory: Memory,
    *,
    seed: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
    **computed: Any,
) -> Report:
    """Compare; where the engine's answers are exact nothing may differ by a bit. ``progress`` is told each case's name;
    ``computed``: how, as ``Engine`` takes it. Raises whatever opening the engine raises.
    """
    hub_files = check_blobs(hub.find(str(model)))
    opened = partial(runs.opened, model, computed=computed)
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    with runs.temporary_directory() as directory:
        tiered = runs.with_tiers(memory, directory)
        lower = runs.lower_tiers(tiered)
        with opened(runs.plain(memory)) as engine:
            tiers = ("device", "host", lower[0], *(f"{tier} alone" for tier in lower))
            scenarios = _scenarios(engine.parts.layout, memory.snapshot_tokens, seed, tiers)
            computed_in = str(engine.model.dtype).removeprefix("torch.")
            executor = engine.executor
            exact = engine.exact
            if not scenarios:
                raise ConfigError(_too_large(engine.parts.layout))
            comparison = _Comparison(computed_in, progress, exact)
            comparison.cold(engine, scenarios)
            progress("Transformers")
            scored = _scored(engine, scenarios, seed)
            device, piece_tokens = engine.model.device, _piece_tokens(engine)
        del engine  # its weights, before others are there
        loaded = partial(_loaded, model, device=device)
        same = same_model.compare(loaded, scored, computed.get("dtype") or "auto", piece_tokens=piece_tokens)
        comparison.allow(same.tolerance)
        with opened(tiered) as engine:
            engine.forget_costs(for_good=True)  # loaded even if computing is quicker, as of tiny models
            for scenario in scenarios:
                comparison.warm(engine, scenario, lower[0])
            comparison.together(engine, scenarios, lower[0])
            runs.flush(engine)
        for tier in lower:
            with opened(runs.with_only(tiered, tier)) as engine:
                engine.forget_costs(for_good=True)
                for scenario in scenarios:
                    comparison.after_restart(engine, scenario, tier)
    beside = None if computed.get("int8_activations") else same  # no rounding of Transformers' is like it
    return Report(tuple(comparison.cases), seed, computed_in, executor, exact, beside, hub_files)


def _loaded(model: str | Path, dtype: str, device: Any) -> Any:
    """As Transformers runs it."""
    return loading.load(model, dtype, device=device).model


def _scored(engine: Engine, scenarios: Iterable[Scenario], seed: int) -> list[tuple[tuple[int, ...], Completion]]:
    """Prompts and answers with log-probabilities of all tokens. One prompt more is long, whatever a chunk has."""
    draw = random.Random(seed + 1)
    long = max(2, min(LONG_TOKENS, engine.sequence_tokens_max - NEW_TOKENS))
    asked = [s.prompt.tokens for s in scenarios]
    asked.append(tuple(draw.randrange(engine.parts.layout.vocab) for _ in range(long)))
    found = []
    for tokens in asked:
        engine.drop_device_cache()
        found.append((tokens, engine.generate([list(tokens)], _SCORED)[0]))
    return found


def _piece_tokens(engine: Engine) -> int:
    """Of a prompt, that ``engine`` computes at once; 0: any number."""
    if engine.exact and not engine.parts.layout.continues:
        return 1
    return 0 if engine.parts.pieces.whole else engine.parts.pieces.grid


class _Comparison:
    """Runs prompts, and remembers the answers with every tier off."""

    def __init__(self, dtype: str, progress: Callable[[str], None], exact: bool) -> None:
        self._tolerance = 0.0
        self._exact_only = exact
        self._near_ties = dtype != "float32" and not exact
        self._progress = progress
        self._salt = secrets.token_bytes(16)
        self._expected: dict[tuple[int, ...], Completion] = {}
        self._from_device: dict[tuple[int, ...], Completion] = {}
        self.cases: list[Case] = []

    def allow(self, difference: float) -> None:
        """Allow log-probabilities to differ by ``difference``, for an engine whose answers are not exact."""
        self._tolerance = 0.0 if self._exact_only else difference

    def cold(self, engine: Engine, scenarios: Iterable[Scenario]) -> None:
        """With every tier off: the reference for all later answers."""
        for scenario in scenarios:
            for prompt in (scenario.prompt, *scenario.middles.values()):
                engine.drop_device_cache()
                self._expected[prompt.tokens] = self._ask(engine, prompt)
                self._compare(prompt, self._expected[prompt.tokens], "off", "computed", "every tier off")

    def warm(self, engine: Engine, scenario: Scenario, lower: str) -> None:
        """First computed, then served by the device, the host and the nearest lower tier in turn."""
        self._compare(scenario.prompt, self._ask(engine, scenario.prompt), "off", "computed", "first time")
        for tier in ("device", "host", lower):
            for prompt in scenario.asked_of(tier):
                runs.leave_only(engine, tier)
                feature = tier if prompt is scenario.prompt else "first part only"
                self._compare(prompt, self._ask(engine, prompt), tier, feature)

    def together(self, engine: Engine, scenarios: Sequence[Scenario], tier: str) -> None:
        """All at once, served by ``tier``: batching must not change an answer."""
        self._progress("all at once")
        runs.leave_only(engine, tier)
        asked = [scenario.prompt for scenario in scenarios]
        found_of = engine.generate([list(prompt.tokens) for prompt in asked], _PARAMS, salt=self._salt)
        for prompt, found in zip(asked, found_of, strict=True):
            self._compare(prompt, found, tier, "all at once", "all at once", alone=False)

    def after_restart(self, engine: Engine, scenario: Scenario, tier: str) -> None:
        """Served by ``tier``, in an engine that has just been opened with no other below the host."""
        for prompt in scenario.asked_of(f"{tier} alone"):
            runs.leave_only(engine, tier)
            feature = f"{tier}, restarted" if prompt is scenario.prompt else "first part only"
            self._compare(prompt, self._ask(engine, prompt), tier, feature, "after a restart")

    def _ask(self, engine: Engine, prompt: Prompt) -> Completion:
        self._progress(prompt.name)
        return engine.generate([list(prompt.tokens)], _PARAMS, salt=self._salt)[0]

    def _compare(
        self, prompt: Prompt, found: Completion, tier: str, feature: str, when: str = "", alone: bool = True
    ) -> None:
        expected = self._expected[prompt.tokens]
        identical = list(found.token_ids) == list(expected.token_ids)
        reused = {"device": 0, "host": 0, "disk": 0} | {name: int(n) for name, n in found.reused_tokens.items()}
        worst = runs.difference(expected, found)
        tied = self._near_ties and runs.near_tie(expected, found, self._tolerance)
        exact = self._exact(prompt, found, tier) if alone else None
        same = worst <= self._tolerance and (identical or tied) and exact is not False
        name = f"{prompt.name}, {when}" if when else prompt.name
        verdict = self._verdict(prompt, tier, reused, same)
        self.cases.append(Case(name, feature, len(prompt.tokens), tier, reused, identical, worst, exact, verdict))

    def _exact(self, prompt: Prompt, found: Completion, tier: str) -> bool | None:
        if tier == "device":
            self._from_device[prompt.tokens] = found
            return None
        twin = self._expected[prompt.tokens] if tier == "off" else self._from_device.get(prompt.tokens)
        if twin is None or sum(twin.reused_tokens.values()) != sum(found.reused_tokens.values()):
            return None
        return twin.token_ids == found.token_ids and runs.difference(twin, found) == 0

    def _verdict(self, prompt: Prompt, tier: str, reused: Mapping[str, int], same: bool) -> str:
        if not same:
            return DIFFERENT
        if tier == "off":
            return UNEXPECTED if any(reused.values()) else OK
        if reused.get(tier):
            return OK
        return UNUSED if prompt.reusable else SHORT


def _chunk_tokens(layout: ModelLayout) -> int:
    """Tokens after which every group has whole chunks."""
    return math.lcm(*(group.chunk_tokens for group in layout.groups))


def _too_large(layout: ModelLayout) -> str:
    return (
        f"A chunk of this model has {_chunk_tokens(layout)} tokens, and a sequence at most {layout.context_tokens}: "
        "nothing could be reused. Give a smaller --block-size or --chunk-blocks."
    )


def _scenarios(layout: ModelLayout, snapshot_tokens: int, seed: int, tiers: Sequence[str]) -> list[Scenario]:
    """Prompts of several lengths around the model's own chunk size, as far as its context allows."""
    unit = _chunk_tokens(layout)
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
            tier: Prompt(f"first {shared} of the long one", whole.tokens[:shared] + tokens(count - shared), shared)
            for tier in tiers
        }
        scenarios.append(Scenario(whole, middles))
    return scenarios
