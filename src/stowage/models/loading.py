"""From a name to a model: where the checkpoint is, whether it is whole, and the model and tokenizer that Transformers
builds of it.

Owns the checks before and after loading. A checkpoint that is missing something is refused: Transformers would fill the
gap with random numbers and answer.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from stowage.errors import CheckpointError, ConfigError, UnsupportedModelError
from stowage.models import adapters, compat, identity, layout
from stowage.models.hub import find, no_gguf
from stowage.models.multimodal import TextPart, as_plain, load_with, text_model, text_part
from stowage.models.whole import towers, trial_inputs, whole_part

if TYPE_CHECKING:
    from stowage.weights.loading import Budget
    from stowage.weights.source import WeightSource

logger = logging.getLogger("stowage.models")
_REASON_CHARACTERS = 200
_UNCALLED_MOST = 5
"""How often a model is loaded to find out which modules must be resident."""
_DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to run, its tokenizer if it has one, and the digest of its weights."""

    model: Any
    tokenizer: Any
    identity: str
    name: str
    weights: WeightSource | None = None
    owns_weights: bool = True
    """Whether ``weights`` were placed here, and are closed by whoever has this."""
    placeholders: frozenset[int] = frozenset()
    """Tokens that stand for pictures or sound: none is taken in a prompt, and each ends an answer."""
    renamed: Mapping[str, str] | None = None
    """From names in the checkpoint to the model's own, where they differ (`TextPart.renamed`)."""


