"""Starting: what is not imported, not looked at again and not found out twice."""

import copy
import importlib.metadata
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoTokenizer
from transformers.utils.import_utils import define_import_structure, direct_transformers_import

import stowage
from stowage.errors import CheckpointError, ConfigError
from stowage.models import directory, import_structure, probing, quick_import
from stowage.models.directory import load_tokenizer, until_added_tokens
from stowage.models.files import check_given
from stowage.models.hub import find_config
from stowage.testing import tiny_models
from stowage.testing.tiny_models.vocabulary import tokenizer
from tests.nursery import QUICKLY

SOURCE = Path(stowage.__file__).parents[1]
MODELS = Path(transformers.__file__).parent / "models"


def run(program: str, model: Path) -> str:
    """What ``program`` prints, whose argument is ``model``, in a home where nothing is remembered."""
    done = subprocess.run(
        [sys.executable, "-c", program, str(model)],
        env={"PYTHONPATH": str(SOURCE), "HOME": str(model.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_is_remembered_of_transformers_files_is_what_it_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    looked: list[str] = []

    def look(path: str, prefix: str | None = None) -> Any:
        looked.append(path)
        return define_import_structure(path, prefix)

    structure = import_structure._remembered(look)
    within, alone = define_import_structure(str(MODELS), "models"), define_import_structure(str(MODELS / "__init__.py"))
    assert {k: v for k, v in structure(MODELS, prefix="models").items() if k} == {k: v for k, v in within.items() if k}
    assert structure(str(MODELS / "__init__.py")) == alone
    assert looked == [str(MODELS)]
    file = tmp_path / "stowage" / "transformers.json"
    for broken in ("", "{}", "[1, 2]", file.read_text().replace(transformers.__version__, "0.1")):
        file.write_text(broken)
        assert structure(str(MODELS / "__init__.py")) == alone
    assert len(looked) == 5
    folder = str(MODELS / "llama")
    assert structure(folder) == define_import_structure(folder)  # another one is not remembered


def test_what_is_remembered_of_installed_packages_is_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])
    looked: list[int] = []

    def look() -> Any:
        looked.append(1)
        return importlib.metadata.packages_distributions()

    assert import_structure._installed(look) == import_structure._installed(look) == look()
    assert len(looked) == 2
    information = site / "my_package-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1\n")
    (information / "top_level.txt").write_text("my_module\n")
    os.utime(site, ns=(0, 1))  # installed within the same tick of the file system's clock, maybe
    assert import_structure._installed(look)["my_module"] == ["my-package"]
    file = tmp_path / "state" / "stowage" / "packages.json"
    for broken in ("", "{}", "[1, 2]"):
        file.write_text(broken)
        assert import_structure._installed(look) == importlib.metadata.packages_distributions()
    looked.clear()
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, importlib.metadata.MetadataPathFinder()])
    import_structure._installed(look)
    assert looked == [1]  # what another finder finds may change without a sign


def test_a_second_transformers_is_the_first_and_another_one_is_made() -> None:
    made: list[Any] = []
    again = import_structure._the_same(lambda path, file: made.append((path, file)) or direct_transformers_import)
    assert again(MODELS.parent) is sys.modules["transformers"]
    assert not made
    again(MODELS)
    assert made == [(MODELS, "__init__.py")]


def test_a_frame_knows_its_module_as_inspect_does() -> None:
    def frames() -> Iterator[Any]:
        yield sys._getframe()
        code = (lambda: sys._getframe()).__code__
        yield FunctionType(code, {"__name__": __name__, "sys": sys})()  # not of the module that it names
        yield FunctionType(code, {"sys": sys})()

    look = inspect.getmodule
    expected = [look(one) for one in frames()]
    assert expected[0] is sys.modules[__name__]
    with quick_import._modules_by_their_names():
        assert inspect.getmodule is not look
        assert [inspect.getmodule(one) for one in frames()] == expected
        assert inspect.getmodule(Path) is look(Path)
    assert inspect.getmodule is look


def test_a_tokenizer_that_is_not_copied_is_the_same_and_can_be_copied(tmp_path: Path) -> None:
    model = tiny_models.write("llama", tmp_path / "model")
    tokenizer(128).save_pretrained(model)
    ours, theirs = load_tokenizer(model), AutoTokenizer.from_pretrained(model)
    assert type(ours) is type(theirs)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.init_kwargs == theirs.init_kwargs
    copied = copy.deepcopy(ours)
    assert copied.backend_tokenizer is not ours.backend_tokenizer
    copied.add_tokens(["<another>"])
    assert len(copied) == len(ours) + 1 == len(theirs) + 1


def test_a_tokenizers_file_is_read_up_to_its_added_tokens(tmp_path: Path) -> None:
    """The same as the whole file has, however it is written; what is wrong there is told as the whole file's error."""
    model = tiny_models.write("llama", tmp_path / "model")
    tokenizer(128).save_pretrained(model)
    whole = json.loads((model / "tokenizer.json").read_text())
    for text in (json.dumps(whole), json.dumps(whole, indent=1), json.dumps(whole, sort_keys=True) + "\n"):
        found = until_added_tokens(text)
        assert found == {name: whole[name] for name in found} and "added_tokens" in found and "model" not in found
    last = {"model": whole["model"], "added_tokens": [], "after": 1}
    assert until_added_tokens(json.dumps(last)) == {"model": whole["model"], "added_tokens": []}
    for text in ("{}", "[]", " null", '{"a": 1}', '{"a": {"added_tokens": 1}}', '"x"', '{"a": "\\u00e9"}'):
        assert until_added_tokens(text) == json.loads(text)
    for text in (
        "",
        "{",
        '{"a"',
        '{"a": ',
        '{"a": 1',
        '{"a": 1,',
        '{"a": 1,}',
        "{1: 2}",
        '{"a" 1}',
        '{"added_tokens":',
    ):
        with pytest.raises(json.JSONDecodeError):
            until_added_tokens(text)


