"""A stored index of which name is in which file of Transformers' models: building it takes reading two thousand files.

Transformers does so each time that it is imported, twice: more than half of what its import takes. Its answer depends
on its release alone, so it is kept in a file of the state directory; of a development version it is not. So is which
package has installed which module, as long as no directory of ``sys.path`` changes. And a file that asks for a second
Transformers, made of the first one's file, gets the first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from stowage.models.state_directory import remembered_json

_MODULE, _FUNCTION, _AGAIN = "transformers.utils.import_utils", "define_import_structure", "direct_transformers_import"
Structure = dict[frozenset[str], dict[str, set[str]]]
"""By the packages that are needed: names of each module."""


@contextmanager
def remembering() -> Iterator[None]:
    """If Transformers is imported in here, it is told what it found before."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    """Finds the one module that knows how to look, as Python does, and replaces its functions."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with _installed_before():
                execute(module)
            for name, replaced in ((_FUNCTION, _remembered), (_AGAIN, _the_same)):
                if (own := getattr(module, name, None)) is not None:
                    setattr(module, name, replaced(own))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _remembered(look: Callable[..., Structure]) -> Callable[..., Structure]:
    """``look``, but of the folder of models what was found before."""
    package = sys.modules["transformers"]
    models = Path(str(package.__file__)).parent / "models"
    release = str(getattr(package, "__version__", "dev"))

    def looked_up() -> dict[str, Any]:
        entries = look(str(models)).items()
        return {" ".join(sorted(needs)): {m: sorted(n) for m, n in names.items()} for needs, names in entries}

    def structure(module_path: str | Path, prefix: str | None = None) -> Structure:
        if "dev" in release or str(module_path) not in (str(models), str(models / "__init__.py")):
            return look(module_path, prefix)
        of = [release, str(models), models.stat().st_mtime_ns]
        before = f"{prefix}." if prefix is not None else ""
        found = remembered_json("transformers.json", of, looked_up)
        return {
            frozenset(n.split()): {f"{before}{m}": set(names) for m, names in by.items()} for n, by in found.items()
        }

    return structure


def _the_same(again: Callable[..., ModuleType]) -> Callable[..., ModuleType]:
    """``again``, which runs Transformers' own file anew: where that is the file of what is imported, it is that."""

    def transformers(path: str | Path, file: str = "__init__.py") -> ModuleType:
        package = sys.modules.get("transformers")
        same = package is not None and str(package.__file__) == os.path.join(path, file)
        return package if package is not None and same else again(path, file)

    return transformers


@contextmanager
def _installed_before() -> Iterator[None]:
    """Who asks in here which package has installed which module is told what was found before."""
    look = metadata.packages_distributions
    metadata.packages_distributions = lambda: _installed(look)
    try:
        yield
    finally:
        metadata.packages_distributions = look


def _installed(look: Callable[[], Mapping[str, list[str]]]) -> dict[str, list[str]]:
    if [finder for finder in sys.meta_path if hasattr(finder, "find_distributions")] != [PathFinder]:
        return dict(look())  # somebody else finds packages, too, and elsewhere
    of = [sys.version, [[os.path.abspath(path), _changed(path)] for path in sys.path]]
    return remembered_json("packages.json", of, lambda: dict(look()))


def _changed(path: str) -> int:
    """When something was put into the directory or taken from it, in nanoseconds; 0 where there is none."""
    try:
        return os.stat(path or ".").st_mtime_ns
    except OSError:
        return 0
