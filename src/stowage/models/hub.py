"""Where a model is: the directory that is named, or the hub's copy of it.

Owns what is said where there is none.
"""

from __future__ import annotations

import os
from pathlib import Path

from stowage.errors import CheckpointError, first_line

__all__ = ["find", "is_here"]

_FILES = ["*.json", "*.safetensors", "tokenizer*", "*.jinja", "*.model"]
_REASON_CHARACTERS = 200
_YES = ("1", "ON", "YES", "TRUE")
"""As the hub's client reads a switch in the environment."""


def is_here(name: str) -> bool:
    """Whether `find` would look for ``name`` in directories only."""
    try:
        path = Path(name).expanduser()
        if path.exists():
            return True
    except (OSError, RuntimeError, ValueError):
        return True
    return _is_path(name) or path.suffix == ".gguf" or os.environ.get("HF_HUB_OFFLINE", "").upper() in _YES


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
        raise CheckpointError(
            f"{name} does not exist. Give a checkpoint directory or a hub id such as Qwen/Qwen3-0.6B."
        )
    return _download(name)


def _download(name: str) -> Path:
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
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
