"""``stowage verify --eval``, ``--families``, budgets, shared stores: right answers are counted, wrong ones found."""

import json
from pathlib import Path
from typing import Any

import pytest

from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.engine.sampling_params import SamplingParams
from stowage.errors import ConfigError, RequestError
from stowage.evaluation import tasks
from stowage.evaluation.parity import verify
from stowage.evaluation.tasks import evaluate, questions, right
from stowage.transfer.cpu import CpuTransfer
from tests.cli.conftest import Stowage

SMALL = Memory(kv_cache_memory="8MiB", host_memory="8MiB", block_size=4, chunk_blocks=2)
FLAGS = ["--kv-cache-memory", "8MiB", "--host-memory", "8MiB", "--block-size", "4", "--chunk-blocks", "2"]


def write(path: Path, items: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(item) for item in items) + "\n")
    return path


def own_answers(model: Path, prompts: list[str], tokens: int) -> list[str]:
    with Engine(model, SMALL) as engine:
        return [c.text for c in engine.generate(list(prompts), SamplingParams(max_new_tokens=tokens))]


@pytest.mark.slow
def test_right_answers_are_counted_in_every_run(call: Stowage, tiny_llama: Path, tmp_path: Path) -> None:
    """What the model says by itself is right, anything else is not."""
    prompts = [f"What comes after the number {number}? Think, and say it:" for number in range(4)]
    said = own_answers(tiny_llama, prompts, 6)
    wrong = ["none of it", *said[1:3], "nor this"]
    items = [{"prompt": prompt, "answer": answer} for prompt, answer in zip(prompts, wrong, strict=True)]
    result = call(
        *("verify", tiny_llama, *FLAGS, "--eval", write(tmp_path / "q.jsonl", items)),
        *("--shots", "0", "--answer-tokens", "6", "--json"),
    )
    report = json.loads(result.stdout)
    assert (result.exit_code, report["parity"], report["eval"]["questions"]) == (0, True, 4)
    runs = report["eval"]["runs"]
    assert [run["name"] for run in runs] == [
        "every tier off",
        "computed and stored",
        "from host",
        "from disk, after a restart",
    ]
    assert all((run["right"], run["accuracy"], run["changed"]) == (2, 0.5, 0) for run in runs)
    assert len({round(run["perplexity"], 3) for run in runs}) == 1
    assert runs[2]["reused_tokens"]["host"] > 0 and runs[3]["reused_tokens"]["disk"] > 0


def test_examples_stand_before_each_question(tmp_path: Path) -> None:
    items = [{"question": f"{n} + 1?", "answer": f"{n} and 1 #### {n + 1}"} for n in range(5)]
    asked = questions(write(tmp_path / "q.jsonl", items), shots=2, limit=2)
    shared = "Question: 0 + 1?\nAnswer: 0 and 1 #### 1\n\nQuestion: 1 + 1?\nAnswer: 1 and 1 #### 2\n\n"
    assert [q.prompt for q in asked] == [f"{shared}Question: {n} + 1?\nAnswer:" for n in (2, 3)]
    assert [q.reference for q in asked] == [" 2 and 1 #### 3", " 3 and 1 #### 4"]


@pytest.mark.parametrize(
    ("reference", "text", "expected"),
    [
        ("so many #### 1,234", "first 7, then #### 1234.", True),
        ("so many #### 1,234", "in the end it is $1,234.00", True),
        ("so many #### 12", "12 at first, but 13", False),
        ("so many #### 12", "#### nothing, though 12", True),
        ("so many #### -3", "it is -3", True),
        ("so many #### 3", "", False),
        ("Paris", " paris.\nAnd more", True),
        ("Paris", "Paris, France", False),
        ("two  words", "\n\nTwo words", True),
    ],
)
def test_when_an_answer_is_right(reference: str, text: str, expected: bool) -> None:
    assert right(reference, text) is expected


