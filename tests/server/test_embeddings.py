"""`/v1/embeddings`: vectors as the checkpoint's own files say, the same to the bit alone and in a batch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

from stowage.engine.embedder import Embedder
from stowage.errors import CheckpointError, UnsupportedModelError
from stowage.models.pooling import is_embedding_model, read_pipeline
from stowage.testing import tiny_models
from tests.server.process import Server

TEXTS = ["a", "Where is the harbour?", "The ship lies deep in the water, and the tide is out.", "ab " * 20]
MODULE = "sentence_transformers.models."


def pipeline(directory: Path, pooling: dict[str, Any], *after: str, **texts: Any) -> Path:
    """Write the files that make `directory` a checkpoint of sentence-transformers."""
    kinds = ["Transformer", "Pooling", *after]
    paths = ["", *(f"{i}_{kind}" for i, kind in enumerate(kinds[1:], 1))]
    listed = [{"idx": i, "name": str(i), "path": paths[i], "type": MODULE + kind} for i, kind in enumerate(kinds)]
    (directory / "modules.json").write_text(json.dumps(listed))
    for path in paths[1:]:
        (directory / path).mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 64, **texts}))
    return directory


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like Qwen3-Embedding: the last token's state, of length one."""
    made = tiny_models.write("qwen3", tmp_path_factory.mktemp("embedding") / "decoder")
    return pipeline(made, {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "Normalize")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory, decoder: Path) -> Path:
    """Like the models of BERT: the mean of all states."""
    made = tmp_path_factory.mktemp("embedding") / "encoder"
    torch.manual_seed(0)
    vocab = json.loads((decoder / "config.json").read_text())["vocab_size"]
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = BertModel(BertConfig(vocab_size=vocab, max_position_embeddings=80, initializer_range=0.3, **small))
    tiny_models.vary(model)
    model.save_pretrained(made)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(decoder / name, made)
    return pipeline(made, {"pooling_mode_mean_tokens": True})


def states(directory: Path, text: str) -> torch.Tensor:
    """Hidden states `[tokens, width]`, by Transformers alone."""
    model = AutoModel.from_pretrained(directory).eval()
    ids = torch.tensor([AutoTokenizer.from_pretrained(directory)(text)["input_ids"]])
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0].float()
    return found


def test_vectors_are_what_the_files_say(decoder: Path, encoder: Path) -> None:
    last, mean = Embedder(str(decoder)), Embedder(str(encoder))
    for text in TEXTS:
        expected = states(decoder, text)[-1]
        found = torch.tensor(last.embed(last.tokens_of(text)))
        torch.testing.assert_close(found, expected / expected.norm())
        torch.testing.assert_close(torch.tensor(mean.embed(mean.tokens_of(text))), states(encoder, text).mean(0))
    assert last.tokens_max == mean.tokens_max == 64


def test_every_mode_of_pooling_and_dense_layers(encoder: Path, tmp_path: Path) -> None:
    made = Path(shutil.copytree(encoder, tmp_path / "all"))
    modes = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    pipeline(made, {f"pooling_mode_{mode}": True for mode in modes}, "Dense", do_lower_case=True)
    weight, bias = torch.randn(5, 6 * 32) * 0.1, torch.randn(5)
    save_file({"linear.weight": weight, "linear.bias": bias}, made / "2_Dense" / "model.safetensors")
    activation = {"activation_function": "torch.nn.modules.activation.Tanh"}
    (made / "2_Dense" / "config.json").write_text(json.dumps(activation))
    prompts = {"prompts": {"query": "Find: "}, "default_prompt_name": "query"}
    (made / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    hidden = states(encoder, "Find: the tide")
    steps = torch.arange(1, len(hidden) + 1)[:, None]
    pooled = [hidden[0], hidden.amax(0), hidden.mean(0), hidden.sum(0) / len(hidden) ** 0.5]
    pooled += [(hidden * steps).sum(0) / steps.sum(), hidden[-1]]
    embedder = Embedder(str(made))
    found = torch.tensor(embedder.embed(embedder.tokens_of("The Tide")))
    torch.testing.assert_close(found, (weight @ torch.cat(pooled) + bias).tanh())


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("modules.json", "{", "cannot be read"),
        ("modules.json", "[1]", "damaged"),
        ("modules.json", '[{"type": "x.Pooling", "path": "../.."}]', "outside"),
        ("modules.json", '[{"type": "x.Transformer", "path": ""}]', "no Pooling"),
        ("modules.json", '[{"type": "x.LSTM", "path": "1_LSTM"}]', "LSTM"),
        ("1_Pooling/config.json", "{}", "its pooling is none"),
        ("1_Pooling/config.json", '{"pooling_mode": "median"}', "median"),
        ("1_Pooling/config.json", '{"pooling_mode_cls_token": true, "include_prompt": false}', "include_prompt"),
    ],
)
def test_what_is_not_understood_is_refused(file: str, content: str, words: str, encoder: Path, tmp_path: Path) -> None:
    made = Path(shutil.copytree(encoder, tmp_path / "odd"))
    (made / file).write_text(content)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=words):
        read_pipeline(made)


