"""From a name to a model: where the checkpoint is, whether it is whole, and the model and tokenizer that Transformers
builds of it.

Owns the checks before and after loading. A checkpoint that is missing something is refused: Transformers would fill the
gap with random numbers and answer.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from stowage.config.wording import shown_value
from stowage.errors import CheckpointError, ConfigError, UnsupportedModelError
from stowage.models import compat, identity, layout
from stowage.models.adapters import refuse_adapters
from stowage.models.directory import config_of, load_tokenizer, part_of
from stowage.models.files import check_files, weight_files
from stowage.models.hub import find
from stowage.models.identity import FileMarks
from stowage.models.model_class import towers, trial_inputs, whole_part
from stowage.models.multimodal import TextPart, as_plain, class_of, load_with, text_model, text_part
from stowage.models.published.method import method_of
from stowage.weights.checkpoint import Span
from stowage.weights.gguf import splits_of
from stowage.weights.loading import Budget, offload_loaded
from stowage.weights.loading import load as load_within
from stowage.weights.lossless.readable import readable
from stowage.weights.mapped_files import MappedFiles
from stowage.weights.placement import Rule
from stowage.weights.quantized import modules
from stowage.weights.quantized.row_major import rearrange
from stowage.weights.resident import ResidentMemory
from stowage.weights.source import UncalledError, WeightSource
from stowage.weights.weight_unit import Delivery

if TYPE_CHECKING:
    from stowage.weights.quantized.published import Plan

logger = logging.getLogger("stowage.models")
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
    mapped: MappedFiles = field(default_factory=MappedFiles)
    """Those of its files that the model computes from where they lie."""
    renamed: Mapping[str, str] | None = None
    """From names in the checkpoint to the model's own, where they differ (`TextPart.renamed`)."""


@torch.inference_mode(False)
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

    The model's tensors are ordinary ones in inference mode too: those of that mode take no weights that come and go.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype {dtype!r} is unknown; choose one of: {', '.join(_DTYPES)}.")
    compat.warn_if_untested()
    if not isinstance(model, str | Path):
        return _in_memory(model, tokenizer, budget, device, whole)
    from stowage.models.gguf import checkpoint as gguf_file
    from stowage.weights.quantized.published import fill

    directory, on_cpu = find(str(model)), device is None or device.type == "cpu"
    if (gguf := gguf_file.file_in(directory)) is not None:
        found = _of_gguf(gguf, dtype, options or {}, model_class)
    else:
        found = _of_directory(directory, dtype, options or {}, model_class, whole, on_cpu and not whole)
    part = found.part
    if not whole:
        layout.refuse_unsupported(part.config)
    name = identity.of_checkpoint(found.named[0].parent, found.named)
    if budget is None:
        built, source = found.build(), None
        if found.spans:
            fill(built, found.files, found.spans, ResidentMemory(device))
        built = built if device is None else built.to(device)  # tensor by tensor: never all of it in both memories
        _keep_weights(built, None)
        mapped = MappedFiles.among(found.files)
    else:
        built, source = _placed(found, budget(part.config), name)
        mapped = source.mapped_files
    try:
        found.marks.check()
        if on_cpu:
            rearrange(built)
        reads = tokenizer if tokenizer or whole else found.tokenizer()
        own_hooks = source.hooks if source is not None else frozenset()
        return Loaded(
            *(built, reads, identity.with_code(name, built, own_hooks), str(model), source),
            placeholders=part.placeholders,
            renamed=part.renamed,
            mapped=mapped,
        )
    except BaseException:
        mapped.close()
        if source is not None:
            source.close()
        raise


@dataclass(frozen=True, slots=True)
class _Found:
    """A checkpoint that was looked at. ``files`` hold the weights, ``named`` is what its identity is made of;
    ``spans``: of parameters that stay as they lie in ``files``; ``marks``: of all that is read, before it is.
    """

    part: TextPart
    files: Sequence[Path]
    named: Sequence[Path]
    build: Callable[[], Any]
    tokenizer: Callable[[], Any]
    spans: Mapping[str, Sequence[Span]] | None = None
    marks: FileMarks = field(default_factory=FileMarks)


