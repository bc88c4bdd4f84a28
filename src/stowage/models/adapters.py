"""LoRA adapters that PEFT wrote: read, checked against a model, and added to the answers of its linear layers.

    y = x W^T  +  ((x A^T) B^T) * scale        A [rank, inputs], B [outputs, rank], in float32 as PEFT computes

Owns what of PEFT's configuration is understood: everything else that is set is refused, because it would change what
the adapter means. A and B are no parameters of the model: its weights may be offloaded, and do not change. Nothing
is merged, so one model has any number of adapters, and without one it answers as it always did.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from stowage.errors import CheckpointError, RequestError, UnsupportedModelError
from stowage.models import identity
from stowage.models.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapters_named, check_adapter
from stowage.weights.quantized.blocks import BlockLinear

_NO_MEANING = frozenset({
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "bias", "use_rslora",
    "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "megatron_core",
    "loftq_config", "eva_config", "qalora_group_size", "ensure_weight_tying", "runtime_config",
})  # fmt: skip
"""Entries of PEFT's configuration that are understood here, or say nothing about what an adapter computes."""
_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Of ``init_lora_weights``: those after which the base model's weights are what they were."""
_NAME = re.compile(r"^(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<part>[AB])(?:\.default)?\.weight$")

_Item = TypeVar("_Item")


def refuse_adapters(model: Any) -> None:
    """Raises UnsupportedModelError for a model in memory whose adapters are PEFT's."""
    if getattr(model, "peft_config", None):
        raise UnsupportedModelError(
            "the model has adapters, which can be switched while it runs; merge them first: "
            "model = model.merge_and_unload()"
        )


