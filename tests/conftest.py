"""Settings for all tests: no network, nothing from the caller's environment, no time limits in hypothesis."""

import gc
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, Phase, settings

from stowage import openmp
from tests.depth import in_turn

_STATE: Final = tempfile.TemporaryDirectory(prefix="stowage-state-")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: a second thread only spins
openmp.wait_briefly()  # as commands do: two threads here, and as many in each other process, are more than the cores
os.environ["XDG_STATE_HOME"] = _STATE.name  # what is remembered of models: by these tests, of their own

_TURN: Final = os.environ.get("STOWAGE_TEST_TURN", "all")

# Shared machines stall for seconds at a time: an example that is slow once is not a failure.
settings.register_profile("stowage", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# Few examples, always the same ones, and none made smaller: for runs that repeat the tests thousands of times.
settings.register_profile(
    "repeatable",
    settings.get_profile("stowage"),
    max_examples=15,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile("stowage")

# The rooms whose tests start servers and other programs, which wait for ports, processes and a machine that others use
# too. A test that fails there is tried once more, and named as RERUN in the summary. Nowhere else: an answer that was
# wrong once was wrong.
SECOND_ATTEMPT: Final = frozenset({"cli", "deploy", "docs", "machines", "server", "tiers", "vllm"})


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and item.path.relative_to(here).parts[0] in SECOND_ATTEMPT:
            item.add_marker(pytest.mark.flaky(reruns=1))
    if _TURN.isdigit():  # after those that are not asked for are gone
        named = [(item.nodeid, item.get_closest_marker("slow") is not None) for item in items]
        run = in_turn(named, int(_TURN))
        config.hook.pytest_deselected(items=[item for item, runs in zip(items, run, strict=True) if not runs])
        items[:] = [item for item, runs in zip(items, run, strict=True) if runs]


def pytest_collection_finish() -> None:
    """What was imported, and the tests themselves, are never garbage: nobody looks through them for some again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The directory of a family's tiny checkpoint, written when it is asked for first. None may change it."""
    from stowage.testing import tiny_models

    root = tmp_path_factory.mktemp("checkpoints")

    def checkpoint(family: str, context_tokens: int = 4096) -> Path:
        path, size = root / f"{family}-{context_tokens}", tiny_models.TinySize(context_tokens=context_tokens)
        return path if path.exists() else tiny_models.write(family, path, size)

    return checkpoint


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of whoever runs the tests must not reach them."""
    for name in [name for name in os.environ if name.startswith("STOWAGE_")]:
        monkeypatch.delenv(name)
