"""``stowage run`` and ``stowage tiny`` on a real, tiny model."""

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from stowage.cli.tiny import _FAMILIES
from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.engine.sampling_params import SamplingParams
from stowage.testing import tiny_models
from tests.cli.conftest import OwnProcess, Stowage

KEYS = {"text", "token_ids", "finish_reason", "prompt_tokens", "reused_tokens", "ttft_s", "decode_tokens_per_s"}
DOCUMENT = "It is laid in the holds so that nothing shifts, and what is needed first lies on top. " * 4


def answers(stdout: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stdout.splitlines()]


def test_help_names_the_families_that_there_are() -> None:
    assert _FAMILIES.startswith(f"{', '.join(tiny_models.KINDS)}, ")


def test_what_was_loaded_is_not_searched_for_cycles(
    call: Stowage, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[int] = []
    generate = Engine.generate

    def noted(engine: Engine, *arguments: Any, **options: Any) -> Any:
        frozen.append(gc.get_freeze_count())
        return generate(engine, *arguments, **options)

    monkeypatch.setattr(Engine, "generate", noted)
    assert call("run", tiny_llama, "--raw", "-p", "a", "-p", "b", "--max-new-tokens", "2", "--json").exit_code == 0
    assert frozen and frozen[0] > 100_000 and gc.get_freeze_count() == 0


def test_tiny_writes_the_same_checkpoint_for_the_same_seed(call: Stowage, tmp_path: Path) -> None:
    sizes = ["--hidden", "32", "--layers", "2", "--vocab", "300"]
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        assert call("tiny", "qwen3", tmp_path / name, *sizes, "--seed", str(seed)).exit_code == 0
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]) == (32, 2, 300)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["llamma", "new"], "llamma"),
        (["llama", "new", "--hidden", "7"], "--hidden"),
        (["llama", "new", "--vocab", "3"], "--vocab"),
        (["llama", "new", "--dtype", "int4"], "--dtype"),
        (["llama", "."], "not empty"),
    ],
)
def test_tiny_refuses(call: Stowage, tmp_path: Path, arguments: list[str], words: str) -> None:
    (tmp_path / "something").write_text("")
    result = call("tiny", *arguments)
    assert result.exit_code == 2 and words in result.stderr


