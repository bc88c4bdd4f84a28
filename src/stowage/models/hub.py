"""Where a model is: the directory that is named, or the hub's copy of it.

Owns what is said where there is none.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from stowage.errors import CheckpointError, first_line

__all__ = ["find", "find_config", "is_here"]

_FILES = ["*.json", "*.safetensors", "tokenizer*", "*.jinja", "*.model"]
_REASON_CHARACTERS = 200
_YES = ("1", "ON", "YES", "TRUE")
"""As the hub's client reads a switch in the environment."""

_ENDINGS: Final = (".bin", ".gguf", ".json", ".pt", ".safetensors")
"""What no model on the hub ends in: a name that does is a file's, whether it exists or not."""


def is_here(name: str) -> bool:
    """Whether looking for ``name`` asks nobody: it is a path, or the hub is not to be asked."""
    return _is_local(name) or os.environ.get("HF_HUB_OFFLINE", "").upper() in _YES


def _is_local(name: str) -> bool:
    try:
        path = Path(name).expanduser()
        return path.exists() or _is_path(name) or path.suffix in _ENDINGS
    except (OSError, RuntimeError, ValueError):  # what cannot be a path is no id either
        return True


def _is_path(name: str) -> bool:
    return Path(name).expanduser().is_absolute() or name.startswith((".", "~")) or name.count("/") > 1


def find(name: str) -> Path:
    """The directory of a checkpoint: ``name`` itself, or the hub's copy of it (``HF_HOME``, ``HF_TOKEN``,
    ``HF_HUB_OFFLINE`` are honoured); or the GGUF file that is named.
    """
    try:
        path = Path(name).expanduser()
        is_directory, exists = path.is_dir(), path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # a name that cannot be, or nobody's home
        raise CheckpointError(f"{name[:200]!r} names no directory: {str(error)[:200]}.") from error
    if is_directory:
        return path
    if exists and path.suffix == ".gguf":
        return path
    if exists:
        raise CheckpointError(
            f"{name} is a file, and no GGUF file; give the directory that holds config.json and the safetensors files."
        )
    if path.suffix == ".gguf":
        raise CheckpointError(f"{name} does not exist. Give a GGUF file: hf download NAME FILE.gguf --local-dir DIR")
    if _is_path(name):
        raise CheckpointError(f"{name} does not exist. Give a checkpoint directory or {_id_like(name)}.")
    return _download(name)


def _id_like(name: str) -> str:
    """An id to try, taken from ``name`` where that is a page of the hub."""
    page = name.partition("huggingface.co/")[2].split("/")
    return f"the hub's id: {'/'.join(page[:2])}" if len(page) > 1 else "a hub id such as Qwen/Qwen3-0.6B"


def find_config(name: str) -> Path:
    """The config of a checkpoint: in the directory ``name``, that file itself, or the hub's, without the weights.

    Raises ``CheckpointError``.
    """
    if not _is_local(name):
        from huggingface_hub import hf_hub_download

        return _from_hub(name, lambda: hf_hub_download(name, "config.json"))
    directory = Path(name).expanduser()
    is_directory = directory.is_dir()
    path = directory / "config.json" if is_directory else directory
    if not path.is_file():
        # an address has two slashes, which a path has not
        wrong = f"{directory.absolute()} holds no config.json" if is_directory else f"{name} does not exist"
        raise CheckpointError(
            f"{wrong}. Give a directory with a config.json, such a file, or {_id_like(name)}; weights are not needed."
        )
    return path


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    return _from_hub(name, lambda: snapshot_download(name, allow_patterns=_FILES))


def _from_hub(name: str, ask: Callable[[], str]) -> Path:
    """What ``ask`` gets of the hub. Raises ``CheckpointError``."""
    import httpx
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(ask())
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError) as error:
        why = (
            f"{first_line(error)[:_REASON_CHARACTERS]}. Check the spelling and the network; for a private model set "
            "HF_TOKEN; to use what was downloaded before set HF_HUB_OFFLINE=1."
        )
        if HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE is set, and it was not downloaded before. Unset HF_HUB_OFFLINE to download it."
        raise CheckpointError(
            f"{name!r} is no directory here, and the hub did not give it: {why} A tiny model to try with: stowage tiny "
            "llama ./tiny"
        ) from error
