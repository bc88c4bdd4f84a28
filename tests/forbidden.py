"""What no file of this repository may do, found in its syntax: run code that came as data, unpickle, or run a shell.

Names are followed through imports (`from torch import load as fetch` is `torch.load`), whether they are called or only
mentioned, and programs that lie in strings (as tests give them to child processes) are read like files. It finds
habits, not malice: whoever wants to hide a call from it can.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

MODULES: Final = frozenset("pickle _pickle cPickle pickletools dill cloudpickle marshal shelve joblib commands".split())
NAMES: Final = frozenset(
    """
    eval exec compile __import__ __builtins__ builtins.eval builtins.exec builtins.compile builtins.__import__
    runpy.run_path runpy.run_module code.interact code.InteractiveInterpreter
    torch.load torch.jit.load torch.hub.load torch.package.PackageImporter torch.utils.model_zoo.load_url
    torch.hub.load_state_dict_from_url torch.serialization.load numpy.load numpy.lib.npyio.load
    numpy.lib.format.read_array pandas.read_pickle yaml.load yaml.load_all yaml.full_load yaml.full_load_all
    yaml.unsafe_load yaml.unsafe_load_all os.system os.popen posix.system subprocess.getoutput
    subprocess.getstatusoutput asyncio.create_subprocess_shell asyncio.subprocess.create_subprocess_shell pty.spawn
    """.split()
)
CHILDREN: Final = frozenset(f"subprocess.{name}" for name in ("run", "call", "check_call", "check_output", "Popen"))
KEYWORDS: Final = {"shell": False, "allow_pickle": False, "trust_remote_code": False, "weights_only": True}
"""Arguments that must have this very value wherever they are given."""


def forbidden_in(path: Path, *, programs: bool = True) -> list[str]:
    """What the file does that it must not; `programs`: also in programs that lie in its strings."""
    return [f"{path.name}:{line} {what}" for line, what in _findings(path.read_text(encoding="utf-8"), programs)]


def _findings(source: str, programs: bool) -> Iterator[tuple[int, str]]:
    tree = ast.parse(source)
    meanings = imported_names(ast.walk(tree))
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        yield from ((line, what) for what in _judge(node, meanings))
        if programs:
            for text in _programs(node):
                yield from ((line, f"{what}, in a program in a string") for _, what in _findings(text, programs))


def imported_names(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """What each name stands for, in full, that imports among ``nodes`` bind."""
    meanings = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                meanings[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            meanings |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return meanings


def _full_name(node: ast.AST, meanings: dict[str, str]) -> str:
    match node:
        case ast.Name():
            return meanings.get(node.id, node.id)
        case ast.Attribute():
            return f"{_full_name(node.value, meanings)}.{node.attr}"
        case ast.Call(args=[owner, ast.Constant(value=str(name)), *_]) if _full_name(node.func, meanings) == "getattr":
            return f"{_full_name(owner, meanings)}.{name}"
    return "?"


def _judge(node: ast.AST, meanings: dict[str, str]) -> Iterator[str]:
    """What is wrong with this node itself."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from _judge_import(node)
        return
    name = _full_name(node, meanings)
    if name in NAMES:
        yield f"uses {name}"
    if isinstance(node, ast.Call):
        yield from _judge_call(node, meanings)
    if isinstance(node, ast.Subscript) and _full_name(node.value, meanings) == "sys.modules" and _module_in(node.slice):
        yield "takes a forbidden module from sys.modules"


def _judge_import(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    else:
        base = node.module or ""
        modules = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        if not node.level and any(alias.name == "*" for alias in node.names):
            yield f"imports everything from {base}, which hides names"
        yield from (f"imports {module}" for module in modules if module in NAMES)
    yield from (f"imports {module}" for module in modules[:1] if module.partition(".")[0] in MODULES)


def _judge_call(node: ast.Call, meanings: dict[str, str]) -> Iterator[str]:
    name = _full_name(node.func, meanings)
    for keyword in node.keywords:
        if keyword.arg in KEYWORDS:
            given = keyword.value.value if isinstance(keyword.value, ast.Constant) else ...
            if given is not KEYWORDS[keyword.arg]:
                yield f"gives {keyword.arg} another value than {KEYWORDS[keyword.arg]}"
    if name in CHILDREN:
        commands = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "args")]
        if any(_is_text(command) for command in commands):
            yield f"gives {name} one text instead of a list of arguments"
    if name in {"importlib.import_module", "importlib.__import__"} and node.args and _module_in(node.args[0]):
        yield "imports a forbidden module by name"


def _module_in(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and str(node.value).partition(".")[0] in MODULES


def _is_text(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=str()) | ast.JoinedStr():
            return True
        case ast.BinOp():
            return _is_text(node.left) or _is_text(node.right)
        case ast.Call(func=ast.Attribute(value=owner, attr="join" | "format")):
            return _is_text(owner)
    return False


def _programs(node: ast.AST) -> Iterator[str]:
    """Strings that are Python programs, with 0 in the place of what an f-string fills in."""
    text = ""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
    elif isinstance(node, ast.JoinedStr):
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "0" for part in node.values)
    if "import" in text or "eval(" in text or "exec(" in text:
        try:
            ast.parse(text)
        except (SyntaxError, ValueError):
            return
        yield text
