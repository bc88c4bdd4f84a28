"""Tests the kernels for AVX-512 on a processor that has none: instructions are emulated, in plain C and AVX2.

    python scripts/emulated_avx512.py            # compiles in three minutes, tests in six
    python scripts/emulated_avx512.py -k q4_k    # what follows is given to pytest

``tests/avx512_emulated.h`` takes the place of the compiler's headers, and tiles are those of
``tests/tiles_emulated.h``. The package is copied, with every target of AVX-512 turned into AVX2, the few instructions
that are written in assembler into functions, and an answer of yes to what the processor has. Then the tests of the
kernels are run with that copy, those of the sets with AVX-512. Needs gcc and a processor with AVX2; bits that depend on
how a real processor rounds in ``VDPBF16PS`` are those of Intel's reference.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
COPY: Final = ROOT / "build" / "emulated-avx512"
TESTS: Final = (
    "tests/engine/test_block_kernels.py",
    "tests/engine/test_int8_kernels.py",
    "tests/engine/test_native.py",
    "tests/property/test_lossless.py",
)
REPLACED: Final = (
    (r'#pragma GCC target\("avx512[^"]*"\)', '#pragma GCC target("avx2,fma,f16c,popcnt")'),
    (r'__asm__\("" : "\+[xv]"\(value\)\)', '__asm__("" : "+m"(value))'),
    (r'__asm__\("vmulps [^;]*;', "found = _mm512_mul_ps(values, _mm512_set1_ps(*scale));"),
    (r'__asm__\("vfmadd231ps [^;]*;', "more = _mm512_fmadd_ps(values, _mm512_set1_ps(*scale), more);"),
)


def copied() -> None:
    """The package, with what the compiler is to take for AVX-512."""
    shutil.rmtree(COPY, ignore_errors=True)
    shutil.copytree(ROOT / "src", COPY / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, COPY)
    found = dict.fromkeys(REPLACED, 0)
    for path in (COPY / "src" / "stowage" / "native").rglob("*.[ch]"):
        text = path.read_text()
        for replaced in REPLACED:
            text, count = re.subn(*replaced, text)
            found[replaced] += count
        path.write_text(text)
    for (pattern, _), count in found.items():
        if not count:
            sys.exit(f"{pattern} is nowhere in the kernels any more: {Path(__file__).name} must follow them")
    theirs = Path(subprocess.check_output(["gcc", "-print-file-name=include"], text=True).strip())
    (COPY / "headers").mkdir()
    for path in theirs.glob("*.h"):
        if path.name.startswith("avx512") or "__m512" in path.read_text():
            (COPY / "headers" / path.name).touch()  # read in place of theirs, and empty


def compiled() -> None:
    given = ("-D__builtin_cpu_supports(name)=1", '-DTILES_EMULATED="tiles_emulated.h"')
    flags = [f"-I{COPY / 'headers'}", f"-I{ROOT / 'tests'}", "-include", ROOT / "tests" / "avx512_emulated.h"]
    quoted = " ".join(f"'{flag}'" for flag in (*given, *flags))
    build = [sys.executable, "-c", "import setuptools; setuptools.setup()", "-q", "build_ext", "--inplace"]
    subprocess.run(build, cwd=COPY, check=True, env=os.environ | {"CFLAGS": quoted, "CC": "gcc"})
    if not list((COPY / "src" / "stowage" / "native").glob("*.so")):
        sys.exit("the kernels do not compile with emulated instructions; what the compiler said is above")


def main() -> int:
    copied()
    compiled()
    paths = os.pathsep.join((str(COPY / "src"), str(ROOT)))
    there = os.environ | {"PYTHONPATH": paths}
    every = "from stowage.native import _native as it; it.use_instructions('amx_bf16'), it.use_steps('avx512')"
    subprocess.run([sys.executable, "-c", every], cwd=COPY, env=there, check=True)
    asked = ["-k", "avx512 or amx or int8"] if len(sys.argv) == 1 else sys.argv[1:]
    tests = [sys.executable, "-m", "pytest", "-o", "pythonpath=", "-n", f"{os.cpu_count()}", "--dist", "loadfile"]
    return subprocess.run([*tests, *TESTS, *asked], cwd=ROOT, env=there).returncode


if __name__ == "__main__":
    sys.exit(main())
