"""What a command imports before its first token, and how it ends: not torch's compiler, nor its tools for many
devices, nor sympy; and without taking apart what it imported.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import stowage
from stowage.testing import tiny_models
from tests.ports import free_port

_RUN = """
import sys
from stowage.cli import main
sys.argv = ["stowage", "run", {model!r}, "-p", "Hello", "-n", "4", "--kv-cache-memory", "4MiB"]
try: main()
except SystemExit as end: assert not end.code, end.code
compiler = sys.modules.get("torch._dynamo")
heavy = "torch._dynamo.convert_frame", "torch.distributed.tensor", "sympy.core", "accelerate"
print("\\nloaded", *(name for name in heavy if name in sys.modules))
import torch, torch.distributed
assert torch.distributed.is_available()
assert torch.compiler.disable.__module__.startswith("torch")
import torch._dynamo.config
assert torch._dynamo.config.__name__ == "torch._dynamo.config" and torch._dynamo.explain
assert sys.modules["torch._dynamo"] is torch._dynamo is not compiler
print(torch.compile(lambda x: x + 1, backend="eager", dynamic=True)(torch.zeros(1)).item())
import sympy
print(isinstance(sympy.Symbol("x"), sympy.Basic), issubclass(sympy.Symbol, sympy.Basic))
"""


@pytest.mark.slow
def test_a_command_leaves_compiler_and_symbols_out_and_gives_them_to_who_asks(tiny_llama: Path, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(Path(stowage.__file__).parents[1]), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-c", _RUN.format(model=str(tiny_llama))]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.split() for line in done.stdout.splitlines()[-3:]] == [["loaded"], ["1.0"], ["True", "True"]]


_PLAN = """
import sys
from stowage.cli import main
sys.argv = ["stowage", "plan", {model!r}, "--dtype", "bfloat16", "--machine", "typical-cpu"]
try: main()
except SystemExit as end: assert not end.code, end.code
heavy = "torch._dynamo.convert_frame", "torch.distributed.tensor", "accelerate"
print("\\nloaded", *(name for name in heavy if name in sys.modules))
"""


@pytest.mark.rare
def test_a_plan_leaves_the_compiler_out(tmp_path: Path) -> None:
    """Of a model whose forward without weights asks for symbols, too."""
    (tmp_path / "config.json").write_text(tiny_models.config("qwen3_moe").to_json_string())
    environment = {"PYTHONPATH": str(Path(stowage.__file__).parents[1]), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-c", _PLAN.format(model=str(tmp_path))]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded"


_NO_HUB = """
import sys
from stowage.cli import main
sys.argv = ["stowage", "plan", "somebody/some-model", "--machine", "typical-cpu"]
try: main()
except SystemExit as end: print(end.code, *{"torch", "transformers"} & set(sys.modules))
"""


def test_a_plan_asks_the_hub_before_anything_slow_is_imported(tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(Path(stowage.__file__).parents[1]), "HOME": str(tmp_path)}
    nobody = environment | {"HF_ENDPOINT": f"http://127.0.0.1:{free_port()}"}
    done = subprocess.run([sys.executable, "-c", _NO_HUB], env=nobody, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "2\n" and "cannot be reached" in done.stderr


_END = """
import atexit, sys, threading, time
from stowage import cli
from stowage.cli import app
class Kept:
    def __del__(self): print("taken apart")
kept = Kept()
atexit.register(print, "registered")
def end():
    print("said", end=" ")
    {before}
    raise SystemExit({status})
app.app = end
cli.run_and_exit()
"""
_THREAD = "threading.Thread(target=lambda: (time.sleep(0.2), print('done', end=' '))).start()"
_DAEMON = "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"


@pytest.mark.parametrize(
    ("before", "status", "said", "code"),
    [
        ("pass", "0", "said registered\n", 0),
        ("pass", "None", "said registered\n", 0),
        ("pass", "130", "said registered\n", 130),
        (_DAEMON, "2", "said registered\n", 2),
        (_THREAD, "2", "said done registered\ntaken apart\n", 2),
        ("pass", "'a message'", "said registered\ntaken apart\n", 1),
    ],
)
def test_a_command_ends_at_once_when_all_is_done_and_written(before: str, status: str, said: str, code: int) -> None:
    done = _ended(_END.format(before=before, status=status))
    assert (done.stdout, done.returncode) == (said, code)
    assert done.stderr == ("a message\n" if "message" in status else "")


def test_what_is_printed_last_and_meets_a_full_disk_is_told() -> None:
    program = _END.format(before="import os; os.close(1); os.open('/dev/full', os.O_WRONLY)", status="0")
    done = _ended(program)
    assert done.returncode == 2
    assert done.stderr.startswith("stowage: stdout takes no more: No space left on device.")


def _ended(program: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(Path(stowage.__file__).parents[1])}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
