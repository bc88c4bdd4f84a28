"""Checks that the files of a checkpoint or an adapter are there and whole, before anything slow is imported.

Owns the checks before loading. What is missing something, or names what lies elsewhere, is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePath

from stowage.errors import CheckpointError, ConfigError, damaged
from stowage.models.hub import find, is_here

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def check_given(model: str, adapter: str | Path | Mapping[str, str | Path] = "") -> None:
    """Look for what a command is given, in less than a tenth of a second. Whether the hub has a model is not asked.

    Raises ``CheckpointError`` and ``ConfigError``.
    """
    for directory in adapters_named(adapter).values():
        check_adapter(directory)
    if is_here(model):
        directory = find(model)
        if directory.is_dir() and not any(directory.glob("*.gguf")):
            check_files(directory)


def adapters_named(given: str | Path | Mapping[str, str | Path]) -> dict[str, Path]:
    """The directories ``given``, by the name of each: one is called as its directory is. Raises ``ConfigError``."""
    if not given:
        return {}
    named = given if isinstance(given, Mapping) else {Path(given).expanduser().resolve().name: given}
    for name in named:
        if not isinstance(name, str) or not name.strip():
            raise ConfigError(f"{name!r} is no name of an adapter: write NAME=DIR.")
    return {name: Path(path).expanduser() for name, path in named.items()}


def is_adapter(directory: Path) -> bool:
    """Whether ``directory`` holds an adapter, and no model."""
    return (directory / ADAPTER_CONFIG).is_file() and not (directory / "config.json").is_file()


def check_adapter(directory: Path) -> Path:
    """The weights of the adapter there. Raises ``CheckpointError``."""
    if not directory.is_dir():
        raise CheckpointError(f"the adapter {directory} does not exist: give the directory that PEFT saved it in.")
    if not (directory / ADAPTER_CONFIG).is_file():
        raise CheckpointError(
            f"{directory} holds no {ADAPTER_CONFIG}: it is no adapter of PEFT's, or its download was cut short."
        )
    file = directory / ADAPTER_WEIGHTS
    if not file.is_file():
        if (directory / "adapter_model.bin").is_file():
            raise CheckpointError(
                f"{directory} holds adapter_model.bin, a pickle, which can run code when it is opened and is refused. "
                "Save it again where you trust it, with PEFT's save_pretrained(), which writes safetensors."
            )
        raise CheckpointError(f"{file} is missing: the adapter's download was cut short.")
    return file


def check_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint, after checking that all are there and as long as their headers say."""
    if is_adapter(directory):
        raise CheckpointError(
            f"{directory} is an adapter, which goes on top of a model. Give that model, and the adapter to it: "
            f"stowage run MODEL --adapter {directory}, or adapter={str(directory)!r} in Python."
        )
    if not (directory / "config.json").is_file():
        raise CheckpointError(
            f"{directory.absolute()} holds no config.json: it is no Hugging Face checkpoint, or its download was cut "
            "short. Give a directory with one, or a hub id such as Qwen/Qwen3-0.6B."
        )
    if (directory / ADAPTER_CONFIG).exists():
        raise CheckpointError(
            f"{directory} holds an adapter beside a model, and Transformers may put it on top of other weights. "
            "Move adapter_config.json and adapter_model.safetensors to a directory of their own, and give it with "
            "--adapter; or merge it into the model."
        )
    files = weight_files(directory)
    if not files:
        old = sorted(p.name for p in directory.glob("*.bin"))
        if old:
            raise CheckpointError(
                f"{directory} holds only {old[0]}, a pickle, which can run code when it is opened and is refused. "
                "Convert it where you trust it: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"
            )
        raise CheckpointError(
            f"{directory} holds no model*.safetensors file: its download was cut short, or the weights are elsewhere."
        )
    for path in files:
        _check_inside(path, directory)
        _check_file(path)
    _check_generation(directory / "generation_config.json")
    return files


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that Transformers reads of a checkpoint: the one of the usual name, whatever lies beside
    it, or those that the index names. Where there is neither, those that are called as a part of a model. Raises
    CheckpointError for a damaged index.
    """
    whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        return sorted(directory.glob("model*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        return [directory / _plain(name) for name in names]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise damaged(index, error) from error


def _plain(name: str) -> str:
    """The name of a file in the checkpoint's directory, or below it."""
    path = PurePath(name)
    if path.is_absolute() or ".." in path.parts or path.suffix != ".safetensors":
        raise ValueError(f"{name!r} is no name of a safetensors file in this directory")
    return name


def _check_inside(path: Path, directory: Path) -> None:
    """A link may lead elsewhere in the directory, or, in the hub's cache, to where that keeps the files."""
    home, target = directory.resolve(), path.resolve()
    roots = [home, *([home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [])]
    if not any(target.is_relative_to(root) for root in roots):
        raise CheckpointError(
            f"{path} is a link that leads out of the checkpoint's directory, to {target}. Only the hub's own cache may "
            "have such links: copy the file, or give the directory in which it lies."
        )


def _check_generation(path: Path) -> None:
    if not path.is_file():
        return
    try:
        if isinstance(json.loads(path.read_text(encoding="utf-8")), dict):
            return
        said = "it holds no settings"
    except (OSError, ValueError, RecursionError) as error:
        said = str(error)
    raise CheckpointError(f"{path} is damaged ({said}); download it again, or remove it.")


def unreadable(path: Path, error: OSError) -> str:
    """What is told of a file that is there and cannot be opened, which no download mends."""
    return f"{path} cannot be read ({error.strerror}). Give this user the right to read it, or run as its owner."


def _check_file(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise CheckpointError(f"{path} is missing; download the checkpoint again.")
    try:
        path.open("rb").close()
    except OSError as error:
        raise CheckpointError(unreadable(path, error)) from error
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise damaged(path, error) from error
