"""Adapters over HTTP: each under a name of its own, beside the base model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import openai
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from stowage import Engine, Memory, SamplingParams
from stowage.cli.app import app
from tests.server.process import Server

PROMPT = "What is needed first lies on top, and nothing shifts in the holds. " * 3


@pytest.fixture(scope="module")
def adapters(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, found = tmp_path_factory.mktemp("adapters"), {}
    for seed, name in enumerate(("polite", "terse")):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(tiny_llama)
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        found[name] = root / name
        peft.get_peft_model(model, config).save_pretrained(found[name])
    return found


def test_each_adapter_is_a_model(start: Callable[..., Server], tiny_llama: Path, adapters: dict[str, Path]) -> None:
    flags = [part for name, path in adapters.items() for part in ("--adapter", f"{name}={path}")]
    server = start(*flags, "--host-memory", "16MiB")
    expected = {}
    with Engine(tiny_llama, Memory(kv_cache_memory="8MiB"), adapter=adapters) as engine:
        params = SamplingParams(max_new_tokens=12, ignore_eos=True)
        for name in ("", *adapters):
            expected[name or "tiny"] = engine.generate(PROMPT, params, adapter=name)[0].text
    assert len(set(expected.values())) == 3
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        assert [model.id for model in client.models.list().data] == ["tiny", *adapters]
        assert client.models.retrieve("terse").model_dump()["parent"] == "tiny"
        for _ in range(2):
            for name, text in expected.items():
                answer = client.completions.create(
                    model=name, prompt=PROMPT, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
                )
                assert (answer.choices[0].text, answer.model) == (text, name)
        with pytest.raises(openai.NotFoundError, match="'tiny', 'polite', 'terse'"):
            client.completions.create(model="rude", prompt=PROMPT)


def test_names_that_cannot_be_told_apart_are_refused(tiny_llama: Path, adapters: dict[str, Path]) -> None:
    path = adapters["polite"]
    for given, told in (
        ([str(path)], "under which name"),
        ([f"tiny={path}"], "is taken already"),
        ([f"a={path}", f"a={path}"], "is taken already"),
    ):
        flags = [part for one in given for part in ("--adapter", one)]
        result = CliRunner().invoke(app, ["serve", str(tiny_llama), "--port", "0", *flags])
        assert result.exit_code == 2 and told in " ".join(result.output.split()), result.output


def test_run_takes_an_adapter_and_says_what_one_is(tiny_llama: Path, adapters: dict[str, Path]) -> None:
    def run(*arguments: object) -> str:
        asked = ["--raw", "--prompt", PROMPT, "--max-new-tokens", "12"]
        return CliRunner().invoke(app, ["run", *map(str, arguments), *asked]).output

    plain, polite = run(tiny_llama), run(tiny_llama, "--adapter", adapters["polite"])
    assert plain.partition("\n")[0] != polite.partition("\n")[0]
    told = " ".join(run(adapters["polite"]).split())
    assert "is an adapter, which goes on top of a model" in told and "--adapter" in told
