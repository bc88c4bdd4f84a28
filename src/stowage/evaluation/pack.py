"""``stowage pack``: writes a checkpoint with quantized or losslessly packed weights.

Owns the directory: it gets its name when it is complete, was loaded and run, and is good enough. Until then it is
called ``NAME.part``, and its config.json, without which it cannot be loaded, is written last. A part that a killed
process left is removed by the next one that packs there.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stowage.config.memory import Memory
from stowage.core.lossless import is_quick
from stowage.errors import ConfigError, DirectoryError, ModelError, UnsupportedModelError
from stowage.evaluation import runs, sensitivity
from stowage.evaluation.calibration import Fitted
from stowage.models import hub, layout, loading
from stowage.models.directory import has_tokenizer, part_of
from stowage.models.files import check_files
from stowage.models.multimodal import TextPart
from stowage.models.published.checkpoint import dtype_of, meta_model
from stowage.weights.loading import Budget
from stowage.weights.placement import parse_rules
from stowage.weights.quantized.codes import GROUPS, Form
from stowage.weights.quantized.modules import FILE, METHOD, VERSION, Target, marked, targets
from stowage.weights.safetensors_file import check_room, not_taken

_COPIED = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".md")
_NOT_COPIED = ("config.json", "adapter_config.json")
_LOCK = ".packing"
MIXED = "mixed"
"""Each matrix in 4 bits with many or few scales, in 5 or in 8 bits: the most sensitive get the most."""
WEIGHTS = ("int8", "int4", "q4_k", "mxfp4", MIXED)

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Packed:
    """The result of packing. ``tensors``: number of packed tensors by form; ``bits``: per weight of the
    ``packed_weights`` of layers and experts, with scales; ``kept``: number of unchanged tensors.
    """

    directory: str
    weights: str
    group: int
    bytes_before: int
    bytes_after: int
    tensors: dict[str, int]
    packed_weights: int
    kept: int
    bits: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def form_name(weights: str, group: int) -> str:
    """The form of matrices that were not calibrated."""
    return {"int4": f"int4_{group}", "mxfp4": "mxfp4_block", MIXED: "int4_64"}.get(weights, weights)


def pack(
    model: str,
    directory: Path,
    form: str,
    group: int = 32,
    progress: Progress = lambda _what, _done, _all: None,
    fit: Callable[[Path], Fitted] | None = None,
    judge: Callable[[Path], None] = lambda _part: None,
    begin: Callable[[], None] = lambda: None,
    bits: float | None = None,
) -> Packed:
    """Write ``model`` to ``directory``, which is new, with its matrices as ``form`` (int4: in groups of ``group``).
    ``fit``: gives those that are fitted to text, and what form each of them has; its bytes lie in the directory that
    it is given meanwhile. Without it ``mixed`` is int4 in groups of 64. ``begin`` is called before all that takes long,
    when nothing is known against packing, as too few ``bits`` of ``fit`` would be. ``judge`` is given what was written
    before it has its name; nothing of it stays if that raises.

    Raises ConfigError, DirectoryError, CheckpointError, StorageError, UnsupportedModelError, and what ``begin``,
    ``fit`` and ``judge`` raise.
    """
    if form not in WEIGHTS:
        raise ConfigError(f"--weights {form} is unknown; choose one of: {', '.join(WEIGHTS)}.")
    if group not in GROUPS:
        raise ConfigError(f"--group {group} is not possible; choose one of: {', '.join(map(str, GROUPS))}.")
    _refuse_existing(directory)
    source = _checkpoint(model)
    files = check_files(source)
    text = part_of(source)
    layout.refuse_unsupported(text.config)
    _refuse_quantized(source, text.config, files)
    from stowage.weights.quantized import writer

    otherwise = form_name(form, group)
    empty = _on_meta(text, files)
    if empty is not None:
        _refuse_full(directory, empty, otherwise, fits=fit is not None)
        if bits is not None:
            sensitivity.refuse_few(list(targets(empty)), bits)
    begin()
    build = partial(loading.load_model, source, text, "auto", {})
    with _part(directory) as part:
        with contextlib.ExitStack() as done:
            fitted = None if fit is None else fit(part)
            if fitted is not None:
                done.callback(fitted.close)

            def packed(target: Target, values: Tensor) -> tuple[Form, Tensor]:
                if fitted is not None:
                    return fitted.packed(target, values, otherwise)
                plain = target.form(otherwise)
                return plain, target.pack(values, plain)

            written = writer.write(files, build, part / FILE, packed, partial(progress, "packing"))
        with _told(part):
            for path in sorted(source.iterdir()):
                if path.is_file() and _is_copied(path.name):
                    shutil.copyfile(path, part / path.name)
            _write_config(source / "config.json", part / "config.json", form, untied=written.untied)
        progress("checking", 0, 1)
        _prove(part)
        progress("checking", 1, 1)
        judge(part)
        _give_name(part, directory)
    before = sum(path.stat().st_size for path in files)
    bits = 8 * written.packed_bytes / written.weights if written.weights else 0.0  # the output layer alone
    return Packed(
        directory=str(directory),
        weights=form,
        group=group if form == "int4" else 0,
        bytes_before=before,
        bytes_after=written.nbytes,
        tensors=written.packed,
        packed_weights=written.weights,
        kept=written.kept,
        bits=bits,
    )


def pack_lossless(model: str, directory: Path, progress: Progress = lambda _what, _done, _all: None) -> Packed:
    """Write ``model`` to ``directory``, which is new, losslessly packed.

    Raises ConfigError, DirectoryError, CheckpointError, StorageError, UnsupportedModelError.
    """
    _refuse_existing(directory)
    if not is_quick():
        raise ConfigError(
            "--lossless needs the compiled part of Stowage, which was not built here: install a C compiler, "
            "and Stowage again."
        )
    source = _checkpoint(model)
    files = check_files(source)
    config = part_of(source).config
    layout.refuse_unsupported(config)
    _refuse_quantised_by_others(source, config)
    from stowage.weights.lossless import writer

    with _part(directory) as part:
        written = writer.write(files, source, part, partial(progress, "packing"))
        if not written.packed:
            raise UnsupportedModelError(f"{source} has no weights that take fewer bytes packed: run it as it is.")
        with _told(part):
            for path in sorted(source.iterdir()):
                if path.is_file() and (_is_copied(path.name) or path.name.endswith(".index.json")):
                    shutil.copyfile(path, part / path.name)
            shutil.copyfile(source / "config.json", part / "config.json")
        progress("checking", 0, 1)
        _prove(part)
        progress("checking", 1, 1)
        _give_name(part, directory)
    sizes, counts = (written.bytes_before, written.bytes_after), {"lossless": written.packed}
    return Packed(str(directory), "lossless", 0, *sizes, counts, 0, written.kept, 0.0)


def _refuse_existing(directory: Path) -> None:
    if directory.exists() or directory.is_symlink():
        raise ConfigError(f"{directory} exists, and nothing is overwritten: give another directory, or remove it.")


def _on_meta(part: TextPart, files: Sequence[Path]) -> Any | None:
    """The model without its weights; None: its class is not known before it is loaded."""
    try:
        return meta_model(part, getattr(torch, dtype_of(part.config, files, "auto")))
    except UnsupportedModelError:
        return None


def _refuse_full(directory: Path, model: Any, form: str, *, fits: bool) -> None:
    """Raises StorageError where the disk has no room for all matrices of ``model`` in ``form``, and for the others as
    they are. ``fits``: fitted matrices wait on disk, too.
    """
    found = {target.path: target for target in targets(model)}
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    needed = sum(values.nbytes for name, values in model.state_dict().items() if name not in found and name not in tied)
    for target in found.values():
        packed = target.form(form)
        needed += packed.nbytes * max(1, target.experts) * (2 if fits and packed.name != "int8" else 1)
    with _told(directory):
        check_room(directory, needed, "what is written while this is packed")


def _refuse_quantized(source: Path, config: Any, files: Sequence[Path]) -> None:
    from stowage.models.published.checkpoint import refuse_unsaid

    if marked(config):
        raise UnsupportedModelError(f"{source} is packed already: give the checkpoint that it was made from.")
    _refuse_quantised_by_others(source, config)
    refuse_unsaid(source, files)


def _refuse_quantised_by_others(source: Path, config: Any) -> None:
    for part in (config, config.get_text_config()):
        stated = getattr(part, "quantization_config", None)
        if stated is not None and not marked(part):
            method = stated.get("quant_method", "unknown") if isinstance(stated, dict) else type(stated).__name__
            raise UnsupportedModelError(
                f"{source} is quantised already ({str(method)[:40]}), and is computed from as its bytes lie: run it as "
                "it is, or give the original, with weights of 16 or 32 bits."
            )


def _checkpoint(model: str) -> Path:
    source = hub.find(model)
    if source.is_file():
        raise UnsupportedModelError(
            f"{model} is a GGUF file, which is computed from as it lies: run it, or pack the Hugging Face checkpoint "
            "that it was made from."
        )
    return source


def _is_copied(name: str) -> bool:
    plain = name.endswith(_COPIED) and not name.endswith(".index.json") and name not in _NOT_COPIED
    return plain or name.upper().startswith(("LICENSE", "NOTICE"))


def _write_config(source: Path, path: Path, form: str, *, untied: bool) -> None:
    """``untied``: the embedding is not the output layer, whatever ``source`` says."""
    entries = json.loads(source.read_text(encoding="utf-8"))
    for part in (entries, entries.get("text_config") or {}) if untied else ():
        part["tie_word_embeddings"] = False
    entries["quantization_config"] = {"quant_method": METHOD, "version": VERSION, "weights": form}
    with path.open("x", encoding="utf-8") as file:
        json.dump(entries, file, indent=2, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _part(directory: Path) -> Iterator[Path]:
    """Context: ``directory.part``, new and locked, removed at the end unless it was renamed."""
    part = directory.with_name(directory.name + ".part")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        part.mkdir(exist_ok=True)
        if not (part / _LOCK).exists() and any(part.iterdir()):  # what no packing left is somebody's own
            raise DirectoryError(
                f"{part} exists, and pack would write there until {directory} is whole: give another directory, or "
                "remove it."
            )
        lock = os.open(part / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise DirectoryError(f"{part} cannot be made: {error.strerror}. Choose another directory.") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DirectoryError(f"{part} belongs to another process that packs there now: wait for it.") from error
        _clear(part)
        try:
            yield part
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    finally:
        os.close(lock)


def _clear(part: Path) -> None:
    """Remove the files that a killed process left there."""
    try:
        for left in part.iterdir():
            if left.name != _LOCK:
                left.unlink()
    except OSError as error:
        raise DirectoryError(f"{part} cannot be emptied: {error.strerror} ({error.filename}). Remove it.") from error


@contextlib.contextmanager
def _told(part: Path) -> Iterator[None]:
    """Raises StorageError for what cannot be copied there, as of packed weights."""
    try:
        yield
    except OSError as error:
        raise not_taken(part, error, "the packed checkpoint") from error


def _give_name(part: Path, directory: Path) -> None:
    """``part`` is whole, and called ``directory`` from now on. Raises DirectoryError where that has been made since, or
    cannot be made.
    """
    try:
        (part / _LOCK).unlink()
        os.rename(part, directory)
    except OSError as error:
        raise DirectoryError(
            f"{directory} cannot be written: {error.strerror}, and nothing is overwritten. Remove it, or give another "
            "directory."
        ) from error


def _prove(part: Path) -> None:
    """Load the new checkpoint with all weights streamed, and compute a token with it."""
    try:
        loaded = loading.load(part, budget=lambda _config: Budget(rules=parse_rules("*=stream")))
    except ModelError as error:
        raise UnsupportedModelError(f"this model cannot be run packed: {error}") from error
    assert loaded.weights is not None
    loaded.weights.close()


def without_tiers(memory: Memory) -> Memory:
    """The budgets of ``memory`` for weights, and no tier for keys and values."""
    budgets = {name: getattr(memory, name) for name in ("device_memory", "host_memory", "weights")}
    return replace(runs.plain(memory), **budgets)


def reads_text(model: str) -> bool:
    """Whether ``model`` has a tokenizer, without which no text can be scored. Raises CheckpointError and
    UnsupportedModelError.
    """
    return has_tokenizer(_checkpoint(model))
