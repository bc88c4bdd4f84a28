"""Who may import whom, and what no file may do. Reads the source; imports none of it."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "stowage"
FILES = sorted(SOURCE.rglob("*.py"))

# A room is a folder, or a file at the top. It may import the rooms named here, itself, and errors.
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "config": set(),
    "settings": {"config"},
    "core": set(),
    "format": {"core"},
    "tiers": {"core", "format"},
    "store": {"core", "tiers"},
    "transfer": {"core"},
    "engine": {"config", "core", "store", "tiers", "transfer"},
    "testing": {"config", "core", "format", "tiers", "store", "transfer", "engine"},
    "demo": {"config", "core", "format", "tiers", "store", "transfer", "engine", "testing"},
    "cli": {"config", "settings", "core", "format", "tiers", "store", "transfer", "engine", "testing", "demo"},
    "__main__": {"cli"},
    "__init__": {"config", "engine"},
}
CORE_PACKAGES = {"numpy", "blake3"}
PINNING = SOURCE / "transfer" / "pinning.py"
PINNING_NAMES = {"pin_memory", "cudaHostRegister", "cudaHostAlloc", "hipHostRegister"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "numpy.load", "np.load", "os.system", "os.popen"}


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of every module that ``path`` imports anywhere, inside functions too."""
    package = ["stowage", *path.relative_to(SOURCE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from stowage import store` names a module; `from stowage import Engine` names what __init__ offers
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def broken_imports(path: Path, room: str) -> list[str]:
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


def broken_habits(path: Path) -> list[str]:
    broken = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        where = f"{path.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Call):
            if dotted(node.func) in FORBIDDEN_CALLS:
                broken.append(f"{where} calls {dotted(node.func)}")
            for keyword in node.keywords:
                shell = keyword.arg == "shell" and not (
                    isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                )
                broken += [f"{where} runs a shell"] if shell else []
                broken += [f"{where} pins memory"] if keyword.arg in PINNING_NAMES and path != PINNING else []
        names = {ast.Attribute: "attr", ast.Name: "id"}
        named = getattr(node, names.get(type(node), ""), "")
        if named in PINNING_NAMES and path != PINNING:
            broken.append(f"{where} pins memory: only transfer/pinning.py may")
    return broken


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_follow_the_layers(path: Path) -> None:
    room = room_of(path)
    assert room in ROOMS, f"{room} is a new room: say in this test what it may import"
    assert broken_imports(path, room) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_file_unpickles_evaluates_pins_or_runs_a_shell(path: Path) -> None:
    modules = {module.partition(".")[0] for _, module in imported_modules(path)}
    assert not modules & FORBIDDEN_MODULES
    assert broken_habits(path) == []


def test_the_checks_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "core" / "bad.py"
    bad.parent.mkdir()
    bad.write_text(
        "import torch\nfrom stowage.engine import engine\nfrom ..store import TieredStore\n"
        "def f(t):\n    import stowage.tiers.disk\n    t.pin_memory()\n    eval('1')\n    torch.load('x')\n"
        "    torch.empty(1, pin_memory=True)\n    run('ls', shell=True)\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    assert len(broken_imports(bad, "core")) == 4
    assert len(broken_habits(bad)) == 5


def test_every_room_is_a_package() -> None:
    """A folder without __init__.py works from a checkout and is left out of a wheel."""
    assert {path.parent for path in FILES} == {path.parent for path in SOURCE.rglob("__init__.py")}
