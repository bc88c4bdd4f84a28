"""Every field of the public API with every kind of odd value: refused by name or taken, and the engine lives."""

from __future__ import annotations

import itertools
import random
from dataclasses import fields
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import stowage
from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.engine.sampling_params import SamplingParams
from stowage.errors import BudgetError, CheckpointError, ConfigError, RequestError, StowageError
from stowage.server.limits import Limits
from stowage.testing import tiny_models
from stowage.weights.placement import place

DEEP: list[Any] = []
for _ in range(500):
    DEEP = [DEEP]
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2, 5, 2**31, 2**63, -(2**63) - 1, 10**400, 0.0, -0.0, 0.5, 1.0, 1e-38, 5e-324, 1e308,
    float("nan"), float("inf"), float("-inf"), Fraction(1, 3), 1j, "", " ", "x", "0", "-1", "1e9", "10MiB", "-1GiB",
    "nan", "101%", "9" * 5000, "\0", "\ud800", "🚢", "\u202e", "x" * 100_000, "a:b:c", "/", "~nobody/x:1MiB", b"", b"x",
    bytearray(b"x"), [], [1], ["x"], [None], [[]], DEEP, (), ("x",), ("",), {}, {"x": 1}, {1: 2}, {"full": -1},
    {"sliding": "x"}, {None: None}, set(), object(), object, len, ..., np.float64("nan"), np.int64(5), np.bool_(True),
    np.zeros(3), torch.tensor(5), torch.zeros(2, 2), range(3), "redis://x:99999999/0", "s3://", "http://[",
    "last 0 of 0=x", "*=stream", "=", "*=nonsense", "cpu", "cuda:99", "float64",
]  # fmt: skip
"""More than any user gives, and each of another kind."""


class Hostile:
    """Raises when it is looked at."""

    def _raise(self, *_: object) -> Any:
        raise ZeroDivisionError

    __iter__ = __len__ = __str__ = __repr__ = __eq__ = __bool__ = __getitem__ = __float__ = __int__ = _raise
    __hash__ = None  # type: ignore[assignment]


def named(error: StowageError, field: str, given: object) -> None:
    said = str(error)
    assert len(said) < 2000 and "Traceback" not in said
    if isinstance(error, RequestError) or type(error) is ConfigError:
        words = {field, field.partition("_")[0], field.replace("_", " "), "weights", "KV", "sizes", "size", "disk"}
        assert any(word in said for word in words), f"{field}={given!r:.60}: {said}"


@pytest.fixture(scope="module")
def engine(checkpoints):
    with Engine(checkpoints("llama"), Memory(kv_cache_memory="8MiB")) as opened:
        yield opened


def test_sampling_params(engine) -> None:
    """One field at a time, and some at once. What is taken is drawn with."""
    names = [item.name for item in fields(SamplingParams)]
    cases = [{name: value} for name, value in itertools.product(names, ODD)]
    chance = random.Random(7)
    cases += [{name: chance.choice(ODD) for name in chance.sample(names, 3)} for _ in range(1000)]
    taken = 0
    for case in cases:
        try:
            params = SamplingParams(**case)
        except RequestError as error:
            assert any(name in str(error) for name in case), (case, error)
            continue
        taken += 1
        limited = {item.name: getattr(params, item.name) for item in fields(params)} | {"max_new_tokens": 2}
        limited["min_tokens"] = min(2, params.min_tokens)
        (completion,) = engine.generate([[5, 6, 7]], SamplingParams(**limited))
        assert 1 <= len(completion.token_ids) <= 2
    assert taken > 50 and engine.alive
    engine.check()


def test_memory_and_limits() -> None:
    for kind in (Memory, Limits):
        for item in fields(kind):
            for value in ODD:
                try:
                    made = kind(**{item.name: value})
                    repr(made)
                except ConfigError as error:
                    named(error, item.name, value)


ENGINE = (
    "model memory dtype tokenizer device deterministic batch_dependent int8_activations cuda_graphs salt tiers".split()
)
OFFLOAD = ("model", "device_memory", "host_memory", "disk", "dtype", "weights", "device", "threads", "nonsense")


@pytest.mark.parametrize("opened", [Engine, stowage.offload], ids=["Engine", "offload"])
def test_what_opens_a_model(opened: Any, tmp_path) -> None:
    """Nothing is there to be loaded, so whatever is taken ends as a checkpoint that is missing."""
    for name in ENGINE if opened is Engine else OFFLOAD:
        for value in ODD:
            given = {"model": tmp_path / "nothing"} | ({} if opened is Engine else {"device_memory": "1MiB"})
            with pytest.raises(StowageError) as caught:
                opened(**(given | {name: value}))
            named(caught.value, name, value)


@pytest.mark.slow
def test_prefix_cache(tmp_path) -> None:
    model = tiny_models.build("llama").eval()
    settings = [item.name for item in fields(Memory)]
    for name in ("model", "salt", "tiers", "host_memory", "disk", "nonsense", *settings):
        for value in ODD:
            given = {"model": model, "host_memory": "1MiB"} | {name: value}
            if name in ("valkey", "object", "disk") or (name == "model" and value is model):
                given["model"] = 5  # nothing is opened outside of the test
            elif name not in ("model", "salt", "tiers", "nonsense"):
                continue  # as Memory has them
            try:
                stowage.PrefixCache(**given).close()
            except StowageError as error:
                named(error, name if name in str(error) else "model", value)
    cache = stowage.PrefixCache(model, "1MiB")
    for call in (cache.restore, cache.prefill, lambda ids: cache.keep(cache.restore([5, 6]), ids)):
        for value in [*ODD, [[5], [5, 6]], [2**70], [-1], [5.0], torch.tensor([600]), [600]]:
            try:
                call(value)
            except StowageError as error:
                assert len(str(error)) < 2000
    cache.close()


def calls(engine: Engine, value: Any) -> list[Any]:
    one = SamplingParams(max_new_tokens=1)
    return [
        lambda: engine.generate(value, one),
        lambda: engine.generate([value], one),
        lambda: engine.submit(value, one),
        lambda: engine.submit([5], value),
        lambda: engine.submit([5], one, value),
        lambda: engine.submit([5], one, salt=value),
        lambda: next(engine.iterate(value, one)),
    ]


def test_prompts_and_calls(engine) -> None:
    for value in [*ODD, *([5, value] for value in ODD), Hostile, Hostile(), [Hostile()]]:
        for call in calls(engine, value):
            try:
                call()
            except StowageError as error:
                assert len(str(error)) < 2000, "a message is short, whatever was given"
    assert engine.alive and len(engine.generate([[5, 6]], SamplingParams(max_new_tokens=2))[0].token_ids) == 2
    engine.check()


def test_names_of_files_that_are_no_utf8(tmp_path) -> None:
    """A directory may be called so; and then it is meant."""
    name = str(tmp_path / "caf\udce9")
    assert str(Memory(disk=f"{name}:64MiB", host_memory="1MiB").disk_directory) == name
    with pytest.raises(CheckpointError, match="does not exist"):
        Engine(name)


def test_a_budget_for_a_model_without_modules_that_move() -> None:
    """All that it has is small, and stays: the message says what there is."""
    with pytest.raises(BudgetError, match="at least 1000 bytes"):
        place([], 1000, 10)
    assert place([], 1000, 1000).device_bytes == 1000
