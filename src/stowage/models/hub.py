"""Finds a model's files: in the directory that is named, or in a download from the hub.

Owns what is said where there is none.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from stowage.errors import CheckpointError
from stowage.models import hub_gguf

_FILES = ["*.json", "*.safetensors", "tokenizer*", "*.jinja", "*.model"]
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
        return path.exists() or _is_path(name) or (path.suffix in _ENDINGS and hub_gguf.parse(name) is None)
    except (OSError, RuntimeError, ValueError):  # what cannot be a path is no id either
        return True


def _is_path(name: str) -> bool:
    return Path(name).expanduser().is_absolute() or name.startswith((".", "~")) or name.count("/") > 1


def is_gguf(path: Path) -> bool:
    """Whether the file ``path`` is called as a GGUF file, or begins as one: Ollama's are called by their digest."""
    if path.suffix == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def find(name: str) -> Path:
    """The directory of a checkpoint: ``name`` itself, or the hub's copy of it (``HF_HOME``, ``HF_TOKEN``,
    ``HF_HUB_OFFLINE`` are honoured); or the GGUF file that is named, here or on the hub (``ORG/NAME:Q4_K_M``).
    """
    try:
        path = Path(name).expanduser()
        is_directory, exists = path.is_dir(), path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # a name that cannot be, or nobody's home
        raise CheckpointError(f"{name[:200]!r} names no directory: {str(error)[:200]}.") from error
    if is_directory:
        return path
    if exists and is_gguf(path):
        return path
    if exists:
        raise CheckpointError(
            f"{name} is a file, and no GGUF file; give the directory that holds config.json and the safetensors files."
        )
    if (tagged := hub_gguf.parse(name)) is not None:
        return _from_hub(name, lambda: _download_gguf(*tagged))
    if path.suffix == ".gguf":
        raise CheckpointError(f"{name} does not exist. Give a GGUF file, or one of the hub's as ORG/NAME:Q4_K_M.")
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
        return _from_hub(name, lambda: _download_config(name))
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


def _download_config(name: str) -> str:
    """Where it is not here yet, it is asked for first: the download asks again and again, for half a minute."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

    if not constants.HF_HUB_OFFLINE and not isinstance(try_to_load_from_cache(name, "config.json"), str):
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
    return str(hf_hub_download(name, "config.json"))


def find_gguf(name: str) -> Path | None:
    """The GGUF file that is ``name`` on the hub, if it was downloaded before; ``None`` where ``name`` says none.

    Raises ``CheckpointError``.
    """
    if _is_local(name):
        return None
    tagged = hub_gguf.parse(name)
    repository, tag = tagged or (name, "")
    if tagged is None and not name.lower().endswith("gguf"):
        return None
    return _from_hub(name, lambda: _downloaded(name, repository, tag))


def _downloaded(name: str, repository: str, tag: str) -> str:
    """The file of what was downloaded. Raises ``CheckpointError``."""
    directory = downloaded(repository)
    try:
        files = hub_gguf.files_of(repository, _gguf_in(directory), tag) if directory else []
    except CheckpointError:  # of what was downloaded
        files = []
    if directory is None or not files:
        wanted = f"*{tag.removesuffix('.gguf')}*.gguf" if tag else "*.gguf"
        raise CheckpointError(
            f"{name} is a GGUF file on the hub that was not downloaded, and what is asked is in the file. Download it: "
            f"hf download {repository} --include '{wanted}'"
        )
    return str(directory / files[0])


def _download(name: str) -> Path:
    """A checkpoint of safetensors files, or else of GGUF files."""
    from huggingface_hub import snapshot_download

    directory = _from_hub(name, lambda: snapshot_download(name, allow_patterns=_FILES))
    if any(directory.glob("*.safetensors")):
        return directory
    return _from_hub(name, lambda: _download_gguf(name) or str(directory))


def _download_gguf(repository: str, tag: str = "") -> str:
    """The file that is meant, or the first of its parts. Nothing where no ``tag`` says one, and there is none."""
    from huggingface_hub import snapshot_download

    names = _names(repository)
    if tag and not names:
        snapshot_download(repository, allow_patterns="*.gguf")  # says why there is none
    files = hub_gguf.files_of(repository, names, tag)
    return str(Path(snapshot_download(repository, allow_patterns=files)) / files[0]) if files else ""


def _names(repository: str) -> list[str]:
    """Of a repository's files; of those that were downloaded where nobody is to be asked, or nobody answers."""
    from httpx import TransportError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        return list(HfApi().list_repo_files(repository))
    except (OfflineModeIsEnabled, TransportError):
        directory = downloaded(repository)
        return _gguf_in(directory) if directory else []


def local_path(name: str, revision: str | None = None) -> Path | None:
    """The directory or file that ``name`` is, or where what was downloaded of a repository of that name lies; None:
    it is neither. The hub is not asked.
    """
    from stowage.models.hub_errors import TROUBLES

    if Path(name).exists():
        return Path(name)
    try:
        return downloaded(name, revision)
    except (*TROUBLES, ValueError):
        return None


def downloaded(repository: str, revision: str | None = None) -> Path | None:
    """Where what was downloaded of a repository lies: of its default revision, unless one is given. Raises
    ``ValueError`` for what cannot be a repository's name.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=[], local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def _gguf_in(directory: Path) -> list[str]:
    return [str(path.relative_to(directory)) for path in directory.rglob("*.gguf")]


def _from_hub(name: str, ask: Callable[[], str]) -> Path:
    """What ``ask`` gets of the hub. Raises ``CheckpointError``."""
    from stowage.models.hub_errors import TROUBLES, why_not

    try:
        return Path(ask())
    except TROUBLES as error:
        raise CheckpointError(
            f"{name!r} is no directory here, and the hub did not give it: {why_not(name, error)} "
            "A tiny model to try with: stowage tiny llama ./tiny"
        ) from error
