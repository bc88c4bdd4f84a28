"""The demo's corpus, committed texts, tokenizer and model: split, sizes, round trips."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripts import demo_corpus

from stowage.demo import corpus

LARGEST_BYTES = 12_000_000  # the limit on the committed model


@pytest.fixture(scope="module")
def reference() -> demo_corpus.Corpus:
    return demo_corpus.build_corpus(include_library=False)


@pytest.fixture(scope="module")
def tokenizer():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(corpus.model_path())


def test_split_is_deterministic(reference: demo_corpus.Corpus) -> None:
    assert demo_corpus.build_corpus(include_library=False) == reference
    assert demo_corpus.is_held_out("execmodel") and demo_corpus.is_held_out("import")
    assert not demo_corpus.is_held_out("with")


def test_held_out_topics_are_not_trained_on(reference: demo_corpus.Corpus) -> None:
    trained = {document.name for document in reference.train}
    assert trained.isdisjoint(document.name for document in reference.heldout)
    assert reference.train and reference.heldout


@pytest.mark.parametrize("source", ["committed", "installed"])
def test_no_training_paragraph_quotes_held_out_text(reference: demo_corpus.Corpus, source: str) -> None:
    text = (
        corpus.heldout_text() if source == "committed" else "\n\n".join(document.text for document in reference.heldout)
    )
    held = {run for paragraph in text.split("\n\n") for run in demo_corpus.shingles(paragraph)}
    assert len(held) > 1000
    for document in reference.train:
        for paragraph in document.paragraphs:
            assert held.isdisjoint(demo_corpus.shingles(paragraph)), document.name


def test_calibration_text_quotes_no_held_out_text() -> None:
    """What matrices are fitted to would be scored."""
    held = {run for paragraph in corpus.heldout_text().split("\n\n") for run in demo_corpus.shingles(paragraph)}
    paragraphs = corpus.calibration_text().strip().split("\n\n")
    assert len(paragraphs) == len(set(paragraphs)) > 100
    for paragraph in paragraphs:
        assert held.isdisjoint(demo_corpus.shingles(paragraph))
    assert 30_000 < len(corpus.calibration_text()) < 50_000


def test_prose_is_joined_and_code_dropped() -> None:
    text = (
        'The "with" statement\n********************\n\n'
        "The ``with`` statement is used to wrap the execution of a *block* with\n"
        "methods defined by a context manager, as the text\u2019s authors say.\n\n"
        "   with_stmt ::= 'with' expression\n\n>>> with open('x') as file:\n...     pass\n"
    )
    assert demo_corpus.prose_paragraphs(text) == [
        'The "with" statement',
        'The "with" statement is used to wrap the execution of a block with methods '
        "defined by a context manager, as the text's authors say.",
    ]


def test_source_english_comes_from_docstrings_and_comments() -> None:
    comment = "# The order of the entries is kept, because the caller depends on it here.\n"
    docstring = '"""Return the value that was stored last under the given key of this table."""'
    source = f"{comment}def last(key):\n    {docstring}\n    return key\n"
    assert demo_corpus.source_paragraphs(source) == [
        "The order of the entries is kept, because the caller depends on it here.",
        "Return the value that was stored last under the given key of this table.",
    ]


def test_library_folder_is_read_without_its_tests(tmp_path: Path) -> None:
    text = '"""This is one of the modules that the library has, and it is in English."""\n'
    for name in ("kept.py", "test/skipped.py", "site-packages/skipped.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "broken.py").write_text("def (:\n", encoding="utf-8")
    assert [d.name for d in demo_corpus.library_documents(tmp_path)] == ["module:kept.py"]


def test_package_data_is_present_and_small() -> None:
    model = corpus.model_path()
    for name in (
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "card.json",
        "tokenizer_config.json",
        "generation_config.json",
    ):
        assert (model / name).is_file(), name
    assert (corpus.HERE / "LICENSE-PSF-NOTICE").is_file()
    size = sum(path.stat().st_size for path in model.iterdir())
    assert size <= LARGEST_BYTES
    assert len(corpus.heldout_text().encode()) <= 100_000


def test_document_is_held_out_text() -> None:
    held = set(corpus.heldout_text().strip().split("\n\n"))
    assert set(corpus.document_text().strip().split("\n\n")) <= held


def test_tokenizer_round_trips_text(tokenizer) -> None:
    for text in (
        '  The block\'s name, "x".\n\n\tIf so...',
        "na\u00efve \u00df \u65e5\u672c \U0001f40d",
        corpus.document_text(),
    ):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text
    assert tokenizer("The")["input_ids"][0] == tokenizer.bos_token_id
    assert 2500 <= len(tokenizer(corpus.document_text())["input_ids"]) <= 3500


def test_longer_conversations_start_with_shorter_ones(tokenizer) -> None:
    turns = [
        {"role": "user", "content": "The name is bound."},
        {"role": "assistant", "content": "It is local."},
        {"role": "user", "content": "In a block,"},
    ]
    texts = [tokenizer.apply_chat_template(turns[:count], tokenize=False) for count in (1, 2, 3)]
    assert texts[2] == "<bos>The name is bound.\n\nIt is local.\n\nIn a block,"
    assert texts[2].startswith(texts[1]) and texts[1].startswith(texts[0])


def test_card_and_config_agree() -> None:
    card = json.loads((corpus.model_path() / "card.json").read_text(encoding="utf-8"))
    config = json.loads((corpus.model_path() / "config.json").read_text(encoding="utf-8"))
    assert config["dtype"] == card["run_dtype"] == "float32"
    assert {"sliding_attention", "full_attention"} == set(config["layer_types"])
    assert config["query_pre_attn_scalar"] == config["head_dim"]
    assert 1 < card["heldout_perplexity_per_token"] < config["vocab_size"]
    assert len(card["samples"]) == len(card["document_samples"]) == 3
