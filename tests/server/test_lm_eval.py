"""lm-eval against the server: its `local-completions` model, on tasks of local files, scores as Transformers does.

Needs the harness in `.lm-eval`: `make lm-eval` brings it and runs this.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stowage.config.memory import Memory
from stowage.demo.corpus import heldout_text, model_path
from stowage.engine.engine import Engine
from stowage.engine.sampling_params import SamplingParams
from tests.server.process import Server

pytestmark = pytest.mark.lmeval
HARNESS = Path(__file__).parents[2] / ".lm-eval"
QUESTIONS = 12
NEW_TOKENS = 12
CLOSE = 2e-3
"""Of a sum over some ten tokens."""

TASKS = {
    "choose": """
        output_type: multiple_choice
        doc_to_text: "{{text}}"
        doc_to_choice: "{{choices}}"
        doc_to_target: "{{right}}"
        target_delimiter: ""
        metric_list: [{metric: acc}]
        """,
    "roll": """
        output_type: loglikelihood_rolling
        doc_to_text: ""
        doc_to_target: "{{page}}"
        metric_list: [{metric: word_perplexity}]
        """,
    "go_on": f"""
        output_type: generate_until
        doc_to_text: "{{{{text}}}}"
        doc_to_target: "{{{{choices[right]}}}}"
        generation_kwargs: {{max_gen_toks: {NEW_TOKENS}, until: ["\\n\\n", "never seen"], temperature: 0}}
        metric_list: [{{metric: exact_match}}]
        """,
}


@pytest.fixture(scope="module")
def documents() -> list[dict[str, Any]]:
    """Sentences cut in the middle, how each goes on, and how others do; and pages."""
    words = heldout_text().split()
    pieces = [words[at : at + 60] for at in range(0, 60 * 4 * QUESTIONS, 60)]
    return [
        {
            "text": " ".join(pieces[4 * n][:52]),
            "choices": [" " + " ".join(pieces[4 * n + k][52:57]) for k in range(4)],
            "right": 0,
            "page": " ".join(pieces[4 * n + 1] + pieces[4 * n + 2]),
        }
        for n in range(QUESTIONS)
    ]


@pytest.fixture(scope="module")
def served(start) -> Server:
    return start("--host-memory", "64MiB", "--dtype", "float32", "--kv-cache-memory", "32MiB", model=Path(model_path()))


@pytest.fixture(scope="module")
def found(served, documents, tmp_path_factory) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """What the harness found out: asked with token ids in batches, and with texts, several at a time."""
    folder = tmp_path_factory.mktemp("evaluation")
    (folder / "docs.jsonl").write_text("\n".join(json.dumps(document) for document in documents))
    for name, body in TASKS.items():
        data = json.dumps({"data_files": {"test": str(folder / "docs.jsonl")}})
        shared = [f"task: {name}", "test_split: test", "dataset_path: json", f"dataset_kwargs: {data}"]
        (folder / f"{name}.yaml").write_text("\n".join([*shared, textwrap.dedent(body).strip()]) + "\n")
    model = {"model": served.model, "base_url": served.url + "/v1/completions", "max_length": 1024, "max_retries": 1}
    model |= {"tokenizer": str(model_path()), "tokenizer_backend": "huggingface"}
    # Without token ids the harness cannot tell where a continuation begins: it can only have texts generated.
    texts = model | {"tokenized_requests": False, "num_concurrent": 4}
    runs = {
        "token ids": {"tasks": list(TASKS), "batch_size": 5, "model_args": model},
        "texts": {"tasks": ["go_on"], "batch_size": 1, "model_args": texts},
    }
    (folder / "runs.json").write_text(json.dumps({"tasks": str(folder), "runs": list(runs.values())}))
    offline = {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    environment = {"PYTHONPATH": str(HARNESS), "PATH": os.environ["PATH"], "HOME": str(folder), **offline}
    command = [sys.executable, str(Path(__file__).parent / "harness.py"), "runs.json", "found.json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(runs, json.loads((folder / "found.json").read_text()), strict=True))


@pytest.fixture(scope="module")
def plain() -> Any:
    return AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(model_path())


def score(plain: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """The continuation's log-probability, and whether it is what greedy decoding says."""
    with torch.inference_mode():
        rows = plain(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1].log_softmax(-1)
    wanted = torch.tensor(continuation)
    return float(rows.gather(-1, wanted[:, None]).sum()), bool((rows.argmax(-1) == wanted).all())


def test_tasks_with_token_ids_in_batches(found, documents, plain, tokenizer, greedy_texts) -> None:
    def encoded(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    samples = found["token ids"]
    right = 0
    for document, sample in zip(documents, samples["choose"], strict=True):
        start = encoded(document["text"])
        wholes = [encoded(document["text"] + choice) for choice in document["choices"]]
        expected = [score(plain, start, whole[len(start) :]) for whole in wholes]
        scored = [(float(value), flag in (True, "True")) for ((value, flag),) in sample["resps"]]
        assert [value for value, _ in scored] == pytest.approx([value for value, _ in expected], abs=CLOSE)
        assert [flag for _, flag in scored] == [flag for _, flag in expected]
        assert sample["acc"] == float(max(range(4), key=lambda n, e=expected: e[n][0]) == document["right"])
        right += sample["acc"]
    assert right > QUESTIONS // 2, "the committed model knows how sentences go on"
    for document, sample in zip(documents, samples["roll"], strict=True):
        ((value,),) = sample["resps"]
        expected_sum = score(plain, [tokenizer.bos_token_id], encoded(document["page"]))[0]
        assert float(value[0] if isinstance(value, list) else value) == pytest.approx(expected_sum, abs=10 * CLOSE)
    assert [sample["resps"][0][0] for sample in samples["go_on"]] == greedy_texts(encoded)


def test_tasks_with_texts_at_the_same_time(found, greedy_texts) -> None:
    assert [sample["resps"][0][0] for sample in found["texts"]["go_on"]] == greedy_texts(str)


@pytest.fixture(scope="module")
def greedy_texts(documents) -> Iterator[Callable[[Callable[[str], Any]], list[str]]]:
    """How the engine goes on from every document, given as what the function makes of its text."""
    with Engine(model_path(), Memory(kv_cache_memory="32MiB"), dtype="float32") as engine:
        params = SamplingParams(max_new_tokens=NEW_TOKENS, stop=("\n\n", "never seen", "<eos>"))
        yield lambda made: [c.text for c in engine.generate([made(d["text"]) for d in documents], params)]
