"""Who may import whom, what no file may do, and that what others name is there. Reads the source; imports none."""

import ast
import functools
import sys
import tomllib
from pathlib import Path

import pytest

from tests.forbidden import forbidden_in
from tests.named import Source

SOURCE = Path(__file__).parents[2] / "src" / "stowage"
FILES = sorted(SOURCE.rglob("*.py"))

BELOW = set("cache config core executor log metrics models openmp storage transfer weights".split())
"""What the engine and the plugins may import."""
# A room is a folder, or a file at the top. It may import the rooms named here, itself, and errors.
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "extras": set(),
    "log": set(),
    "metrics": set(),
    "openmp": set(),
    "svg": set(),
    "config": set(),
    "native": set(),
    "core": {"native"},
    "transfer": {"core", "native"},
    "weights": {"config", "core", "native"},
    "storage": {"config", "core", "log", "native"},
    "cache": {"config", "core", "log", "native", "storage"},
    "models": {"config", "core", "storage", "weights"},
    "cuda": {"core", "native", "transfer"},
    "executor": {"cache", "config", "core", "cuda", "models", "native", "transfer", "weights"},
    "engine": BELOW,
    "evaluation": {"config", "core", "engine", "models", "weights"},
    "plugins": BELOW,
    "server": {"config", "engine", "metrics"},
    "planner": {"config", "core", "engine", "executor", "models", "native", "svg", "weights"},
    "simulator": {"cache", "config", "core", "storage", "svg"},
    "testing": {"cache", "config", "core", "engine", "evaluation", "executor", "models", "storage", "transfer"},
    "demo": {"config", "engine", "openmp", "svg", "testing"},
    "cli": set(
        "cache config core demo engine evaluation executor extras log "
        "models openmp planner plugins server simulator storage testing".split()
    ),
    "__main__": {"cli"},
    "__init__": {"config", "engine", "extras", "plugins"},
}
CORE_PACKAGES = {"numpy", "blake3"}
PINNING = SOURCE / "transfer" / "pinning.py"
PINNING_NAMES = {"pin_memory", "cudaHostRegister", "cudaHostAlloc", "hipHostRegister"}
ROOT = SOURCE.parents[1]
EVERYTHING = sorted(
    path for folder in ("src", "tests", "benchmarks", "scripts", "docs") for path in (ROOT / folder).rglob("*.py")
)


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imported_modules(path: Path) -> list[tuple[int, str]]:
    """Line and full name of every module that ``path`` imports anywhere, inside functions too."""
    found: list[tuple[int, str]] = []
    package = ["stowage", *path.relative_to(SOURCE).parts[:-1]]
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found += ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from stowage import store` names a module; `from stowage import Engine` names what __init__ offers
            found += ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
    return found


def broken_imports(path: Path, room: str) -> list[str]:
    if room not in ROOMS:
        return [f"{room} is a new room: say in this test what it may import"]
    broken = []
    for line, module in imported_modules(path):
        parts = module.split(".")
        if parts[0] == "stowage" and len(parts) > 1:
            target = parts[1] if parts[1] in ROOMS else "__init__"
            if target != "__init__" and target not in ROOMS[room] | {room, "errors"}:
                broken.append(f"{path.name}:{line} imports {module}: {room} may not import {target}")
            if target == "__init__" and room != "demo" and parts[1] not in {"__version__"}:
                broken.append(f"{path.name}:{line} imports {module}: name its room instead")
        elif room == "core" and parts[0] not in CORE_PACKAGES | sys.stdlib_module_names:
            broken.append(f"{path.name}:{line} imports {module}: core is the standard library, numpy and the hash")
    return broken


def pinning(path: Path) -> list[str]:
    """Where the file pins memory, and may not."""
    broken = []
    for node in ast.walk(parsed(path)):
        names = {ast.Attribute: "attr", ast.Name: "id", ast.keyword: "arg"}
        named = getattr(node, names.get(type(node), ""), "")
        if named in PINNING_NAMES and path != PINNING:
            broken.append(f"{path.name}:{getattr(node, 'lineno', 0)} pins memory: only transfer/pinning.py may")
    return broken


@pytest.mark.rare
def test_imports_follow_the_layers() -> None:
    assert [fault for path in FILES for fault in broken_imports(path, room_of(path))] == []


SEAM = SOURCE / "executor" / "device.py"
"""The only way from the engine to code for CUDA devices."""


def test_one_file_imports_what_only_cuda_runs() -> None:
    importers = {
        path
        for path in FILES
        if room_of(path) != "cuda" and any(module.startswith("stowage.cuda") for _, module in imported_modules(path))
    }
    assert importers == {SEAM}


def files_imported(path: Path, modules: dict[str, Path]) -> set[Path]:
    """The files of the package that ``path`` imports anywhere, lazily too. A package's own ``__init__`` does not count:
    a file that names its siblings there imports them, not it.
    """
    found = set()
    for _, name in imported_modules(path):
        module = name if name in modules else name.rpartition(".")[0]
        if module in modules and modules[module] != path.parent / "__init__.py":
            found.add(modules[module])
    return found - {path}


def circles(imports: dict[Path, set[Path]]) -> list[list[str]]:
    """Files that import each other, directly or over others. What is left when files without unresolved imports, and
    those that nobody left imports, are taken away again and again.
    """
    left = {path: set(targets) for path, targets in imports.items()}
    while True:
        inner = {path: targets & left.keys() for path, targets in left.items()}
        imported = set().union(*inner.values()) if inner else set()
        kept = {path: targets for path, targets in inner.items() if targets and path in imported}
        if kept.keys() == left.keys():
            return [sorted(path.name for path in kept)] if kept else []
        left = kept


def module_names(files: list[Path], source: Path) -> dict[str, Path]:
    names = {".".join(["stowage", *path.relative_to(source).with_suffix("").parts]): path for path in files}
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


def test_no_files_import_each_other() -> None:
    modules = module_names(FILES, SOURCE)
    assert circles({path: files_imported(path, modules) for path in FILES}) == []


def test_no_file_is_long() -> None:
    """A reader holds some 400 lines, of any language."""
    code = {".py", ".c", ".h", ".js", ".css", ".html", ".mjs"}
    files = [path for path in SOURCE.rglob("*") if path.suffix in code]
    assert [path.name for path in files if len(path.read_text(encoding="utf-8").splitlines()) > 400] == []


def test_no_room_is_large() -> None:
    """None has an eighth of the lines, or nobody would find a file in it. C has rooms of its own: who looks for a
    kernel does not look into policies.
    """
    lines: dict[str, int] = {}
    for path in SOURCE.rglob("*"):
        if path.suffix in {".py", ".c", ".h", ".js", ".css", ".html"}:
            parts = path.relative_to(SOURCE).parts[:-1]
            room = "/".join(parts[:2] if parts[:1] == ("native",) else parts[:1]) or path.name
            lines[room] = lines.get(room, 0) + len(path.read_text(encoding="utf-8").splitlines())
    largest = max(lines, key=lines.__getitem__)
    assert lines[largest] < sum(lines.values()) / 8, largest


def test_what_changes_in_a_header_is_built_anew() -> None:
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    (extension,) = project["tool"]["setuptools"]["ext-modules"]
    headers = [path.relative_to(SOURCE.parents[1]).as_posix() for path in SOURCE.rglob("*.h")]
    assert sorted(extension["depends"]) == sorted(headers)


def test_a_circle_is_found() -> None:
    a, b, c, d = (Path(name) for name in "abcd")
    assert circles({a: {b}, b: {c}, c: set(), d: {a}}) == []
    assert circles({a: {b}, b: {c}, c: {b}, d: {a}}) == [["b", "c"]]
    assert circles({a: {b}, b: {c}, c: {a}, d: {a}}) == [["a", "b", "c"]]


def test_no_file_pins() -> None:
    assert [fault for path in FILES for fault in pinning(path)] == []


@pytest.mark.rare
def test_no_file_unpickles_evaluates_or_runs_a_shell() -> None:
    """Of the package, the tests, the benchmarks and the scripts. This file's strings are the bad examples below."""
    here = Path(__file__)
    assert [fault for path in EVERYTHING for fault in forbidden_in(path, programs=path != here)] == []


def test_the_layer_check_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "core" / "bad.py"
    bad.parent.mkdir()
    bad.write_text(
        "import torch\nfrom stowage.engine import engine\nfrom ..cache.store import TieredStore\n"
        "def f(t):\n    import stowage.storage.disk\n    t.pin_memory()\n    torch.empty(1, pin_memory=True)\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    assert len(broken_imports(bad, "core")) == 4
    assert len(pinning(bad)) == 2


BAD = """
import pickle
import _pickle
from dill import loads
import joblib.numpy_pickle as safe
import importlib; importlib.import_module("pickle")
import sys; sys.modules["marshal"].loads(b"")
eval("1")
f = exec
list(map(eval, []))
compile("1", "", "eval")
import builtins as b; b.exec("1")
__import__("pickle")
__builtins__["eval"]
from torch import load
from torch import load as fetch; fetch("x")
import torch as t; t.load("x")
import torch.hub as hub; hub.load("x", "y")
import numpy as np; np.load("x.npy")
from numpy import load
import yaml; yaml.load("x")
from yaml import unsafe_load
import os; os.system("ls")
import os as o; o.popen("ls")
from os import system as run
import os; getattr(os, "system")("ls")
from os import *
import subprocess; subprocess.run("ls -l")
from subprocess import Popen as P; P(f"ls {0}")
import subprocess as s; s.check_output("ls " + name)
import subprocess; subprocess.call(args=" ".join(words))
run(["ls"], shell=True)
run(["ls"], shell=flag)
import asyncio; asyncio.create_subprocess_shell("ls")
import subprocess; subprocess.getoutput("ls")
from_pretrained("x", trust_remote_code=True)
fetch("x", weights_only=False)
read("x", allow_pickle=True)
import subprocess, sys; subprocess.run([sys.executable, "-c", "import pickle"])
program = f"import torch; torch.load('{path}')"
program = "\\n".join(["print(1)", "eval('2')"])
"""
GOOD = """
import subprocess, sys; subprocess.run([sys.executable, "-m", "stowage"], shell=False)
model.eval()
tier.load(transfer)
import re; re.compile("x")
from stowage.engine import loading; loading.load("x")
from_pretrained("x", trust_remote_code=False)
import json; json.load(file)
text = "a pickle may eval anything on import"
from ..core import eval_plan
import yaml; yaml.safe_load("x")
"""


@pytest.mark.parametrize("line", BAD.strip().splitlines())
def test_bad_habits_are_found(line: str, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(line)
    assert forbidden_in(tmp_path / "bad.py")


@pytest.mark.parametrize("line", GOOD.strip().splitlines())
def test_good_habits_are_left_alone(line: str, tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(line)
    assert forbidden_in(tmp_path / "good.py") == []


def test_every_room_is_a_package() -> None:
    """A folder without __init__.py works from a checkout and is left out of a wheel."""
    assert {path.parent for path in FILES} == {path.parent for path in SOURCE.rglob("__init__.py")}


@pytest.mark.rare
def test_what_tests_and_benchmarks_name_is_there() -> None:
    """Methods that they replace, too: simulators' planted bugs run long after `make static`."""
    source = Source(stowage=ROOT / "src", tests=ROOT, benchmarks=ROOT)
    assert [line for path in EVERYTHING if SOURCE not in path.parents for line in source.unknown(path)] == []


PACKAGE = """
from other import Foreign
LIMIT = 1
class Base:
    def read(self): self.kept = 1
class Reader(Base):
    size: int
    def write(self): ...
class Odd(Foreign): ...
"""


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("patch.setattr(Reader, 'write', 1); patch.setattr(Reader, 'read', 1); Reader.size; Reader.kept", []),
        ("part.LIMIT; part.Reader.write; patch.setattr('pack.part.LIMIT', 1); pack.part; Odd.anything", []),
        ("patch.setattr(part, '_more', 1, raising=False); Reader.__name__; unknown.name", []),
        ("patch.setattr(Reader, '_read', 1)", ["Reader has no _read"]),
        ("patch.setattr(part.Reader, '_read', 1)", ["part.Reader has no _read"]),
        ("patch.setattr('pack.part._LIMIT', 1)", ["'pack.part' has no _LIMIT"]),
        ("honest = Reader._read", ["Reader has no _read"]),
        ("mock.patch.object(part.gone, 'name')", ["part has no gone"]),
        (
            "from pack.part import LIMIT, Gone as G; from pack import other",
            ["pack.part has no Gone", "pack has no other"],
        ),
    ],
)
def test_a_name_that_is_not_there_is_found(line: str, missing: list[str], tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("from pack.part import Reader\n")
    (tmp_path / "pack" / "part.py").write_text(PACKAGE)
    test = tmp_path / "test.py"
    test.write_text(f"import pack\nfrom pack import Reader, part\nfrom pack.part import Odd\n{line}\n")
    assert [told.partition(" ")[2] for told in Source(pack=tmp_path).unknown(test)] == missing
