"""The lossless code under the address and undefined-behaviour sanitizers, with damaged payloads."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src/stowage/native/lossless"
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.mark.rare
def test_no_damaged_payload_makes_it_read_or_write_elsewhere(tmp_path: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    program = tmp_path / "fuzz"
    build = [compiler, "-g", "-O1", "-std=gnu11", *SANITIZERS, f"-I{SOURCES}", str(HERE / "fuzz_lossless.c")]
    built = subprocess.run([*build, "-o", str(program)], capture_output=True, text=True)
    if built.returncode and ("sanitize" in built.stderr or "asan" in built.stderr):
        pytest.skip("this compiler has no sanitizers")
    assert built.returncode == 0, built.stderr
    ended = subprocess.run([str(program), "3000", "29"], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and ended.stdout.startswith("3000 rounds"), ended.stderr[-3000:]