def test_only_what_takes_no_more_of_a_tokenizers_file_is_given_less(monkeypatch: pytest.MonkeyPatch) -> None:
    def takes_more(file: Any) -> Any:
        return file.pop("added_tokens"), file["model"]

    base = transformers.tokenization_utils_base
    assert directory._takes_added_tokens(base)
    monkeypatch.setattr(base.PreTrainedTokenizerBase, "_from_pretrained", takes_more)
    assert not directory._takes_added_tokens(base)
    assert base.json is json, "as it was"


def test_an_expression_that_is_compiled_later_is_the_same() -> None:
    made = quick_import._Expressions()
    later, own = (
        made.compile("(?P<g0>a.)|(?P<g1>b+)", re.IGNORECASE),
        re.compile("(?P<g0>a.)|(?P<g1>b+)", re.IGNORECASE),
    )
    for one in (later, copy.deepcopy(later)):
        assert [one.search(text) and one.search(text).lastgroup for text in ("xaY", "BB", "c")] == ["g0", "g1", None]
        assert (one.groupindex, one.pattern, one.flags) == (own.groupindex, own.pattern, own.flags)
    assert made.sub("a", "b", "aa") == "bb" and made.escape is re.escape
    with pytest.raises(re.error):
        made.compile("(").search("x")


def test_what_answers_showed_of_a_model_is_found_out_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    forwards: list[int] = []
    forward = probing._forwards

    def counted(*args: Any, **kwargs: Any) -> Any:
        forwards.append(1)
        return forward(*args, **kwargs)

    monkeypatch.setattr(probing, "_forwards", counted)

    def looks(identity: str, family: str = "lfm2") -> tuple[int, bool]:
        model = tiny_models.build(family)
        forwards.clear()
        continues = probing.look(model, identity).continues
        return len(forwards), continues

    first, again = looks("a"), looks("a")
    assert first[0] > 1
    assert again == (1, first[1])
    assert looks("another")[0] > 1
    assert looks("")[0] > 1


def test_a_class_that_is_not_transformers_own_is_looked_at_each_time() -> None:
    other = type("Other", (), {"__module__": "my_model"})()
    assert probing._key(other, "a") == ""
    own = type("Own", (), {"__module__": "transformers.models.own", "dtype": torch.float32, "device": "cpu"})()
    assert probing._key(own, "a") != probing._key(own, "b")


def test_what_a_command_is_given_is_looked_for_before_anything_slow(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom stowage.errors import CheckpointError\nfrom stowage.models.files import check_given\n"
        "try:\n    check_given(*sys.argv[1:])\nexcept CheckpointError as error:\n    print(error)\n"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    for given, said in (
        ([str(tmp_path / "none")], "does not exist"),
        ([str(tmp_path)], "holds no config.json"),
        ([str(tmp_path), str(tmp_path / "adapter")], "the adapter"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", program, *given], env={"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True
        )
        message, modules = done.stdout.splitlines()
        assert said in message
        assert modules == "set()"


def test_a_hub_id_is_left_to_the_hub_and_a_whole_checkpoint_is_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set"):
        check_given("somebody/some-model")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    check_given("somebody/some-model")
    check_given(str(tiny_models.write("llama", tmp_path / "model")))
    with pytest.raises(CheckpointError, match="no adapter of PEFT's"):
        check_given("somebody/some-model", {"name": tmp_path})
    with pytest.raises(ConfigError, match="no name of an adapter"):
        check_given("somebody/some-model", {" ": tmp_path})


def test_a_config_is_looked_for_where_it_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert find_config(str(tmp_path)) == find_config(str(tmp_path / "config.json")) == tmp_path / "config.json"
    with pytest.raises(CheckpointError, match=r"does not exist\. Give a directory with a config\.json"):
        find_config(str(tmp_path / "none"))
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set"):
        find_config("somebody/some-model")
    asked: list[tuple[str, str]] = []

    def download(name: str, file: str) -> str:
        asked.append((name, file))
        return str(tmp_path / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert find_config("somebody/some-model") == tmp_path / "config.json"
    assert asked == [("somebody/some-model", "config.json")]


LEFT_OPEN = """
import atexit, sys
import stowage
atexit.register(lambda: print(engine._loop.thread.is_alive(), request.done, flush=True))
engine = stowage.Engine(sys.argv[1])
request = engine.submit([1, 2, 3], stowage.SamplingParams(max_new_tokens=4000, ignore_eos=True))
"""


@pytest.mark.slow
def test_a_program_ends_with_an_engine_that_it_left_open(tmp_path: Path) -> None:
    model = tiny_models.write("llama", tmp_path / "model", max_position_embeddings=4096)
    said = run(QUICKLY + LEFT_OPEN, model)
    assert said.split() == ["False", "True"]