def load(
    model: Any,
    dtype: str = "auto",
    tokenizer: Any = None,
    budget: Callable[[Any], Budget] | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    device: Any = None,
    whole: bool = False,
    model_class: Any = None,
) -> Loaded:
    """Load ``model``: a directory, a hub id, or a Transformers model that is in memory already. ``device``: where to
    (a ``torch.device``); ``None``: a model in memory stays where it is, others lie in the CPU's.

    ``budget``: from a config to what its weights may take; without one all of them are in memory. ``options`` go to
    ``from_pretrained``. Raises ``BudgetError`` for a budget that cannot work, ``CheckpointError`` for a checkpoint
    that is missing, damaged or incomplete, ``UnsupportedModelError`` for a family that this version refuses,
    ``ConfigError`` for an unknown ``dtype``. ``whole``: of any class, which ``model_class`` says or else config.json
    (`whole_part`), without a tokenizer; else the causal model of text that an engine runs.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype {dtype!r} is unknown; choose one of: {', '.join(_DTYPES)}.")
    compat.warn_if_untested()
    if not isinstance(model, str | Path):
        return _in_memory(model, tokenizer, budget, device, whole)
    directory = find(str(model))
    files = check_files(directory)
    if whole:
        part = whole_part(directory, _config_of(directory / "config.json"), model_class)
    else:
        part = part_of(directory)
        layout.refuse_unsupported(part.config)
    files = _packed_files(directory, part.config, files)
    build = partial(load_model, directory, part, dtype, options or {})
    name = identity.of_checkpoint(directory, [directory / "config.json", *files])
    if budget is None:
        built, source = build(), None
        built = built if device is None else built.to(device)  # tensor by tensor: never all of it in both memories
    else:
        built, source = _placed(files, build, budget(part.config), name)
    try:
        reads = tokenizer if tokenizer or whole else _load_tokenizer(directory)
        return Loaded(built, reads, name, str(model), source, placeholders=part.placeholders, renamed=part.renamed)
    except BaseException:
        if source is not None:
            source.close()
        raise


def _placed(files: list[Path], build: Callable[[], Any], budget: Budget, name: str) -> tuple[Any, WeightSource]:
    """The model within ``budget``. Modules whose weights are used without calling them are found by trying, one at a
    time, and stay resident.
    """
    from stowage.weights.loading import load as load_within
    from stowage.weights.placement import Delivery, Rule
    from stowage.weights.source import UncalledError

    for left in reversed(range(_UNCALLED_MOST)):
        built, source = load_within(files, build, budget)
        try:
            _name(source, name, built)
            return built, source
        except UncalledError as error:
            source.close()
            if not left:
                raise
            kept = Rule(f"{error.unit}=resident", Delivery.RESIDENT, error.unit)
            budget = replace(budget, rules=(kept, *budget.rules))
        except BaseException:
            source.close()
            raise
    raise AssertionError("the last try returns or raises")


def _in_memory(model: Any, tokenizer: Any, budget: Callable[[Any], Budget] | None, device: Any, whole: bool) -> Loaded:
    part = TextPart(model.config) if whole else text_part(model.config)
    if not whole:
        layout.refuse_unsupported(part.config)
    if getattr(model, "peft_config", None):
        raise UnsupportedModelError(
            "the model has adapters, which can be switched while it runs; merge them first: "
            "model = model.merge_and_unload()"
        )
    if model.device.type == "meta":
        raise UnsupportedModelError("the model has no weights in memory (device 'meta'): load it whole.")
    if device is not None and device != model.device:
        raise ConfigError(f"the model lies on {model.device}, not on {device}: give it model.to('{device}').")
    if part.outer:
        if budget is not None:
            raise UnsupportedModelError(
                f"a {type(model).__name__} in memory cannot be placed under a budget, because what is no text model in "
                "it would stay: give the checkpoint's directory instead of the model."
            )
        model = text_model(model, part)
    name, source = identity.of_parameters(model), getattr(model, "stowage", None)
    kind = type(model).__name__
    if source is not None:
        if budget is not None:
            raise ConfigError("the weights of this model are placed already: leave device_memory and weights out.")
        return Loaded(model.eval(), tokenizer, name, kind, source, owns_weights=False)
    if budget is not None:
        if model.device.type != "cpu":
            raise ConfigError(
                f"the model lies on {model.device} as a whole: to place its weights under a budget give its "
                "checkpoint's directory instead of the model."
            )
        from stowage.weights.loading import adopt

        source = adopt(model.eval(), budget(model.config))
        _name(source, name, model)
    return Loaded(model.eval(), tokenizer, name, kind, source, placeholders=part.placeholders, renamed=part.renamed)


def _name(source: WeightSource, name: str, model: Any) -> None:
    """``model`` computes with weights called ``name`` that ``source`` delivers: proved, and known to whoever has it."""
    source.identity = name
    for part in (model, *towers(model)):
        source.prove(part, partial(trial_inputs, part))
    model.stowage = source


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
        if gguf := next(directory.glob("*.gguf"), None):
            raise CheckpointError(no_gguf(gguf))
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


def _packed_files(directory: Path, config: Any, files: list[Path]) -> list[Path]:
    """Those of ``files`` that hold the weights: packed ones if the config says so. Raises CheckpointError."""
    from stowage.weights.quantized import modules

    path = directory / modules.FILE
    if modules.marked(config):
        if path not in files:
            raise CheckpointError(f"{path} is missing, and config.json says that the weights are packed: copy it too.")
        modules.register()
        return [path]
    if path in files:
        raise CheckpointError(
            f"{path} holds packed weights, and config.json does not say so: it is another checkpoint's. Copy the "
            "config.json that stowage pack wrote."
        )
    return files


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
    return text_part(_config_of(path / "config.json" if path.is_dir() else path))


def _config_of(file: Path) -> Any:
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
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
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


def load_model(directory: Path, part: TextPart, dtype: str, options: Mapping[str, Any]) -> Any:
    """The model that Transformers builds of ``part``, whole. Raises CheckpointError."""
    import torch
    from safetensors import SafetensorError

    from stowage.weights.lossless.readable import readable
    from stowage.weights.quantized import modules

    if modules.marked(part.config):
        options = {**options, "variant": modules.VARIANT}
    try:
        with readable(sorted(directory.glob("*.safetensors"))):
            model, report = load_with(part).from_pretrained(
                directory,
                config=part.config,
                key_mapping=part.renamed,
                dtype=dtype if dtype == "auto" else getattr(torch, dtype),
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                **options,
            )
    except (ValueError, OSError, RuntimeError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"Transformers could not load {directory}: {error}") from error
    complaints = ["missing_keys", "mismatched_keys", "error_msgs"]
    if modules.marked(part.config):
        complaints.append("unexpected_keys")  # it was written for this very model
    for what in complaints:
        if report.get(what):
            first = sorted(map(str, report[what]))[0]
            found = f"{directory} is incomplete: {len(report[what])} {what.replace('_', ' ')}, the first is {first}. "
            another = part.model_class is not None and "or give the model_class that it was saved from, not "
            raise CheckpointError(
                f"{found}Such weights would be random numbers; download the checkpoint again"
                f"{f', {another}{type(model).__name__}' if another else ''}."
            )
    return as_plain(model, part).eval()


def has_tokenizer(directory: Path) -> bool:
    """Whether the checkpoint there reads text."""
    return any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"))


def _load_tokenizer(directory: Path) -> Any:
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


def eos_ids(model: Any) -> frozenset[int]:
    """Tokens that end a sequence: of the generation config, or of the config where that says nothing."""
    for config in (getattr(model, "generation_config", None), model.config):
        value = getattr(config, "eos_token_id", None)
        if value is not None:
            return frozenset([value] if isinstance(value, int) else value)
    return frozenset()
