"""Writes a model with offloaded weights as Transformers' ``save_pretrained`` would, one tensor in memory at a time.

Everything is written to a temporary directory inside the target, and renamed when all of it is on disk. So the
directory that the model runs from may be the target: processes that have its files open keep them, and until the last
byte is written nothing is replaced. A failure leaves the old checkpoint, or the new one. What a killed process left
there is removed by the next one that saves to the same directory.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from stowage.config.memory import parse_size
from stowage.core.geometry import round_up
from stowage.errors import ConfigError, UnsupportedModelError
from stowage.weights.quantized.modules import is_packed
from stowage.weights.safetensors_file import SafetensorsFile, check_room, not_taken
from stowage.weights.scratch_directory import scratch_directory

Read = Callable[[str], Tensor]
"""Returns a copy of a parameter or buffer in host memory, given its name."""

_SCRATCH: Final = ".saving-????????"
"""As mkdtemp names them: what else begins so is somebody's own."""
_LOCKED_WITHIN_S: Final = 60.0
"""A directory is locked by who made it within this time; more than it takes."""
_SHARD_BYTES: Final = "50GB"
_HEADER_BYTES_MAX: Final = 64 << 20
_ENTRY_BYTES: Final = 160
_TAKEN: Final = ("is_main_process", "variant", "token", "save_peft_format", "safe_serialization")


def save(model: Any, read: Read, plain: Callable[..., None], directory: str | os.PathLike[str], **options: Any) -> None:
    """``save_pretrained(directory, max_shard_size=, variant=, save_original_format=)`` of ``model``; ``plain`` is
    Transformers' own. Raises ConfigError, UnsupportedModelError and StorageError, and then nothing in it has changed.
    """
    shard_bytes = parse_size(options.pop("max_shard_size", _SHARD_BYTES))
    original = bool(options.pop("save_original_format", True))
    _refuse(model, options)
    options.pop("state_dict", None)  # Trainer passes None
    target = Path(directory)
    variant = options.get("variant")
    if options.get("is_main_process", True) is False:
        return
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target} is a file, and a model is saved into a directory: give another name.")
    try:
        target.mkdir(parents=True, exist_ok=True)
        with scratch_directory(target, _SCRATCH, _LOCKED_WITHIN_S) as aside:
            plain(aside, state_dict={}, **options)
            for file in aside.glob("*.safetensors*"):
                file.unlink()
            kept = names(model)
            check_room(target, sum(form.nbytes for form in kept.values()), "the model")
            writer = _Writer(aside, shard_bytes, _header_bytes(kept), variant)
            writer.write(_converted(model, read, original, kept))
            _name(aside, target, variant)
    except OSError as error:
        raise not_taken(target, error, "the model", "What was there before is still there.") from error


def _refuse(model: Any, options: Mapping[str, Any]) -> None:
    if is_packed(model):
        raise UnsupportedModelError(
            "packed and quantised weights are not saved again: copy what the model was loaded from."
        )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise UnsupportedModelError(
            "a model with an adapter and offloaded weights cannot be saved: load it without a budget."
        )
    if options.get("state_dict") is not None or options.get("push_to_hub"):
        raise UnsupportedModelError(
            "save_pretrained() of a model with offloaded weights takes no state_dict and pushes to no hub: save it "
            "to a directory, and go on from there."
        )
    unknown = [name for name in options if name not in (*_TAKEN, "state_dict", "push_to_hub")]
    if unknown:
        raise ConfigError(
            f"save_pretrained() of a model with offloaded weights does not know {', '.join(unknown)}: leave it out."
        )


def _header_bytes(kept: Mapping[str, Tensor]) -> int:
    """Bytes reserved for the header of each shard. Stacked experts become one or two tensors per expert. Tensors whose
    entries do not fit into the header begin another shard.
    """
    each = [(_ENTRY_BYTES + 6 * len(name) + 100) * (2 * len(f) if f.dim() > 2 else 1) for name, f in kept.items()]
    return min(round_up(sum(each) + 256), _HEADER_BYTES_MAX)