def _of_directory(
    directory: Path, dtype: str, options: Mapping[str, Any], model_class: Any, whole: bool, on_cpu: bool
) -> _Found:
    files = check_files(directory)
    marks = FileMarks([directory / "config.json", *files])
    part = whole_part(directory, config_of(directory / "config.json"), model_class) if whole else part_of(directory)
    files = _packed_files(directory, part.config, files)
    found = _of_published(directory, files, part, dtype, options, on_cpu=on_cpu)
    if found is not None:
        return replace(found, marks=marks)
    build = partial(load_model, directory, part, dtype, options)
    return _Found(
        *(part, files, [directory / "config.json", *files], build, partial(load_tokenizer, directory)), marks=marks
    )


def _of_published(
    directory: Path, files: Sequence[Path], part: TextPart, dtype: str, options: Mapping[str, Any], *, on_cpu: bool
) -> _Found | None:
    """A checkpoint that others quantised, as it lies; ``None`` where there is none, or where only Transformers can make
    numbers of it, which take memory, or a scratch file.
    """
    from stowage.models.published.checkpoint import dtype_of, expandable, finish, plan_of, refuse_unsaid
    from stowage.weights.quantized.published import run_in

    method = method_of(part.config)
    if method is None:
        if not modules.marked(part.config):
            refuse_unsaid(directory, files)
        return None
    meant = dtype_of(part.config, files, dtype)
    chosen = run_in(meant, dtype, on_cpu=on_cpu)
    try:
        plan = plan_of(files, part, method, getattr(torch, chosen))
    except UnsupportedModelError as error:
        if not expandable(files, method):
            raise
        logger.warning(
            "The weights are expanded to %s, because they cannot be computed from as they lie: %s", meant, error
        )
        return None
    if chosen != meant:
        logger.warning(
            "It is run in %s: config.json says %s, for which there are no kernels. --dtype bfloat16 may be quicker; "
            "--dtype %s runs it as it says, and slowly.",
            *(chosen, meant, meant),
        )
    named = [directory / "config.json", *files]
    build = partial(load_planned, directory, part, plan, chosen, options)
    reads = partial(load_tokenizer, directory)
    return _Found(part, files, named, lambda: finish(build(), directory), reads, plan.spans)


def _of_gguf(path: Path, dtype: str, options: Mapping[str, Any], model_class: Any) -> _Found:
    from stowage.models.gguf.checkpoint import open_gguf

    marks = FileMarks(splits_of(path))
    found = open_gguf(path)
    if model_class is not None and getattr(model_class, "__name__", model_class) not in found.classes:
        raise ConfigError(f"model_class={model_class!r}: a GGUF file is loaded as {' or '.join(found.classes)}.")
    stated = str(found.config.dtype).removeprefix("torch.") if dtype == "auto" else dtype
    plan = found.plan(stated)
    part = TextPart(found.config)
    build = partial(load_planned, path, part, plan, stated, options)
    return _Found(part, found.paths, found.paths, lambda: found.finish(build()), found.tokenizer, plan.spans, marks)


def _placed(found: _Found, budget: Budget, name: str) -> tuple[Any, WeightSource]:
    """The model within ``budget``. Modules whose weights are used without calling them are found by trying, one at a
    time, and stay resident.
    """
    for left in reversed(range(_UNCALLED_MOST)):
        built, source = load_within(found.files, found.build, budget, found.spans)
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
    refuse_adapters(model)
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
        source = offload_loaded(model.eval(), budget(model.config))
        _name(source, name, model)
    return Loaded(model.eval(), tokenizer, name, kind, source, placeholders=part.placeholders, renamed=part.renamed)


