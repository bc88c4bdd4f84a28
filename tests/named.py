"""Names that tests, benchmarks and scripts use of a package's modules and classes, and that are not there any more: a
test that imports a helper, replaces a method, or plants a simulator's bug, is written against a name that a change may
take away.

Reads the source; imports none of it. What it cannot follow (a class whose base is another package's, an object) it
leaves alone.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from tests.forbidden import imported_names

_SETTERS = {"setattr", "delattr", "object"}
Found = ast.ClassDef | Path | None
"""What a name stands for: a class, a module's file, or what is not followed."""


class Source:
    """The modules of packages, each by its name and the folder that holds it."""

    def __init__(self, **packages: Path) -> None:
        self._packages = packages
        self._homes: dict[ast.ClassDef, Path] = {}

    def unknown(self, path: Path) -> list[str]:
        """Lines of ``path`` that name what its imports do not have."""
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
        names = imported_names(nodes)
        local = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        local |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        told = []
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                told += self._not_there(path, node)
            owner, attribute = _named(node)
            if owner is None or _first(owner) in local:
                continue
            target = self._resolved(owner, names)
            if target is not None and not self._has(target, attribute):
                told.append(f"{path}:{owner.lineno} {ast.unparse(owner)} has no {attribute}")
        return told

    def _not_there(self, path: Path, node: ast.ImportFrom) -> list[str]:
        home = self._module(node.module or "")
        if home is None:
            return []
        names = (alias.name for alias in node.names if alias.name != "*")
        return [f"{path}:{node.lineno} {node.module} has no {name}" for name in names if not self._has(home, name)]

    def _module(self, dotted: str) -> Path | None:
        package = dotted.split(".")[0]
        if package not in self._packages:
            return None
        place = self._packages[package].joinpath(*dotted.split("."))
        return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.exists()), None)

    @functools.cache  # noqa: B019 - lives as long as the tests
    def _definitions(self, path: Path) -> dict[str, ast.AST]:
        """What stands in a module, by its name; a class's methods do not."""
        found: dict[str, ast.AST] = {}
        for node in _outside_of_functions(ast.parse(path.read_bytes())):
            for name in _bound(node):
                found[name] = node
            if isinstance(node, ast.ClassDef):
                self._homes[node] = path
        return found

    def _followed(self, dotted: str) -> Found:
        """The module or class of that dotted name, wherever it comes from."""
        module = self._module(dotted)
        if module is not None:
            return module
        before, _, name = dotted.rpartition(".")
        home = self._module(before) if before else None
        return self._in_module(home, name) if home is not None else None

    def _in_module(self, home: Path, name: str) -> Found:
        node = self._definitions(home).get(name)
        if isinstance(node, ast.ClassDef):
            return node
        if isinstance(node, ast.ImportFrom | ast.Import):
            return self._followed(imported_names([node])[name])
        below = home.parent / name
        if home.name == "__init__.py" and node is None:
            return next((path for path in (below.with_suffix(".py"), below / "__init__.py") if path.exists()), None)
        return None

    def _resolved(self, owner: ast.expr, names: dict[str, str]) -> Found:
        if isinstance(owner, ast.Constant):
            return self._followed(str(owner.value))
        if isinstance(owner, ast.Name):
            return self._followed(names[owner.id]) if owner.id in names else None
        if isinstance(owner, ast.Attribute):
            target = self._resolved(owner.value, names)
            return self._in_module(target, owner.attr) if isinstance(target, Path) else None
        return None

    def _has(self, target: ast.ClassDef | Path, name: str) -> bool:
        if name.startswith("__") and name.endswith("__"):
            return True
        if isinstance(target, Path):
            defined = self._definitions(target)
            return "__getattr__" in defined or name in defined or self._in_module(target, name) is not None
        return self._class_has(target, name)

    def _class_has(self, node: ast.ClassDef, name: str) -> bool:
        """True too where its base, its metaclass or a decorator may bring it."""
        if node.keywords or any(name in _bound(inner) for inner in _outside_of_functions(node)):
            return True
        own = {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}
        if name in own:  # set in a method; read there, it is another class's
            return True
        home = self._homes[node]
        names = imported_names(self._definitions(home).values())
        for base in node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            local = self._definitions(home).get(base.id) if isinstance(base, ast.Name) else None
            found = local if isinstance(local, ast.ClassDef) else self._resolved(base, names)
            if isinstance(found, ast.ClassDef):
                if self._class_has(found, name):
                    return True
            elif ast.unparse(base) not in ("Protocol", "Generic", "ABC"):
                return True
        return False


def _named(node: ast.AST) -> tuple[ast.expr | None, str]:
    """Whose attribute it names, and which: read, or given to ``setattr`` as a string."""
    if isinstance(node, ast.Attribute):
        return node.value, node.attr
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SETTERS and node.args:
        if any(keyword.arg in ("raising", "create") for keyword in node.keywords):
            return None, ""
        first = node.args[0]
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            owner, _, attribute = first.value.rpartition(".")
            return ast.copy_location(ast.Constant(owner), first), attribute
        if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) and isinstance(node.args[1].value, str):
            return first, node.args[1].value
    return None, ""


def _first(owner: ast.expr) -> str:
    while isinstance(owner, ast.Attribute):
        owner = owner.value
    return owner.id if isinstance(owner, ast.Name) else ""


def _bound(node: ast.AST) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.ImportFrom | ast.Import):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return {node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else set()


def _outside_of_functions(node: ast.AST) -> Iterator[ast.AST]:
    """What is below ``node``, but in no function or class of its own."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _outside_of_functions(child)
