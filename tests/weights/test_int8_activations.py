"""An engine that rounds activations to 8 bits: other answers than without, and the same ones wherever weights and
prefixes lie, however prompts are cut and whatever is computed beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind

from stowage import ConfigError, Engine, Memory, SamplingParams
from stowage.config.settings import load_settings
from stowage.evaluation import parity
from stowage.executor import kernels
from stowage.executor.int8_activations import ROUNDED_FROM, note_of
from tests.answers import bits
from tests.depth import mostly_rare
from tests.native import needs_native
from tests.weights import gguf_files, published_files
from tests.weights.conftest import prompt
from tests.weights.gguf_models import SIZE, model_of
from tests.weights.test_gguf import KINDS, mixed
from tests.weights.test_published import int8

pytestmark = needs_native
GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True, logprobs=1)
ASKED = [prompt(length, length)[0].tolist() for length in (70, 3, 40, 33, 90, ROUNDED_FROM + 30)]


def answers(engine: Engine, asked: list[Any]) -> list[Any]:
    return bits(engine.generate(list(asked), GREEDY))


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], Path]:
    def write(kinds: str) -> Path:
        plain = model_of("llama", tmp_path / "model", SIZE)
        return gguf_files.write(plain, tmp_path / "model.gguf", mixed([Kind[name] for name in kinds.split()]))

    return write


@pytest.mark.parametrize("kinds", mostly_rare(KINDS, ["Q4_K Q5_K Q6_K", "F16 BF16 F32"]))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_answers_depend_on_nothing_but_the_option(kinds: str, dtype: str, file: Callable[[str], Path]) -> None:
    plain = not {name.lower() for name in kinds.split()} & kernels.INTEGER_FORMATS
    nothing = plain and dtype == "float32"
    path, memory = file(kinds), {"kv_cache_memory": "8MiB", "host_memory": "16MiB"}
    with Engine(path, Memory(**memory), dtype=dtype) as engine:
        published = answers(engine, ASKED)
    with Engine(path, Memory(**memory), dtype=dtype, int8_activations=True, deterministic=True) as engine:
        assert engine.exact
        assert ("changes nothing" in engine.int8_note) == nothing
        assert ("only how attention" in engine.int8_note) == (plain and not nothing)
        expected = answers(engine, ASKED)
        assert engine.flush()
        assert answers(engine, ASKED) == expected, "from the cache"
        assert [answers(engine, [one])[0] for one in ASKED] == expected, "alone"
    assert (expected == published) == nothing, "other answers, where there is something to round"
    for changed in (
        {"weights": "*=stream"},
        {"weights": "*=mapped"},
        {"max_num_batched_tokens": 17, "max_num_seqs": 5},
    ):
        with Engine(path, Memory(**memory, **changed), dtype=dtype, int8_activations=True) as engine:
            assert answers(engine, ASKED) == expected, changed


def test_what_was_stored_with_it_is_never_loaded_without(tmp_path: Path, file: Callable[[str], Path]) -> None:
    path = file("Q8_0 Q4_0 Q4_1")
    memory = Memory(kv_cache_memory="8MiB", host_memory="16MiB", disk=f"{tmp_path / 'disk'}:64MiB")
    said: dict[bool, Any] = {}
    for rounded in (True, False, True):
        with Engine(path, memory, dtype="bfloat16", int8_activations=rounded) as engine:
            found = engine.generate([ASKED[4]], GREEDY)[0]
            assert bool(sum(found.reused_tokens.values())) == (rounded in said), "only its own"
            assert said.setdefault(rounded, found.token_ids) == found.token_ids
            assert engine.flush()


@pytest.mark.parametrize(("family", "form"), mostly_rare([("llama", "int8"), ("qwen3_moe", "int4")], ["llama"]))
def test_packed_checkpoints(family: str, form: str, packs: Callable[..., Path]) -> None:
    assert_rounded(packs(family, form))


def test_checkpoints_that_are_published_as_w8a8(tmp_path: Path) -> None:
    stated, quantiser = int8("int-quantized")
    assert_rounded(published_files.write("llama", tmp_path, stated, quantiser)[0])


def assert_rounded(checkpoint: Path) -> None:
    """The option changes answers, and where weights lie does not."""
    memory, said = {"kv_cache_memory": "8MiB"}, []
    for weights, rounded in (("auto", False), ("auto", True), ("*=stream", True)):
        with Engine(checkpoint, Memory(**memory, weights=weights), int8_activations=rounded) as engine:
            said.append(answers(engine, ASKED))
            assert engine.int8_note.startswith("Activations are rounded") == rounded
    assert said[1] == said[2]
    assert said[0] != said[1]


@pytest.mark.rare
def test_verify_finds_parity(file: Callable[[str], Path]) -> None:
    report = parity.verify(
        file("Q4_K Q5_K Q6_K"), Memory(kv_cache_memory="8MiB"), dtype="bfloat16", int8_activations=True, seed=1
    )
    assert report.parity
    assert report.exact


def test_it_is_refused_where_it_cannot_be(file: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = file("Q8_0")
    with pytest.raises(ConfigError, match=r"there are none for torch\.float16"):
        Engine(path, dtype="float16", int8_activations=True)
    monkeypatch.setenv("STOWAGE_PURE_PYTHON", "1")
    with pytest.raises(ConfigError, match="int8_activations needs Stowage's kernels"):
        Engine(path, int8_activations=True)


def test_what_is_told_and_the_setting() -> None:
    assert load_settings({}, {"STOWAGE_INT8_ACTIVATIONS": "1"})["int8_activations"] is True
    assert load_settings({}, {})["int8_activations"] is False
    assert "changes nothing" in note_of(["fp8", "bf16"], half=False)
    assert "only how attention" in note_of(["fp8", "bf16"])
    assert "fp8 are multiplied as ever" in note_of(["q8_0", "fp8", "bf16"])
    assert "as ever" not in note_of(["q8_0", "bf16"])
    assert "rounded to 8 bits" in note_of([], packed=True)