def test_a_model_that_generates_has_no_vectors(tiny_llama: Path) -> None:
    assert not is_embedding_model(tiny_llama)
    with pytest.raises(UnsupportedModelError, match="sentence-transformers"):
        Embedder(str(tiny_llama))


@pytest.fixture(scope="module")
def both(start: Callable[..., Server], decoder: Path) -> Server:
    """A server that generates and makes vectors."""
    return start("--host-memory", "16MiB", "--embedding-model", str(decoder))


@pytest.fixture
def asking(both: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=both.url + "/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_the_official_client_gets_the_bits_of_each_text_alone(asking: openai.OpenAI, decoder: Path) -> None:
    embedder = Embedder(str(decoder))
    alone = [embedder.embed(embedder.tokens_of(text)) for text in TEXTS]
    together = asking.embeddings.create(model="decoder", input=TEXTS)  # base64, as the client asks by itself
    assert [item.embedding for item in together.data] == alone
    assert [item.index for item in together.data] == [0, 1, 2, 3]
    plainly = asking.embeddings.create(model="decoder", input=TEXTS, encoding_format="float")
    assert [item.embedding for item in plainly.data] == alone
    tokens = [embedder.tokens_of(text) for text in TEXTS]
    assert [item.embedding for item in asking.embeddings.create(model="decoder", input=tokens).data] == alone
    assert asking.embeddings.create(model="decoder", input=tokens[1]).data[0].embedding == alone[1]
    assert together.usage.prompt_tokens == together.usage.total_tokens == sum(map(len, tokens))
    short = (
        asking.embeddings.create(model="decoder", input="a", dimensions=4, encoding_format="float").data[0].embedding
    )
    cut = torch.tensor(alone[0][:4], dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(short, dtype=torch.float64), cut / cut.norm())
    assert {model.id for model in asking.models.list()} == {"tiny", "decoder"}
    assert asking.completions.create(model="tiny", prompt="a", max_tokens=2).choices[0].text is not None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"model": "tiny", "input": "a"}, "--embedding-model"),
        ({"model": "none", "input": "a"}, "does not exist"),
        ({"model": "decoder"}, "'input'"),
        ({"model": "decoder", "input": []}, "1 to 2048"),
        ({"model": "decoder", "input": ["a"] * 2049}, "1 to 2048"),
        ({"model": "decoder", "input": ""}, "empty"),
        ({"model": "decoder", "input": ["a", []]}, "empty"),
        ({"model": "decoder", "input": ["a", 1.5]}, "'input'"),
        ({"model": "decoder", "input": [1, 99999999]}, "no token"),
        ({"model": "decoder", "input": ["a", "b " * 100]}, "input 1: A text has"),
        ({"model": "decoder", "input": "b" * 100_000}, "more tokens"),
        ({"model": "decoder", "input": "a", "dimensions": 0}, "dimensions"),
        ({"model": "decoder", "input": "a", "dimensions": 1 << 20}, "dimensions"),
        ({"model": "decoder", "input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"model": "decoder", "input": "a", "colour": 1}, "Unrecognized"),
    ],
)
def test_what_cannot_be_made_is_refused_with_the_reason(body: dict[str, Any], words: str, both: Server) -> None:
    answer = httpx.post(both.url + "/v1/embeddings", json=body, timeout=60)
    assert answer.status_code in (400, 404)
    assert words in answer.json()["error"]["message"]


def test_an_embedding_model_is_served_alone(start: Callable[..., Server], encoder: Path) -> None:
    server = start(model=encoder)
    assert server.told["embedding_dimension"] == 32
    embedder = Embedder(str(encoder))
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        found = client.embeddings.create(model="encoder", input=TEXTS[1:3])
        assert [item.embedding for item in found.data] == [embedder.embed(embedder.tokens_of(t)) for t in TEXTS[1:3]]
        assert client.models.list().data[0].id == client.models.retrieve("encoder").id == "encoder"
        with pytest.raises(openai.BadRequestError, match="makes vectors"):
            client.completions.create(model="encoder", prompt="a")
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.models.retrieve("tiny")
    assert httpx.get(server.url + "/health").json() == {"status": "ok"}
    assert "version" in httpx.get(server.url + "/version").json()
    assert server.metrics()[("stowage_http_requests_total", (("route", "/v1/embeddings"), ("status", "200")))] == 1
    server.stop()
