"""Stowage on other Pythons than that of `.venv`: built with each that is here, and tested.

    python scripts/pythons.py 3.12 3.13            what needs neither torch nor a model: a minute each
    python scripts/pythons.py --engine 3.12        engine, library and server too: a download of 527 MB

Environments lie in `.pythons`. Torch's CUDA build is installed without its libraries, for which stand-ins are made
(`cuda_stand_ins`): it computes on the CPU. A Python that is not here is named, and is no failure.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENGINE = (
    "tests/engine/test_parity.py tests/engine/test_reuse.py tests/engine/test_native.py tests/engine/test_sampling.py "
    "tests/engine/test_structured.py tests/engine/test_start.py tests/library/test_parity.py "
    "tests/weights/test_parity.py tests/server/test_api.py tests/cli/test_run.py tests/unit/test_import.py"
).split()
NOT_HERE = "not slow and not vllm and not cuda and not device and not lmeval and not clients and not browser"
HEAVY = ("torch==", "mypy", "ruff")
ALONE = "import sys; sys.modules['torch'] = None; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
"""Without torch, as where only the plugin or the tools for cache directories are installed."""


def interpreter(series: str) -> Path | None:
    """A Python of that series: on the path, of pyenv's, or of uv's."""
    if found := shutil.which(f"python{series}"):
        asked = subprocess.run([found, "-c", "import sys; print(sys.executable)"], capture_output=True, text=True)
        if asked.returncode == 0 and asked.stdout.strip():  # pyenv's shims are there for versions that are not
            return Path(asked.stdout.strip())
    for path in sorted((Path.home() / ".pyenv" / "versions").glob(f"{series}.*/bin/python")):
        return path
    if shutil.which("uv"):
        asked = subprocess.run(["uv", "python", "find", series], capture_output=True, text=True)
        return Path(asked.stdout.strip()) if asked.returncode == 0 else None
    return None


def environment(series: str, python: Path, *, engine: bool) -> Path:
    """Python of an environment with what the tests need, and the C extension beside the sources."""
    home = ROOT / ".pythons" / series
    inside = home / "bin" / "python"
    if not inside.exists():
        run(python, "-m", "venv", home)
    pins = [
        line for name in ("runtime", "dev") for line in (ROOT / f"requirements/{name}.txt").read_text().splitlines()
    ]
    wanted = home / "wanted.txt"
    wanted.write_text("\n".join(line for line in pins if line and not line.startswith(("#", *HEAVY))))
    install = (inside, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps")
    run(*install, "--requirement", wanted)
    if engine:
        run(*install, next(line for line in pins if line.startswith("torch==")))
        torch = home / "lib" / f"python{series}" / "site-packages" / "torch"
        run(sys.executable, ROOT / "scripts" / "cuda_stand_ins.py", torch)
    run(inside, "-c", "import setuptools; setuptools.setup()", "-q", "build_ext", "--inplace")
    return inside


def run(*command: str | Path) -> None:
    """In the repository, on its sources. Ends this program where it fails."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    if code := subprocess.run(list(map(str, command)), cwd=ROOT, env=env).returncode:
        sys.exit(code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("series", nargs="+", help="such as 3.12")
    parser.add_argument("--engine", action="store_true", help="what needs torch, too")
    given = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    core = project["tool"]["mutmut"]["pytest_add_cli_args_test_selection"]
    for series in given.series:
        python = interpreter(series)
        if python is None:
            print(f"Python {series} is not here: not tested.", file=sys.stderr)
            continue
        inside = environment(series, python, engine=given.engine)
        print(f"Python {series} ({python}):", flush=True)
        quiet = ("-q", "-p", "no:cacheprovider")
        run(inside, "-c", ALONE, *quiet, "--hypothesis-profile=repeatable", *core)
        if given.engine:
            run(inside, "-m", "pytest", *quiet, "-m", NOT_HERE, *ENGINE)


if __name__ == "__main__":
    main()