def _converted(model: Any, read: Read, original: bool, kept: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the checkpoint. Where it joins several parameters, those of a layer are read together."""
    from transformers.core_model_loading import WeightConverter, revert_weight_conversion

    conversions = [c.reverse_transform() for c in getattr(model, "_weight_conversions", None) or []]
    joined = any(isinstance(c, WeightConverter) and len(c.source_patterns) > 1 for c in conversions)
    groups: dict[str, list[str]] = {}
    for name in kept:
        layer = re.match(r".*?\.\d+\.", name) if joined and original else None
        groups.setdefault(layer[0] if layer else name, []).append(name)
    for group in groups.values():
        values = {name: read(name) for name in group}
        yield from (revert_weight_conversion(model, values) if original else values).items()


def names(model: Any) -> dict[str, Tensor]:
    """The tensors of a checkpoint, on the meta device: each parameter once, and persistent buffers."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for own, value in module._parameters.items():
            if value is not None:
                found[prefix + own] = torch.empty(value.shape, dtype=value.dtype, device="meta")
        for own, value in module._buffers.items():
            if value is not None and own not in module._non_persistent_buffers_set:
                found[prefix + own] = torch.empty(value.shape, dtype=value.dtype, device="meta")
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        found.pop(name, None)
    own = dict(model.named_parameters(remove_duplicate=False))
    for name, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if name in found and source in found and own[name] is own[source]:  # packed parameters have other names
            del found[name]
    kept: dict[str, Tensor] = remove_tied_weights_from_state_dict(found, model)
    return kept


class _Shard(SafetensorsFile):
    """A file of a checkpoint, which takes tensors up to a size."""

    def __init__(self, path: Path, header_bytes: int) -> None:
        super().__init__(path, header_bytes)
        self._used_bytes = 128

    def takes(self, name: str, values: Tensor, most_bytes: int) -> bool:
        """Whether the tensor fits, and its offset is a multiple of its element size."""
        full = self.entries and self.nbytes + values.nbytes > most_bytes
        wide = self._used_bytes + _ENTRY_BYTES + 6 * len(name) > self.data_at
        return not full and not wide and self.nbytes % values.dtype.itemsize == 0

    def append(self, name: str, values: Tensor) -> None:
        super().append(name, values)
        self._used_bytes += _ENTRY_BYTES + 6 * len(name)


class _Writer:
    """All shards of a checkpoint in ``directory``, and their index if there are several."""

    def __init__(self, directory: Path, shard_bytes: int, header_bytes: int, variant: str | None) -> None:
        self._directory, self._shard_bytes, self._header_bytes = directory, shard_bytes, header_bytes
        self._end = f".{variant}.safetensors" if variant else ".safetensors"
        self._done: list[dict[str, Any]] = []

    def write(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        total = numbers = 0
        shard: _Shard | None = None
        try:
            for name, values in tensors:
                if shard is None or not shard.takes(name, values, self._shard_bytes):
                    self._finish(shard)
                    shard = _Shard(self._directory / f"{len(self._done)}.part", self._header_bytes)
                shard.append(name, values)
                total, numbers = total + values.nbytes, numbers + values.numel()
            self._finish(shard)
        finally:
            if shard is not None:
                shard.close()
        count, weight_map = len(self._done), dict[str, str]()
        for at, entries in enumerate(self._done):
            name = f"model{self._end}" if count == 1 else f"model-{at + 1:05}-of-{count:05}{self._end}"
            (self._directory / f"{at}.part").rename(self._directory / name)
            weight_map.update(dict.fromkeys(entries, name))
        if count > 1:
            index = {"metadata": {"total_parameters": numbers, "total_size": total}, "weight_map": weight_map}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (self._directory / _index(self._end)).write_text(text, encoding="utf-8")

    def _finish(self, shard: _Shard | None) -> None:
        if shard is not None:
            shard.finish({"format": "pt"})
            self._done.append(shard.entries)
            shard.close()


def _index(end: str) -> str:
    return f"model.safetensors.index{end.removesuffix('.safetensors')}.json"


def _name(aside: Path, target: Path, variant: str | None) -> None:
    """Rename what was written into ``target``: the index after the shards that it names. Files of an earlier checkpoint
    that this one did not replace are deleted last.
    """
    end = f".{variant}.safetensors" if variant else ".safetensors"
    written = sorted(path.name for path in aside.iterdir())
    for name in sorted(written, key=lambda name: (name.endswith(".json"), "index" in name)):
        with (aside / name).open("rb") as file:
            os.fsync(file.fileno())
        (aside / name).replace(target / name)
    weights = re.compile(rf"model(-\d{{5}}-of-\d{{5}})?{re.escape(end)}|{re.escape(_index(end))}")
    for path in list(target.iterdir()):
        if weights.fullmatch(path.name) and path.name not in written:
            path.unlink()
    directory = os.open(target, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
