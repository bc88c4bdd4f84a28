"""What a command imports before its first token: not torch's compiler, nor its tools for many devices."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import stowage

_RUN = """
import sys
from stowage.cli import main
sys.argv = ["stowage", "run", {model!r}, "-p", "Hello", "-n", "4", "--kv-cache-memory", "4MiB"]
try: main()
except SystemExit as end: assert not end.code, end.code
compiler = sys.modules.get("torch._dynamo")
heavy = "torch._dynamo.convert_frame", "torch.distributed.tensor"
print("\\nloaded", *(name for name in heavy if name in sys.modules))
import torch, torch.distributed
assert torch.distributed.is_available()
assert torch.compiler.disable.__module__.startswith("torch")
import torch._dynamo.config
assert torch._dynamo.config.__name__ == "torch._dynamo.config" and torch._dynamo.explain
assert sys.modules["torch._dynamo"] is torch._dynamo is not compiler
print(torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(1)).item())
"""


def test_a_command_leaves_the_compiler_out_and_gives_it_to_who_asks(tiny_llama: Path, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(Path(stowage.__file__).parents[1]), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-c", _RUN.format(model=str(tiny_llama))]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.split() for line in done.stdout.splitlines()[-2:]] == [["loaded"], ["1.0"]]
