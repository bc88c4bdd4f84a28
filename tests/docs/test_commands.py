"""Every command in the documentation runs, in the order of its page, and succeeds.

Commands stand in blocks of the language `sh`. A page is one shell: what an earlier block has set up, a later one finds.
What stands for something of the reader's own (`MODEL`, hosts of shared stores) is replaced by a real one. A command
that serves goes to the background until the page serves again or ends. `NOT_RUN` says what is left out, and why.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.docs.forked import Forge
from tests.ports import free_port
from tests.tiers.servers import BUCKET, RedisServer, S3Server, credentials

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
PAGE_TIMEOUT_S: Final = 200
NOT_RUN: Final = {
    "make": "tests/unit/test_docs.py holds that the target exists, continuous integration runs them",
    "pip": "it would change the environment that the tests run in",
    "git": "needs a network",
    "cd": "into a checkout that the tests are run in",
    ".": "the environment is active",
    "docker": "no container engine runs here; tests/deploy checks the files",
    "vllm": "vLLM has an environment of its own; tests/vllm ask its server through the plugin",
    "sglang": "it needs a GPU; tests/sglang ask the backend through its interface",
    "sudo": "changes the machine; tests/deploy checks the files",
    "systemctl": "changes the machine; tests/deploy checks the files",
    "journalctl": "no service of ours is installed",
}
PRELUDE: Final = """
set -euo pipefail
curl() { command curl --fail-with-body --silent --show-error "$@"; }
serving=
end_serving() { if [ -n "$serving" ]; then kill -TERM "$serving"; wait "$serving"; serving=; fi; }
trap 'kill -KILL $serving 2>/dev/null || true' EXIT
serve() {
  end_serving; "$@" & serving=$!; SECONDS=0
  until command curl --silent --output /dev/null "http://127.0.0.1:$PORT/health"; do
    kill -0 $serving; [ $SECONDS -lt 60 ]; sleep 0.1
  done
}
"""


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and content of each fenced block."""
    return re.findall(r"^```([^\n`]*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    """The logical lines of the page's `sh` blocks: continued lines are one."""
    texts = [re.sub(r"\\\n\s*", "", text) for language, text in blocks(page) if language == "sh"]
    return [line for text in texts for line in text.splitlines() if line.strip()]


def first_word(line: str) -> str:
    """The program that a line runs."""
    return re.sub(r"^(?:\w+=\S*\s+)+", "", line.strip()).split()[0]


def script(lines: list[str], model: Path, redis_port: int) -> str:
    """What the shell is given for them."""
    parts = [PRELUDE]
    for line in lines:
        if line.lstrip().startswith("#") or first_word(line) in NOT_RUN:
            continue
        line = re.sub(r"\bMODEL\b|\b[\w.-]+\.gguf\b", str(model), line)  # GGUF: tests/weights
        line = re.sub(
            r"(?<!\S)(?:\./chat-model|(?:Qwen|openai|unsloth)/[\w.:-]+)(?!\S)", str(model), line
        )  # published: the same
        line = re.sub(r"redis://[\w.-]+:6379/0", f"redis://127.0.0.1:{redis_port}/0", line)
        line = line.replace("s3://bucket/", f"s3://{BUCKET}/")
        line = re.sub(r"--device cuda(:\d)?", "--device cpu", line)  # no GPU runs here
        line = re.sub(r"\b(127\.0\.0\.1|localhost|0\.0\.0\.0):8000\b", r"\1:$PORT", line)
        line = line.replace("--port 8000", "--port $PORT")
        if line.startswith("stowage top") and "http://" not in line:
            line = line.partition(" #")[0] + " http://127.0.0.1:$PORT"
        if line.startswith("stowage serve"):
            line = line.partition(" #")[0]
            line = "serve " + (line if "--port" in line else f"{line} --port $PORT")
        parts.append(line)
    return "\n".join([*parts, "end_serving", ""])


@pytest.fixture(scope="session")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    with Forge(tmp_path_factory.mktemp("forge")) as started:
        yield started


@pytest.fixture(scope="session")
def stores() -> Iterator[tuple[RedisServer, S3Server]]:
    redis_server, s3 = RedisServer(), S3Server()
    yield redis_server, s3
    redis_server.stop()
    s3.stop()


def write_adapter(model: Path, path: Path) -> None:
    """A LoRA adapter of ``model``, as PEFT saves it."""
    import peft
    from transformers import AutoModelForCausalLM

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(path)


def write_embedding_model(model: Path, path: Path) -> None:
    """The same model as one of sentence-transformers, which takes the last token's state."""
    shutil.copytree(model, path)
    (path / "modules.json").write_text(
        '[{"idx": 0, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]'
    )
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')


@pytest.mark.commands
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_every_command_of_a_page(
    page: Path, forge: Forge, stores: tuple[RedisServer, S3Server], tmp_path: Path
) -> None:
    redis_server, s3 = stores
    place = tmp_path / "work"
    shutil.copytree(ROOT / "docs" / "examples", place / "docs" / "examples")
    shutil.copytree(ROOT / "deploy", place / "deploy")
    (place / "doc.txt").write_text("The crew of each deck counts its crates twice. " * 20)
    asked = [{"question": f"How many are {n} and 2?", "answer": f"{n} + 2 #### {n + 2}"} for n in range(8)]
    (place / "gsm8k.jsonl").write_text("".join(json.dumps(item) + "\n" for item in asked))
    environment = (
        os.environ
        | credentials(s3.port)
        | {
            "HOME": str(tmp_path),
            "PATH": f"{forge.programs}:{os.environ['PATH']}",
            "PORT": str(free_port()),
            "HF_HUB_OFFLINE": "1",
        }
    )
    model = tmp_path / "models" / "tiny"
    made = ["stowage", "tiny", "llama", str(model)]
    subprocess.run(made, check=True, env=environment, capture_output=True, timeout=60)
    for name in sorted(set(re.findall(r"\./([\w-]+-lora)\b", page.read_text()))):
        write_adapter(model, place / name)
    if "./embedding-model" in page.read_text():
        write_embedding_model(model, place / "embedding-model")
    said = tmp_path / "said"
    with said.open("w") as log:
        code = subprocess.run(
            ["timeout", str(PAGE_TIMEOUT_S), "bash", "-xc", script(commands(page), model, redis_server.port)],
            cwd=place,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        ).returncode
    assert code == 0, said.read_text(errors="replace")[-5000:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_command_stands_elsewhere(page: Path) -> None:
    """A block without a language is output; commands in it would never be run."""
    others = [text for language, text in blocks(page) if language != "sh"]
    programs = "stowage|curl|python|docker|make|pip|openssl|redis-cli|promtool|systemctl"
    assert [line for text in others for line in text.splitlines() if re.match(rf"(\$ )?({programs}) ", line)] == []


@pytest.mark.commands
def test_a_command_that_fails_is_noticed(forge: Forge, tmp_path: Path) -> None:
    environment = os.environ | {"PATH": f"{forge.programs}:{os.environ['PATH']}"}
    lines = ["stowage stats ./nothing-here", "echo reached"]
    done = subprocess.run(
        ["bash", "-c", script(lines, tmp_path, 0)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2 and "reached" not in done.stdout and "nothing-here" in done.stderr
