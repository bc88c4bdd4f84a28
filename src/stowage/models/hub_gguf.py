"""Chooses the GGUF file of a hub repository: ``ORG/NAME:Q4_K_M``, as llama.cpp and others name them.

Owns names alone; ``hub`` asks for them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Final

from stowage.errors import CheckpointError

_TAGGED: Final = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+):(?P<tag>[\w./-]+)")
_PART: Final = re.compile(r"-\d{5}-of-\d{5}$")
_DEFAULT: Final = "Q4_K_M"
_NO_MODELS: Final = ("mmproj", "imatrix")
"""What files are called that go with a model: a part for pictures, and what a quantiser measured."""
_SHOWN: Final = 8


def parse(name: str) -> tuple[str, str] | None:
    """The repository and the tag of ``ORG/NAME:TAG``; ``None`` for other names."""
    match = _TAGGED.fullmatch(name)
    return (match["repository"], match["tag"]) if match else None


def goes_with_a_model(name: str) -> bool:
    """Whether a file of this name is none itself."""
    return any(word in name.lower() for word in _NO_MODELS)


def files_of(repository: str, names: Iterable[str], tag: str = "") -> list[str]:
    """Those of the files ``names`` of a repository that are the model ``tag`` says: a type at the end of a file's name
    (``Q4_K_M``), or a file. Without a tag the only model, or the one in Q4_K_M. Several are one model in parts; none:
    it has no GGUF file. Raises CheckpointError where no model, or more than one, is what ``tag`` says.
    """
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        path = PurePosixPath(name)
        if path.suffix == ".gguf" and not goes_with_a_model(path.name):
            models.setdefault(_PART.sub("", name.removesuffix(".gguf")), []).append(name)
    if len(models) < 2 and not tag:
        return next(iter(models.values()), [])
    found = [files for model, files in models.items() if _is_named(model, files, tag or _DEFAULT)]
    if len(found) == 1:
        return found[0]
    shown = ", ".join(PurePosixPath(files[0]).name for files in (found or list(models.values()))[:_SHOWN])
    more = " and others" if len(found or models) > _SHOWN else ""
    if not models:
        raise CheckpointError(f"{repository} has no GGUF files: give it without :{tag}.")
    what = f"several models that :{tag} may mean" if found else f"no {tag}" if tag else f"{len(models)} GGUF models"
    raise CheckpointError(
        f"{repository} has {what} ({shown}{more}): name one by its type, as {repository}:Q8_0, or by its file, as "
        f"{repository}:{PurePosixPath((found or list(models.values()))[0][0]).name}"
    )


def _is_named(model: str, files: list[str], tag: str) -> bool:
    """Unsloth's own mixtures of a type are called UD-Q4_K_M: they are not meant by Q4_K_M."""
    if tag.lower().endswith(".gguf"):
        return any(tag.lower() in (name.lower(), PurePosixPath(name).name.lower()) for name in files)
    own, wanted = PurePosixPath(model).name.lower(), tag.lower()
    before = own.removesuffix(wanted)
    return own == wanted or (before != own and before[-1:] in "-._" and not before.endswith("ud-"))