def test_run_prints_one_object_per_prompt(call: Stowage, tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(DOCUMENT)
    result = call(
        "run", tiny_llama, "--raw", "one", "--prompt", "two", "--prompt-file", "prompt.txt", "--prompt-file", "-",
        "--max-new-tokens", "4", "--kv-cache-memory", "8MiB", "--json", stdin="three",
    )  # fmt: skip
    found = answers(result.stdout)
    assert result.exit_code == 0 and [item["prompt_tokens"] for item in found] == [3, 3, len(DOCUMENT), 5]
    for item in found:
        assert item.keys() == KEYS
        assert item["reused_tokens"] == {"device": 0, "host": 0, "disk": 0}
        assert len(item["token_ids"]) == 4 and item["finish_reason"] == "length"
        assert item["ttft_s"] > 0 and item["decode_tokens_per_s"] > 0


def test_text_goes_to_stdout_and_cost_to_stderr(call: Stowage, tiny_llama: Path) -> None:
    flags = ["run", tiny_llama, "--raw", "--kv-cache-memory", "8MiB", "--max-new-tokens", "6"]
    text = answers(call(*flags, "--prompt", "one", "--json").stdout)[0]["text"]
    streamed = call(*flags, "--prompt", "one")
    assert streamed.stdout == text + "\n"
    assert streamed.stderr.count("[3 prompt tokens; reused 0 (device 0, host 0, disk 0); ") == 1
    both = call(*flags, "--prompt", "one", "--prompt", "one")
    assert both.stdout == 2 * (text + "\n") and "prompt 2 of 2" in both.stderr


def test_sampling_flags_reach_the_sampler(call: Stowage, tiny_llama: Path) -> None:
    flags = [
        "run",
        tiny_llama,
        "--raw",
        "--kv-cache-memory",
        "8MiB",
        "--prompt",
        "one",
        "--json",
        "--max-new-tokens",
        "12",
    ]
    greedy = answers(call(*flags, "--logprobs", "3").stdout)[0]
    assert all(len(item["top"]) == 3 and item["top"][0][0] == item["token_id"] for item in greedy["logprobs"])
    sampled = [
        answers(call(*flags, "--temperature", "1.5", "--seed", seed).stdout)[0]["token_ids"] for seed in ("5", "5", "6")
    ]
    assert sampled[0] == sampled[1] != sampled[2]
    only = answers(call(*flags, "--temperature", "1.5", "--top-k", "1").stdout)[0]
    assert only["token_ids"] == greedy["token_ids"]
    stop = greedy["text"][2:4]
    stopped = answers(call(*flags, "--stop", stop).stdout)[0]
    assert stopped["finish_reason"] == "stop" and stopped["text"] == greedy["text"][: greedy["text"].index(stop)]


@pytest.mark.slow
def test_a_second_process_finds_the_prefix_on_disk(call_process: OwnProcess, tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "doc.txt").write_text(DOCUMENT)
    flags = [
        "--prompt-file",
        tmp_path / "doc.txt",
        "--max-new-tokens",
        "5",
        "--kv-cache-memory",
        "8MiB",
        "--host-memory",
        "8MiB",
    ]
    disk = ["--disk", f"{tmp_path}/kv:64MiB", "--json"]
    cold, warm = (call_process("run", tiny_llama, "--raw", *flags, *disk) for _ in range(2))
    assert (cold.returncode, warm.returncode) == (0, 0), warm.stderr
    first, second = answers(cold.stdout)[0], answers(warm.stdout)[0]
    assert first["reused_tokens"] == {"device": 0, "host": 0, "disk": 0}
    assert second["reused_tokens"]["disk"] >= len(DOCUMENT) - 64
    assert first["token_ids"] == second["token_ids"]
    held = json.loads(call_process("stats", tmp_path / "kv", "--json").stdout)
    assert held["chunks"] * 64 >= second["reused_tokens"]["disk"] and len(held["namespaces"]) == 1
    assert held["other_files"] == 0 and held["payload_bytes"] < held["bytes"] <= 64 << 20
    assert ((tmp_path / "kv").stat().st_mode & 0o777) == 0o700


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "no prompt"),
        (["--prompt", ""], "empty"),
        (["--prompt", "x" * 5000], "4096"),
        (["--prompt-file", "missing.txt"], "missing.txt"),
        (["--prompt-file", "binary"], "not UTF-8"),
        (["--prompt", "x", "--kv-cache-memory", "1KiB"], "least that works"),
        (["--prompt", "x", "--host-memory", "1KiB"], "set --host-memory to at least"),
        (["--prompt", "x", "--host-memory", "8MiB", "--disk", "kv:1KiB"], "least that works"),
        (["--prompt", "x", "--host-memory", "8MiB", "--disk", "file:1GiB"], "cache directory"),
        (["--prompt", "x", "--top-p", "2"], "--top-p must be"),
        (["--prompt", "x", "--dtype", "int3"], "int3"),
        (["--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens must be"),
    ],
)
def test_what_cannot_be_run_says_why(
    call: Stowage, tiny_llama: Path, tmp_path: Path, flags: list[str], words: str
) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xff")
    (tmp_path / "file").write_text("")
    result = call("run", tiny_llama, "--raw", *flags)
    assert result.exit_code == 2 and result.stdout == ""
    assert words in result.stderr and result.stderr.startswith("stowage: ") and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: (d / "config.json").unlink(), "config.json"),
        (lambda d: (d / "model.safetensors").unlink(), "safetensors"),
        (lambda d: (d / "model.safetensors").write_bytes(b"\xff" * 100), "damaged"),
        (lambda d: (d / "config.json").write_text('{"model_type": "bert"}'), "bert"),
        (lambda d: (d / "config.json").write_text('{"model_type": "gpt2"}'), "could not load"),
        (lambda d: (d / "config.json").write_text("{"), "config.json"),
    ],
)
def test_damaged_checkpoints(call: Stowage, tiny_llama: Path, tmp_path: Path, damage: Any, words: str) -> None:
    copy = tmp_path / "model"
    copy.mkdir()
    for path in tiny_llama.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    damage(copy)
    result = call("run", copy, "--raw", "--prompt", "x")
    assert result.exit_code == 2 and words in result.stderr


