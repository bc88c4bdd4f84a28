"""docs/serving.md and docs/reference/metrics.md say what there is: their examples run, their tables are whole."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from docs.examples import rag_server
from stowage.cli.options import SERVER
from stowage.config.settings import SETTINGS
from stowage.server import api_errors
from tests.depth import mostly_rare
from tests.server.process import Server

DOCS = Path(__file__).parents[2] / "docs"
SERVING = (DOCS / "serving.md").read_text()
WRITTEN = "http://127.0.0.1:8000"


def examples(language: str) -> list[str]:
    """The code blocks of the page in one language; none: of the shell."""
    return re.findall(rf"^```{language}\n(.*?)^```$", SERVING, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("number", "said"),
    mostly_rare([(0, "tokens of the prompt were not computed again"), (1, "call weather for"), (2, "a ship of")], [0]),
    ids=["reuse", "tools", "schema"],
)
def test_the_python_examples(number: int, said: str, server: Server, tmp_path: Path) -> None:
    program = examples("python")[number]
    assert WRITTEN in program and len(examples("python")) == 3
    (tmp_path / "example.py").write_text(program.replace(WRITTEN, server.url))
    done = subprocess.run([sys.executable, str(tmp_path / "example.py")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


@pytest.mark.parametrize(("number", "key"), [(0, "choices"), (1, "content")], ids=["openai", "anthropic"])
def test_the_curl_examples(number: int, key: str, server: Server) -> None:
    line = [block for block in examples("sh") if block.startswith("curl")][number]
    words = shlex.split(line.replace("\\\n", " "))
    headers = dict([words[words.index("-H") + 1].split(": ")])
    url = words[1].replace(WRITTEN, server.url)
    response = httpx.post(url, content=words[words.index("-d") + 1], headers=headers)
    assert response.status_code == 200 and json.loads(response.text)[key]


@pytest.mark.parametrize("name", SERVER)
def test_every_flag_with_its_default(name: str) -> None:
    flag = "--" + name.replace("_", "-")
    (row,) = [line for line in SERVING.splitlines() if line.startswith(f"| `{flag} ")]
    default = SETTINGS[name].default
    shown = "" if default == () else re.sub(r"\.0$", "", str(default))  # (): an empty list
    assert f"`{shown}`" in row if shown else ("none" in row or "that of MODEL" in row)


def test_every_status_that_the_code_can_give() -> None:
    source = Path(api_errors.__file__).parent
    given = {
        int(status) for path in source.rglob("*.py") for status in re.findall(r"ApiError\(\s*(\d{3})", path.read_text())
    }
    listed = {int(status) for status in re.findall(r"^\| (\d{3}) \|", SERVING, re.MULTILINE)}
    assert given - listed == set()


def test_every_metric_of_the_server(server: Server) -> None:
    httpx.post(server.url + "/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 3})
    page = (DOCS / "reference" / "metrics.md").read_text()
    families = re.findall(r"^# TYPE (\S+) (\S+)", httpx.get(server.url + "/metrics").text, re.MULTILINE)
    names = {name for name, _ in families if name.startswith("stowage_")}
    assert len(names) > 30
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_the_rag_example(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    rag_server.main(server.url)
    told = re.findall(r"(\d+) tokens, (\d+) of them not computed again", capsys.readouterr().out)
    assert len(told) == len(rag_server.QUESTIONS) and int(told[1][1]) > len(rag_server.SYSTEM)