def test_wrong_bytes_are_found(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = CpuTransfer.load

    def zeroing(self: CpuTransfer, plan: Any, storage: Any) -> None:
        whole(self, plan, storage)
        storage[plan.blocks, :] = 0

    items = [
        {"prompt": f"{number}: the quick brown fox jumps over the lazy dog", "answer": "so"} for number in range(3)
    ]
    asked = questions(write(tmp_path / "q.jsonl", items), shots=0)
    assert evaluate(tiny_llama, SMALL, asked, max_new_tokens=8).parity
    monkeypatch.setattr(CpuTransfer, "load", zeroing)
    found = evaluate(tiny_llama, SMALL, asked, max_new_tokens=8)
    assert not found.parity
    assert [run.unexplained > 0 for run in found.runs] == [False, False, True, True]
    assert found.runs[2].perplexity != found.runs[0].perplexity


def test_a_run_that_reuses_nothing_is_no_proof(tiny_llama: Path, tmp_path: Path) -> None:
    asked = questions(write(tmp_path / "q.jsonl", [{"prompt": "a", "answer": "b"}]), shots=0)
    found = evaluate(tiny_llama, SMALL, asked, max_new_tokens=1)
    assert not found.parity and all(run.changed == 0 for run in found.runs)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has 0 questions"),
        ('{"question": "a", "answer": "b"}\n{"question": ', "line 2: no JSON"),
        ('{"question": "a"}', 'line 1: it needs "answer"'),
        ('{"answer": "a"}', 'and "question"'),
        ('["a"]', "line 1: it needs"),
        ('{"question": 3, "answer": "b"}', "line 1: it needs"),
        ('{"question": "a", "answer": "b"}\n', "5 of them are examples"),
    ],
)
def test_files_that_cannot_be_used(call: Stowage, tiny_llama: Path, tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "q.jsonl").write_text(text)
    result = call("verify", tiny_llama, "--eval", tmp_path / "q.jsonl")
    assert result.exit_code == 2 and says in result.stderr


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        questions(tmp_path / "q.jsonl")


def test_a_question_that_does_not_fit(tiny_llama: Path, tmp_path: Path) -> None:
    asked = questions(write(tmp_path / "q.jsonl", [{"prompt": "word " * 5000, "answer": "b"}]), shots=0)
    with pytest.raises(RequestError, match="above the context"):
        evaluate(tiny_llama, SMALL, asked)
    assert tasks.NEW_TOKENS == 256


@pytest.mark.rare
def test_a_budget_for_weights_is_compared_with_none(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every tier off all weights are in memory: one byte of a streamed layer is enough to be seen."""
    from stowage.weights.delivery import Streamed

    memory = Memory(
        kv_cache_memory="1MiB",
        host_memory="8MiB",
        block_size=4,
        chunk_blocks=2,
        weights="model.layers.*=stream",
        max_num_batched_tokens=256,
    )
    report = verify(tiny_llama, memory)
    assert report.parity
    first = [case for case in report.cases if case.name.endswith("first time")]
    assert first and all(case.exact for case in first)
    whole = Streamed.deliver

    def wrong(self: Any, views: Any) -> None:
        whole(self, views)
        self.parameters[0].data.view(-1)[0] += 1.0

    monkeypatch.setattr(Streamed, "deliver", wrong)
    assert not verify(tiny_llama, memory).parity


@pytest.mark.rare
def test_shared_stores_serve_alone(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    memory = Memory(
        kv_cache_memory="8MiB", host_memory="8MiB", block_size=4, chunk_blocks=2, object=f"file://{tmp_path}/store"
    )
    report = verify(tiny_llama, memory)
    assert report.parity
    alone = [case for case in report.cases if case.tier == "object" and case.verdict == "ok"]
    assert len(alone) >= 4 and all(case.reused_tokens["object"] > 0 == case.reused_tokens["disk"] for case in alone)
    assert report.features()["object, restarted"] == report.features()["disk, restarted"] == "ok"


@pytest.mark.rare
def test_families(call: Stowage) -> None:
    result = call("verify", "--families", "gemma3", *FLAGS, "--json", "--seed", "2")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["parity"], list(report["families"])) == (0, True, ["gemma3"])
    features = ["computed", "device", "host", "disk", "first part only", "all at once", "disk, restarted"]
    assert report["families"]["gemma3"]["features"] == dict.fromkeys(features, "ok")
    text = call("verify", "--families", " llama", *FLAGS)
    assert text.exit_code == 0 and "first part only" in text.stdout and "Parity:" in text.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("verify",), "give one of the two"),
        (("verify", "model", "--families", "llama"), "give one of the two"),
        (("verify", "--families", "lama"), "llama"),
        (("verify", "--families", "llama", "--eval", "q.jsonl"), "give a MODEL"),
    ],
)
def test_wrong_use(call: Stowage, arguments: tuple[str, ...], says: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2 and says in result.stderr