_Out = TypeVar("_Out")


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter from ``directory``: ``pairs`` of A and B (float32) by module, and the digest of its files."""

    name: str
    directory: Path
    config: Mapping[str, Any]
    pairs: Mapping[str, tuple[Tensor, Tensor]]
    digest: bytes

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes + b.nbytes for a, b in self.pairs.values())

    @property
    def base(self) -> str:
        """What it says it was made for."""
        return str(self.config.get("base_model_name_or_path") or "a model that it does not name")


def read_all(given: str | Path | Mapping[str, str | Path]) -> list[AdapterFile]:
    """The adapters in the directories ``given``: one, called as its directory is, or several by name; none for "".

    Raises CheckpointError for what is missing, cut or damaged, UnsupportedModelError for what is no plain LoRA adapter,
    ConfigError for names that cannot be told apart.
    """
    return [_read(name, path) for name, path in adapters_named(given).items()]


def _read(name: str, directory: Path) -> AdapterFile:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = check_adapter(directory)
    marks = identity.FileMarks([directory / ADAPTER_CONFIG, file])
    try:
        config = json.loads((directory / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        config = dict(config.items())
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{directory / ADAPTER_CONFIG} is damaged ({error}); download the adapter again."
        ) from error
    _refuse(directory, config)
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged ({error}); download the adapter again.") from error
    digest = bytes.fromhex(identity.of_checkpoint(directory, [directory / ADAPTER_CONFIG, file]))
    pairs = _pairs(directory, tensors)
    marks.check()
    return AdapterFile(name, directory, config, pairs, digest)


def _refuse(directory: Path, config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for what is no plain LoRA adapter."""
    kind = str(config.get("peft_type", "")).removeprefix("PeftType.")
    if kind != "LORA":
        raise UnsupportedModelError(
            f"{directory} is an adapter of type {kind or 'unknown'}, and LoRA adapters are applied only. Merge it with "
            "PEFT: PeftModel.from_pretrained(BASE, DIR).merge_and_unload().save_pretrained(NEW_DIR)"
        )
    found = [name for name, value in config.items() if value and name not in _NO_MEANING]
    found += ["bias"] * (config.get("bias", "none") != "none")
    found += ["init_lora_weights"] * (config.get("init_lora_weights", True) not in _STARTS)
    if found:
        raise UnsupportedModelError(
            f"{directory} sets {', '.join(f'{name}={config[name]!r}' for name in sorted(found))}, which changes more "
            "than plain LoRA does and is not applied. Merge it with PEFT: "
            "PeftModel.from_pretrained(BASE, DIR).merge_and_unload().save_pretrained(NEW_DIR)"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise CheckpointError(f"{directory / ADAPTER_CONFIG} has r={rank!r} and lora_alpha={alpha!r}: it is damaged.")


def _pairs(directory: Path, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        found = _NAME.match(name)
        if found is None:
            raise UnsupportedModelError(
                f"{directory} holds {name}, which is no matrix of a linear layer's LoRA: embeddings, biases and whole "
                "modules beside it are not applied. Merge the adapter with PEFT's merge_and_unload()."
            )
        parts.setdefault(found["module"], {})[found["part"]] = tensor
    if not parts:
        raise CheckpointError(f"{directory / ADAPTER_WEIGHTS} holds no tensor: download the adapter again.")
    half = next((name for name, both in parts.items() if len(both) < 2), None)
    if half is not None:
        raise CheckpointError(f"{directory / ADAPTER_WEIGHTS} has one half of {half} only: download the adapter again.")
    return {name: (_copied(both["A"]), _copied(both["B"])) for name, both in parts.items()}


def _copied(tensor: Tensor) -> Tensor:
    """In float32, and in memory of its own: the file may be written to while the adapter is used."""
    return tensor.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


@dataclass(frozen=True, slots=True)
class _Layer:
    a: Tensor
    b: Tensor
    scale: float

    def add_to(self, output: Tensor, x: Tensor) -> Tensor:
        """As PEFT does it: in the adapter's type, and back."""
        more = nn.functional.linear(nn.functional.linear(x.to(self.a.dtype), self.a), self.b) * self.scale
        return (output + more).to(output.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One adapter of a model: what it adds, by module."""

    name: str
    digest: bytes
    layers: Mapping[str, _Layer]
    called: set[str] = field(default_factory=set)
    """Modules that it was added to since this was emptied."""


class Adapters:
    """The adapters in ``files``, put on ``model``: the one that is on (`on`) is added to what it computes. ``renamed``:
    regular expressions from names of a checkpoint's tensors to those of the model, where they differ. One thread uses
    it. Raises CheckpointError for an adapter of another model.
    """

    def __init__(self, model: Any, files: Iterable[AdapterFile], renamed: Mapping[str, str] | None = None) -> None:
        self.active: Adapter | None = None
        self._by_name: dict[str, Adapter] = {}
        modules = {name: module for name, module in model.named_modules() if _shape(module) is not None}
        for file in files:
            self._by_name[file.name] = _fitted(file, modules, renamed or {}, model.device)
        targets = {name: modules[name] for adapter in self._by_name.values() for name in adapter.layers}
        self._targets = {name: (module, module.__dict__.get("forward")) for name, module in targets.items()}
        self._forwards = {name: self._forward(name, module.forward) for name, module in targets.items()}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def named(self, name: str) -> Adapter | None:
        """The adapter called ``name``; ``None`` for "", which is the model without one. Raises RequestError."""
        if not name:
            return None
        if name not in self._by_name:
            known = ", ".join(self._by_name) or "none"
            raise RequestError(f"there is no adapter {name!r} here; there are: {known}.")
        return self._by_name[name]

    @contextmanager
    def on(self, adapter: Adapter | None) -> Iterator[None]:
        """``adapter`` is added to what the model computes in here."""
        before = self.active
        self.put_on(adapter)
        try:
            yield
        finally:
            self.put_on(before)

    def put_on(self, adapter: Adapter | None) -> None:
        """``adapter`` is on from now. Without one nothing is in the model: what records its steps finds it plain."""
        if adapter is self.active:
            return
        for name in self.active.layers if self.active is not None else ():
            module, own = self._targets[name]
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = own
        self.active = adapter
        for name in adapter.layers if adapter is not None else ():
            self._targets[name][0].__dict__["forward"] = self._forwards[name]

    def apart(
        self, work: Sequence[_Item], adapter_of: Callable[[_Item], Any], run: Callable[[list[_Item]], list[_Out]]
    ) -> list[_Out]:
        """``run`` of the items of each adapter by themselves, with it on; the results in the order of ``work``."""
        parts: dict[int, list[_Item]] = {}
        for item in work:
            parts.setdefault(id(adapter_of(item)), []).append(item)
        found: dict[int, _Out] = {}
        for items in parts.values():
            with self.on(adapter_of(items[0])):
                found.update(zip(map(id, items), run(items), strict=True))
        return [found[id(item)] for item in work]

    def remove(self) -> None:
        """The model computes by itself again. May be called twice."""
        self.put_on(None)

    def _forward(self, name: str, own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(*args: Tensor, **kwargs: Tensor) -> Tensor:
            output, adapter = own(*args, **kwargs), self.active
            if adapter is None:
                return output
            adapter.called.add(name)
            return adapter.layers[name].add_to(output, args[0] if args else next(iter(kwargs.values())))

        return forward


def _shape(module: nn.Module) -> tuple[int, int] | None:
    """Outputs and inputs of a linear layer, packed and quantised ones too; ``None`` for others."""
    if isinstance(module, nn.Linear | BlockLinear):
        return int(module.out_features), int(module.in_features)
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # GPT-2's: the matrix is the other way round
        return int(module.nf), int(module.nx)  # type: ignore[arg-type]
    return None


def _fitted(
    file: AdapterFile, modules: Mapping[str, nn.Module], renamed: Mapping[str, str], device: torch.device
) -> Adapter:
    layers: dict[str, _Layer] = {}
    for written, (a, b) in file.pairs.items():
        name = written
        for old, new in renamed.items():
            name = re.sub(old, new, name)
        if name not in modules:
            raise CheckpointError(
                f"{file.directory} is an adapter of another model ({file.base}): it changes {written}, and this model "
                "has no linear layer of that name."
            )
        outputs, inputs = _shape(modules[name]) or (0, 0)
        rank = _of_pattern(file.config.get("rank_pattern"), written, int(file.config["r"]))
        if tuple(a.shape) != (rank, inputs) or tuple(b.shape) != (outputs, rank):
            raise CheckpointError(
                f"{file.directory} is an adapter of another model ({file.base}), or damaged: for {written} it has "
                f"matrices of {list(a.shape)} and {list(b.shape)}, and with rank {rank} this model's take "
                f"{[rank, inputs]} and {[outputs, rank]}."
            )
        alpha = _of_pattern(file.config.get("alpha_pattern"), written, file.config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if file.config.get("use_rslora") else rank)
        layers[name] = _Layer(a.to(device), b.to(device), scale)
    missing = _targets(file.config, modules) - layers.keys()
    if missing:
        raise CheckpointError(
            f"{file.directory} is incomplete: its target_modules name {len(missing)} layers of this model that it has "
            f"no matrices for, the first is {min(missing)}. It was cut short, or made for another model ({file.base})."
        )
    return Adapter(file.name, file.digest, layers)


def _of_pattern(patterns: Any, module: str, otherwise: Any) -> Any:
    """What ``patterns`` say of ``module``: the first that matches its end decides, as in PEFT."""
    found = (value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", module))
    return next(found, otherwise)


def _targets(config: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> set[str]:
    """The layers that ``config`` names one by one; none where it narrows them down in another way."""
    names = config.get("target_modules")
    narrowed = any(config.get(key) for key in ("layers_to_transform", "layers_pattern", "exclude_modules"))
    if not isinstance(names, list) or narrowed:
        return set()
    return {module for module in modules if any(module == name or module.endswith(f".{name}") for name in names)}
