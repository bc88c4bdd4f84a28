"""Wrong inputs of all commands, one a line: exit status 2, what is wrong and what is right, in at most 400 characters.

``DIR`` is a model's directory, ``NEW`` one that does not exist. None of them opens a model.
"""

from __future__ import annotations

import errno
import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Stowage

Spoil = Callable[[Path], object]
LONGEST = 400
NEXT_STEP = re.compile(
    r"\b(did you mean|add|call|change|check|choose|copy|create|delete|download|give|install|leave|lower|make|mend|move|"
    r"must|pass|pick|put|raise|remove|run|set|start|stop|try|unset|use|valid|write)\b",
    re.IGNORECASE,
)
INPUTS = """
run DIR
run DIR -p x -n 0
run DIR -p x -n -3
run DIR -p x -n many
run DIR -p x --temperature -1
run DIR -p x --temperature nan
run DIR -p x --top-p 2
run DIR -p x --top-k -5
run DIR -p x --kv-cache-memory 0
run DIR -p x --kv-cache-memory -1GiB
run DIR -p x --kv-cache-memory 5furlongs
run DIR -p x --kv-cache-memory 200%
run DIR -p x --host-memory lots
run DIR -p x --disk nowhere
run DIR -p x --disk :1GiB
run DIR -p x --device gpu
run DIR -p x --device cuda:99
run DIR -p x --dtype int3
run DIR -p x --block-size 0
run DIR -p x --max-num-seqs 0
run DIR -p x --adapter DIR
run DIR -p x --chat-template DIR/none
run DIR -p x --chat-template DIR
run DIR -p x --raw --chat-template DIR/config.json
run nonsense.json -p x
plan nonsense.json
simulate nonsense.jsonl
run DIR --prompt-file NEW
run DIR --prompt-file DIR
run DIR --prompt-file DIR/model.safetensors
run DIR -p x --config DIR/config.json
run DIR -p x --nonsense
run DIR -p x --log-level loud
run DIR -p x --log-format xml
run DIR -p x --valkey nonsense
run DIR -p x --object ftp://x
run DIR -p x --disk-protection rot13
run DIR -p x --disk-protection aes-256-gcm --disk NEW:1GiB
run DIR -p x --disk NEW:1GiB --disk-protection keyed --disk-key-file DIR/config.json
run DIR -p x --eviction-policy magic
run DIR/none -p x
run DIR/config.json -p x
run NEW -p x
run a/b/c/d -p x
run ../../../nowhere -p x
run ~nobody/model -p x
run https://huggingface.co/Qwen/Qwen3-0.6B -p x
plan https://huggingface.co/Qwen/Qwen3-0.6B
run "" -p x
run / -p x
run -p x
run DIR -p x --config NEW
run DIR -p x --seed -1
run DIR -p x --stop ""
run DIR -p x --kv-cache-memory 99PiB
run DIR -p x --kv-cache-memory 1KiB
run DIR -p x --host-memory nan
run DIR -p x --disk /proc/x:1GiB
run DIR -p x --disk DIR/config.json:1GiB
run DIR -p x --disk NEW:0
run DIR -p x --host-memory 16MiB --disk NEW:64KiB
run DIR -p x --metrics-file NEW/none
run DIR -p x --device-memory 1KiB
run DIR -p x --weights "*=nowhere"
run DIR -p x --adapter =DIR
run DIR -p x --valkey redis://
run DIR -p x --object nonsense
run DIR -p x --disk-key-file NEW
run DIR -p x --max-num-batched-tokens 0
run DIR --prompt-file ""
chat DIR --max-new-tokens 0
chat DIR/none
chat DIR --temperature -1
serve DIR --port -1
serve DIR --port abc
serve DIR --host 999.1.1.1
serve DIR --host 0.0.0.0
serve DIR --api-key-file DIR/none
serve DIR --api-key-file DIR
serve DIR --adapter x
serve DIR --max-queued-requests -1
serve DIR --max-body-size 0
serve DIR --shutdown-timeout-s -1
serve DIR --tensor-parallel-size 2
serve DIR --gpu-memory-utilization 0.9
plan DIR/none
plan DIR --device-memory x
plan DIR --machine nowhere
plan DIR --max-model-len 0
plan DIR --max-num-seqs 0
plan DIR/model.safetensors
verify DIR/none
verify --families nonsense
verify
pack DIR
pack DIR/none NEW
pack DIR NEW --bits 5
pack DIR DIR
pack DIR NEW --eval NEW
pack DIR NEW --eval DIR
pack DIR NEW --weights int3
pack DIR NEW --eval-tokens -1
pack DIR NEW --eval-tokens 1
pack DIR NEW --lossless --weights int4
serve DIR --tool-call-parser qwen3coder
serve DIR --reasoning-parser nonsense
tiny llama DIR
tiny llama NEW --layers 0
tiny llama NEW --hidden 0
tiny llama NEW --hidden 7
tiny llama NEW --vocab 1
tiny llama NEW --dtype int8
stats DIR
stats DIR/none
scrub DIR
scrub DIR/none
scrub DIR --rate x
key new DIR
key rotate DIR/none
key rotate DIR/config.json
key drop DIR/none 00
key show DIR/none
key show DIR/config.json
simulate DIR/config.json
simulate DIR/config.json --host-memory x
simulate DIR
top --interval 0
top nonsense
config nonsense
tiny nonsense NEW
tiny llama DIR/config.json/below
tiny llama /proc/x
tiny llama ""
tiny llama NEW --layers 1000000
tiny llama NEW --hidden 1000000000
tiny llama NEW --heads 3
tiny llama NEW --seed x
serve DIR --port 99999
serve DIR --host ""
serve DIR --host no.such.host.invalid
serve DIR --api-key abc
serve DIR --max-connections 0
serve DIR --max-reopens x
serve DIR --port 0 --allowed-origins x
serve DIR --port 0 --embedding-model DIR
serve DIR --port 0 --embedding-model NEW
serve DIR --port 0 --chat-template NEW
serve DIR --port 0 --adapter a=NEW
plan DIR --machine DIR/config.json
plan DIR --host-memory 200%
plan DIR --dtype int4
plan DIR --disk x
verify DIR --families llama
verify DIR --eval NEW
pack DIR /proc/x
stats /
stats /dev/null
scrub /
key rotate /dev/null
probe --dir /proc/x
top --once --url nonsense
"""


