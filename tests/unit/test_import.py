"""What ``import stowage`` costs, and which names it offers."""

import subprocess
import sys
from pathlib import Path

import pytest

import stowage

SOURCE = Path(stowage.__file__).parents[1]
HEAVY = ("torch", "transformers", "numpy", "tokenizers", "typer", "rich", "psutil", "blake3")

PUBLIC = {
    "BudgetError",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "Delta",
    "DirectoryError",
    "Engine",
    "FormatError",
    "Memory",
    "ModelError",
    "PrefixCache",
    "offload",
    "RequestError",
    "SamplingParams",
    "StorageError",
    "StowageError",
    "StructuredOutputs",
    "TokenLogprob",
    "TransferError",
    "UnsupportedModelError",
    "__version__",
}


def loaded_modules(code: str) -> set[str]:
    """Top-level names in ``sys.modules`` of a fresh interpreter after ``code``."""
    program = f"{code}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code",
    ["import stowage", "from stowage import Memory; Memory(host_memory='1GiB')", "from stowage import StowageError"],
)
def test_import_loads_nothing_heavy(code: str) -> None:
    assert not loaded_modules(code) & set(HEAVY)


def test_import_takes_less_than_150_ms_beyond_a_bare_interpreter() -> None:
    program = (
        "import time; start = time.process_time()\nimport stowage\nstowage.Memory\nprint(time.process_time() - start)"
    )
    times_s = [
        float(
            subprocess.run(
                [sys.executable, "-c", program], env={"PYTHONPATH": str(SOURCE)}, capture_output=True, check=True
            ).stdout
        )
        for _ in range(5)
    ]
    assert min(times_s) < 0.15  # of processor time, the best of five: a busy neighbour may slow some, hardly all


def test_public_names_are_pinned() -> None:
    assert set(stowage.__all__) == PUBLIC
    assert set(dir(stowage)) == PUBLIC


def test_every_public_name_resolves() -> None:
    for name in PUBLIC:
        assert getattr(stowage, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        stowage.Motor  # noqa: B018