def test_missing_models_are_told_without_a_network(call: Stowage) -> None:
    for name in ("./nowhere", "/nowhere", "no-such/model-here"):
        result = call("run", name, "--raw", "--prompt", "x")
        assert result.exit_code == 2 and name in result.stderr


def test_cuda_graphs_need_a_cuda_device(call: Stowage, tiny_llama: Path) -> None:
    result = call("run", tiny_llama, "--raw", "--prompt", "x", "--max-new-tokens", "1", "--cuda-graphs", "on")
    assert result.exit_code == 2 and "--cuda-graphs is not possible here: it needs a CUDA device" in result.stderr
    assert (
        call("run", tiny_llama, "--raw", "--prompt", "x", "--max-new-tokens", "1", "--cuda-graphs", "off").exit_code
        == 0
    )


def test_stats_of_what_is_no_cache(call: Stowage, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        result = call("stats", path)
        assert result.exit_code == 2 and str(path) in result.stderr
    assert not (tmp_path / "nowhere").exists()


def test_a_chat_model_gets_its_template(call: Stowage, tiny_llama: Path, tmp_path: Path) -> None:
    """The same as a message in Python; `--raw` is the text; a template of one's own stands in for the model's."""
    flags = ["--kv-cache-memory", "8MiB", "--max-new-tokens", "6", "--prompt", "one", "--json"]
    told = call("run", tiny_llama, *flags)
    assert told.exit_code == 0 and "--raw gives the text as it is" in told.stderr
    chat = call("run", tiny_llama, *flags, "--chat")
    assert json.loads(chat.stdout)["prompt_tokens"] == json.loads(told.stdout)["prompt_tokens"]
    raw = call("run", tiny_llama, *flags, "--raw")
    (tmp_path / "own.jinja").write_text("{{ messages[0]['content'] }}")
    own = call("run", tiny_llama, *flags, "--chat-template", tmp_path / "own.jinja")
    counts = [json.loads(result.stdout)["prompt_tokens"] for result in (told, raw, own)]
    assert counts[0] > counts[1] == counts[2]
    with Engine(tiny_llama, Memory(kv_cache_memory="8MiB")) as engine:
        (expected,) = engine.generate([[{"role": "user", "content": "one"}]], SamplingParams(max_new_tokens=6))
    assert json.loads(told.stdout)["text"] == expected.text


def test_a_model_without_a_template_says_so(call: Stowage, tiny_llama: Path, tmp_path: Path) -> None:
    """An answer that ends at once is no puzzle then."""
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    (model / "chat_template.jinja").unlink(missing_ok=True)
    config = model / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": None}))
    flags = ["--kv-cache-memory", "8MiB", "--max-new-tokens", "2", "--prompt", "one"]
    told, raw = call("run", model, *flags), call("run", model, *flags, "--raw")
    assert told.exit_code == 0 and told.stdout == raw.stdout
    assert "no chat template" in told.stderr and "no chat template" not in raw.stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [("{% for %}", "cannot be used"), ("", "is empty"), ("{{ 1 / 0 }}", "cannot be used"), (None, "cannot be read")],
)
def test_templates_that_cannot_be_used(
    call: Stowage, tiny_llama: Path, tmp_path: Path, text: str | None, says: str
) -> None:
    path = tmp_path / "own.jinja"
    if text is not None:
        path.write_text(text)
    result = call("run", tiny_llama, "--prompt", "x", "--chat-template", path)
    assert result.exit_code == 2 and says in result.stderr.replace("\n", " ")
    assert "leave out one" in call("run", tiny_llama, "-p", "x", "--raw", "--chat-template", path).stderr.replace(
        "\n", " "
    )