def told(result: Any, tmp_path: Path) -> str:
    """What a command that refused its input printed, in one line and without the names of temporary directories."""
    said = " ".join(result.stderr.replace("\u2502", " ").replace(str(tmp_path), "").split())
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), (said, result.exception)
    assert said and "Traceback" not in said and len(said) <= LONGEST, said
    return said


@pytest.mark.parametrize("line", INPUTS.strip().splitlines())
def test_a_wrong_input_is_told(line: str, call: Stowage, tiny_llama: Path, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny_llama, directory)
    line = line.replace("DIR", str(directory)).replace("NEW", str(tmp_path / "new"))
    said = told(call(*shlex.split(line)), tmp_path)
    assert NEXT_STEP.search(said), f"nothing says what to do: {said}"


def with_config(path: Path, **fields: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))


def only(name: str) -> Spoil:
    def spoil(path: Path) -> None:
        for file in path.iterdir():
            file.unlink()
        (path / name).write_text("GGUF")

    return spoil


@pytest.mark.parametrize(
    ("spoil", "arguments", "words"),
    [
        (lambda path: (path / "tokenizer.json").write_text("{}"), ("run", "DIR", "-p", "x"), ["Download tokenizer"]),
        (lambda path: with_config(path, hidden_size=65), ("run", "DIR", "-p", "x"), ["config.json", "multiple"]),
        (only("model.gguf"), ("run", "DIR", "-p", "x"), ["no whole GGUF file", "download it again"]),
        (only("model.gguf"), ("run", "DIR/model.gguf", "-p", "x"), ["no whole GGUF file", "download it again"]),
        (only("model.gguf"), ("plan", "DIR/model.gguf"), ["no whole GGUF file", "download it again"]),
        (None, ("run", "DIR/other.gguf", "-p", "x"), ["does not exist", "ORG/NAME:Q4_K_M"]),
        (only("adapter_config.json"), ("plan", "DIR"), ["/model holds no config.json", "hub id"]),
        (None, ("run", "DIR", "-p", "x", "--device", "mps"), ["built without mps", "Use cpu"]),
        (None, ("run", "DIR", "-p", "x", "--kv-cache-memory", "4000TiB"), ["cannot be had", "--kv-cache-memory"]),
        (None, ("run", "no-such/model", "-p", "x"), ["HF_HUB_OFFLINE is set", "Unset"]),
        (None, ("serve", "DIR", "--host", "no such name"), ["STOWAGE_HOST", "--host 127.0.0.1"]),
        (None, ("tiny", "llama", "NEW", "--heads", "0"), ["--heads"]),
        (None, ("tiny", "llama", "NEW", "--kv-heads", "3"), ["3 key-value heads"]),
        (None, ("tiny", "llama", "NEW", "--layers", "-1"), ["--layers"]),
    ],
)
def test_what_is_told_of_a_wrong_input(
    spoil: Spoil | None, arguments: tuple[str, ...], words: list[str], call: Stowage, tiny_llama: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny_llama, directory)
    if spoil is not None:
        spoil(directory)
    named = [argument.replace("DIR", str(directory)).replace("NEW", str(tmp_path / "new")) for argument in arguments]
    said = told(call(*named), tmp_path)
    assert all(word in said for word in words), said


@pytest.mark.parametrize("command", [("run", "-p", "x"), ("plan", "--machine", "typical-cpu")])
def test_weights_that_this_user_may_not_read_are_not_called_damaged(
    command: tuple[str, ...], call: Stowage, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open

    def refused(self: Path, *given: Any, **named: Any) -> Any:
        if self.suffix == ".safetensors":
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return opened(self, *given, **named)

    monkeypatch.setattr(Path, "open", refused)
    said = told(call(command[0], tiny_llama, *command[1:]), tmp_path)
    assert "model.safetensors cannot be read (Permission denied). Give this user the right" in said, said
    assert "download" not in said and "damaged" not in said


def test_others_may_read_what_tiny_writes_as_they_may_read_other_files(tiny_llama: Path) -> None:
    modes = {file.name: file.stat().st_mode for file in tiny_llama.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"], modes
