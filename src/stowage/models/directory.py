"""A checkpoint's directory: whether it is whole, what its config describes, and its tokenizer.

Owns the checks before loading. A checkpoint that is missing something, or names what lies elsewhere, is refused.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path, PurePath
from typing import Any

from stowage.errors import CheckpointError
from stowage.models import adapters
from stowage.models.multimodal import TextPart, text_part

__all__ = ["check_files", "config_of", "has_tokenizer", "load_tokenizer", "part_of"]

logger = logging.getLogger("stowage.models")
_REASON_CHARACTERS = 200


def check_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint, after checking that all are there and that each is as long as its header
    says.
    """
    if adapters.is_adapter(directory):
        raise CheckpointError(
            f"{directory} is an adapter, which goes on top of a model. Give that model, and the adapter to it: "
            f"stowage run MODEL --adapter {directory}, or adapter={str(directory)!r} in Python."
        )
    if not (directory / "config.json").is_file():
        raise CheckpointError(
            f"{directory} holds no config.json: it is no Hugging Face checkpoint, or its download was cut short."
        )
    if (directory / "adapter_config.json").exists():
        raise CheckpointError(
            f"{directory} holds an adapter beside a model, and Transformers may put it on top of other weights. "
            "Move adapter_config.json and adapter_model.safetensors to a directory of their own, and give it with "
            "--adapter; or merge it into the model."
        )
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            files = [directory / _plain(name) for name in names]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index} is damaged ({error}); download the checkpoint again.") from error
    else:
        files = sorted(directory.glob("model*.safetensors"))
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
    return files


def _plain(name: str) -> str:
    """The name of a file in the checkpoint's directory, or below it."""
    path = PurePath(name)
    if path.is_absolute() or ".." in path.parts or path.suffix != ".safetensors":
        raise ValueError(f"{name!r} is no name of a safetensors file in this directory")
    return name


def _check_inside(path: Path, directory: Path) -> None:
    """A link may lead to another place in the directory, or, in the hub's cache, to where that keeps the files."""
    home, target = directory.resolve(), path.resolve()
    roots = [home, *([home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [])]
    if not any(target.is_relative_to(root) for root in roots):
        raise CheckpointError(
            f"{path} is a link that leads out of the checkpoint's directory, to {target}. Only the hub's own cache may "
            "have such links: copy the file, or give the directory in which it lies."
        )


def _check_file(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise CheckpointError(f"{path} is missing; download the checkpoint again.")
    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); download the checkpoint again.") from error


def part_of(path: Path) -> TextPart:
    """What the checkpoint in that directory, or of that config file, is run as. Raises CheckpointError."""
    return text_part(config_of(path / "config.json" if path.is_dir() else path))


def config_of(file: Path) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError, StrictDataclassError) as error:
        found = _config_of_architecture(file)
        if found is not None:
            return found
        why = str(error)
        if isinstance(error, StrictDataclassError):  # what was found is its last line
            why = " ".join(why.split())[-_REASON_CHARACTERS:]
        raise CheckpointError(f"{file} is not a config that Transformers understands: {why}") from error


def _config_of_architecture(file: Path) -> Any:
    """The config of a checkpoint whose type Transformers does not know, while it has the class of model that the config
    names (Kimi-K2 is a ``DeepseekV3ForCausalLM``); ``None`` if it has not.
    """
    import transformers
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        if entries.get("model_type") in CONFIG_MAPPING:
            return None  # it is known, and refused for another reason
        (architecture,) = entries["architectures"]
        if architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            return None
        config_class = getattr(transformers, architecture).config_class
        logger.warning(
            "Transformers does not know the model type %r; the model is run as a %s, as its config.json says. Compare "
            "an answer with one that you trust.",
            entries.get("model_type"),
            architecture,
        )
        return config_class(**{k: v for k, v in entries.items() if k not in ("model_type", "auto_map")})
    except (ValueError, KeyError, TypeError, AttributeError, StrictDataclassError):
        return None


def has_tokenizer(directory: Path) -> bool:
    """Whether the checkpoint there reads text."""
    return any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"))


def load_tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    if not has_tokenizer(directory):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        apart = directory / "chat_template.json"  # where processors of pictures and text have it
        if not tokenizer.chat_template and apart.is_file():
            tokenizer.chat_template = json.loads(apart.read_text(encoding="utf-8"))["chat_template"]
        return tokenizer
    except (ValueError, OSError, KeyError, TypeError, ImportError) as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:_REASON_CHARACTERS]
        raise CheckpointError(
            f"the tokenizer in {directory} cannot be loaded: {why}. Download tokenizer.json and tokenizer_config.json "
            "again."
        ) from error
