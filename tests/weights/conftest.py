"""Plain Transformers as what every budget is held against: to the last bit."""

from __future__ import annotations

import functools
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import stowage
from stowage.engine.sampling_params import SamplingParams
from stowage.evaluation import pack as packing
from stowage.executor.determinism.row_invariance import mode_of
from stowage.executor.replay.calls.backend import ModelStep, RecordedSteps
from stowage.weights import grouping
from tests.answers import bits
from tests.depth import mostly_rare

GREEDY = SamplingParams(max_new_tokens=5, ignore_eos=True, logprobs=1)


@pytest.fixture(autouse=True)
def _tiny_units(monkeypatch: pytest.MonkeyPatch) -> None:
    take_tiny_units(monkeypatch)


@pytest.fixture
def real_units(_tiny_units: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping, "SMALL_BYTES", 16 << 10)
    monkeypatch.setattr(grouping, "LEAF_BYTES", 64 << 10)


def take_tiny_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of tiny models are worth delivering too."""
    monkeypatch.setattr(grouping, "SMALL_BYTES", 256)
    monkeypatch.setattr(grouping, "LEAF_BYTES", 1024)


@pytest.fixture(scope="session")
def plain(checkpoints: Callable[..., Path]) -> Callable[..., Any]:
    """The model as Transformers loads it."""

    @functools.cache
    def model(family: str, dtype: str = "auto") -> Any:
        return AutoModelForCausalLM.from_pretrained(checkpoints(family), dtype=dtype).eval()

    return model


PLACEMENTS = {
    "streamed": ("llama", "*=stream"),
    "tied": ("gemma3", "*=stream"),
    "mixed": ("llama", "last 1 of 2=stream,*=prefetch"),
    "experts": ("mixtral", "*=experts"),
}


@pytest.fixture(params=mostly_rare(PLACEMENTS, ["mixed", "experts"]))
def placed(request: pytest.FixtureRequest, checkpoints: Callable[..., Path]) -> Iterator[tuple[str, Any]]:
    """The name of a family, and a model of it with offloaded weights."""
    family, rules = PLACEMENTS[request.param]
    model = stowage.offload(checkpoints(family), weights=rules, host_memory="1GiB")
    yield family, model
    model.stowage.close()


def expectations(whole: Any, count: int = 6) -> list[tuple[Tensor, Tensor]]:
    """Prompts, and the logits of ``whole``."""
    asked = [prompt(3 + 5 * seed, seed) for seed in range(count)]
    return [(ids, logits(whole, ids)) for ids in asked]


def run(jobs: list[Callable[[], None]]) -> None:
    """Each in a thread, the last one in this."""
    threads = [threading.Thread(target=job) for job in jobs[:-1]]
    for thread in threads:
        thread.start()
    jobs[-1]()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive(), "a thread hangs"


def prompt(length: int = 20, seed: int = 0) -> Tensor:
    return torch.randint(5, 500, (1, length), generator=torch.Generator().manual_seed(seed))


def answers_of(source: Path, weights: str = "auto", **memory: Any) -> list[Any]:
    """The bits of three answers, given together by an engine on the checkpoint ``source``."""
    asked = [prompt(length, length)[0].tolist() for length in (70, 3, 40)]
    given = {"kv_cache_memory": "8MiB", "host_memory": "16MiB", "weights": weights, **memory}
    with stowage.Engine(source, stowage.Memory(**given), dtype="bfloat16") as engine:
        return bits(engine.generate(asked, GREEDY))


@pytest.fixture
def copied(checkpoints: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoints("llama"), tmp_path / "copied"))


def assert_same_answers(source: Path, plain: Path, *weights: str) -> None:
    """The checkpoint ``source``, with its weights placed by each of ``weights``, answers as ``plain``, to the bit."""
    expected = answers_of(plain)
    for rules in weights or ("auto",):
        assert answers_of(source, rules) == expected, rules


def steps_of(model: Any, steps: RecordedSteps | None) -> Callable[[Tensor], Tensor]:
    """What computes a forward of one token without a cache as a recorded step (``None``: as the model does)."""
    mode = mode_of(model, exact=True)
    assert mode is not None
    position, mask = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, 1, 1)

    @torch.inference_mode()
    def step(token: Tensor) -> Tensor:
        def forward() -> Tensor:
            given = {"input_ids": token[None], "position_ids": position, "attention_mask": mask}
            out: Tensor = model(**given, use_cache=False).logits[0]
            return out

        def by_model() -> Tensor:
            with mode:
                return forward()

        if steps is None:
            return by_model()
        return steps.run(
            ModelStep((token, position, mask), forward, lambda: nullcontext(()), lambda: (), False), by_model
        )

    return step


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    out: Tensor = model(input_ids=ids, use_cache=False).logits
    return out


def assert_cached_one_by_one(model: Any, whole: Any) -> dict[str, Any]:
    """Experts of ``model`` are cached in their format, and it answers as ``whole``. Closes it; returns its counts."""
    assert model.stowage.placement.cached
    for ids in (prompt(), prompt(1, 1), prompt(2, 2), prompt(1, 4)):
        assert torch.equal(logits(model, ids), logits(whole, ids))
        model.stowage.check()
    stats = model.stowage.stats()
    assert stats["expert_misses"] > 0
    assert stats["image_bytes"] == 0, "nothing is written"
    model.stowage.close()
    return dict(stats)


def bytes_of(model: Any) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.fixture(scope="session")
def packs(checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The directory of a tiny model, packed."""
    root, made = tmp_path_factory.mktemp("packed"), dict[tuple[str, str], Path]()

    def pack(family: str, form: str = "int8") -> Path:
        if (family, form) not in made:
            made[family, form] = root / f"{family}-{form}"
            packing.pack(str(checkpoints(family)), made[family, form], form, 32)
        return made[family, form]

    return pack