def _name(source: WeightSource, name: str, model: Any) -> None:
    """``model`` computes with weights called ``name`` that ``source`` delivers: proved, and known to whoever has it."""
    _keep_weights(model, source)
    for part in (model, *towers(model)):
        source.prove(part, partial(trial_inputs, part))
    source.name(name)
    model.stowage = source


def _keep_weights(model: Any, source: WeightSource | None) -> None:
    """What a family writes to when it first computes stays, if it is packed, or not in memory of the model's own."""
    from stowage.models.state_access import keeper_of

    if modules.is_packed(model) or (source is not None and source.offloads):
        keeper_of(model).keep_weights(model)


def _packed_files(directory: Path, config: Any, files: list[Path]) -> list[Path]:
    """Those of ``files`` that hold the weights: packed ones if the config says so. Raises CheckpointError."""
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


def load_model(directory: Path, part: TextPart, dtype: str, options: Mapping[str, Any]) -> Any:
    """The model that Transformers builds of ``part``, whole. Raises CheckpointError."""
    if modules.marked(part.config):
        options = {**options, "variant": modules.VARIANT}
    with _told(directory, options), readable(weight_files(directory)):
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
    _refuse_incomplete(directory, part, model, report, strict=bool(modules.marked(part.config)))
    return as_plain(model, part).eval()


def load_planned(path: Path, part: TextPart, plan: Plan, dtype: str, options: Mapping[str, Any]) -> Any:
    """The model of ``plan``, which is in the file or directory ``path``: of what is kept there, it has no values.

    Raises CheckpointError.
    """
    from stowage.weights.quantized import published

    config = copy.deepcopy(part.config)
    config.quantization_config = published.mark(plan)
    with _told(path, options):
        model, report = class_of(part).from_pretrained(
            None,
            config=config,
            state_dict=plan.state(),
            dtype=getattr(torch, dtype),
            output_loading_info=True,
            **options,
        )
    _refuse_incomplete(path, part, model, report, strict=True)
    del model.config.quantization_config
    model = as_plain(model, part).eval()
    published.computes_in(model, getattr(torch, dtype))
    return model


@contextmanager
def _told(path: Path, options: Mapping[str, Any]) -> Iterator[None]:
    """What Transformers says while it loads ``path`` with ``options`` becomes a CheckpointError; a ConfigError where it
    names one of them, which it does not take, or which is given.
    """
    try:
        yield
    except TypeError as error:
        named = [name for name in options if f"'{name}'" in str(error)]
        if not named:
            raise
        raise ConfigError(
            f"{named[0]}={shown_value(options[named[0]])} cannot be given: Transformers answers "
            f"{str(error).rpartition('.')[2]!r}. Leave it out, or correct its name."
        ) from error
    except (ValueError, OSError, RuntimeError, KeyError, ImportError, SafetensorError) as error:
        why = "the index of its files has no 'metadata'" if error.args == ("metadata",) else str(error)
        raise CheckpointError(f"Transformers could not load {path}: {why}") from error


def _refuse_incomplete(directory: Path, part: TextPart, model: Any, report: Any, *, strict: bool) -> None:
    """``strict``: the checkpoint was written for this very model, and has no other weights."""
    complaints = ["missing_keys", "mismatched_keys", "error_msgs", *["unexpected_keys"] * strict]
    for what in complaints:
        if report.get(what):
            first = sorted(map(str, report[what]))[0]
            found = f"{directory} is incomplete: {len(report[what])} {what.replace('_', ' ')}, the first is {first}. "
            another = part.model_class is not None and "or give the model_class that it was saved from, not "
            raise CheckpointError(
                f"{found}Such weights would be random numbers; download the checkpoint again"
                f"{f', {another}{type(model).__name__}' if another else ''}."
            )


def eos_ids(model: Any) -> frozenset[int]:
    """Tokens that end a sequence: of the generation config, or of the config where that says nothing."""
    for config in (getattr(model, "generation_config", None), model.config):
        value = getattr(config, "eos_token_id", None)
        if value is not None:
            return frozenset([value] if isinstance(value, int) else value)
    return frozenset()
