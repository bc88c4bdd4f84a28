"""The identity of weights: a digest of their content, so that two models never share a key and copies of one model
always do.

The design's cheaper identity (config, tensor headers and sizes) cannot tell a fine-tuned checkpoint from its base: same
names, same shapes, same sizes. Reading the bytes costs little beside loading them (BLAKE3 hashes several GB/s per
core), and the digest of a file that has not changed is remembered by size, inode and times. A file that was written a
moment ago is not remembered: within one tick of the file system's clock it could change again and look the same.
"""

from __future__ import annotations

import functools
import mmap
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from blake3 import blake3

from stowage.errors import CheckpointError
from stowage.models.state_directory import Remembered, default_state_directory
from stowage.weights.gguf import splits_of

_ANSWERED_FROM = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.json", "*.py")
_WITHOUT_TENSORS = (".json", ".py")
_LEFT_OUT = ("tokenizer*.json", "generation_config.json", "special_tokens_map.json", "*.index.json")
_HEX = 64
_PIECE_BYTES = 64 << 20
_SETTLED_S = 2.0
"""How long a file must have been left alone before its times are trusted to tell whether it changes."""


def files_in(directory: Path) -> list[Path]:
    """What the answers of a model or adapter in ``directory`` depend on, in whatever format others read it, and what it
    is called does not. Of a file that is a model: all over which it is split, and those for pictures that others find
    beside it. An engine that loads the files itself knows which of them it reads. Raises CheckpointError where some of
    a split model are missing.
    """
    if directory.is_file():
        splits = splits_of(directory)
        return sorted({*splits, *splits[0].parent.glob("*mmproj*.gguf")})
    left_out = {path for pattern in _LEFT_OUT for path in directory.glob(pattern)}
    found = {path for pattern in _ANSWERED_FROM for path in directory.glob(pattern) if path.is_file()}
    return sorted(found - left_out)


def have_tensors(files: Iterable[Path]) -> bool:
    """Whether weights are among ``files``, and not configs and code alone."""
    return any(path.suffix not in _WITHOUT_TENSORS for path in files)


def of_path(path: Path) -> str | None:
    """Hex digest of a directory's weights, or of a file and those it is split over, or None. Raises as `files_in`."""
    files = files_in(path)
    return of_checkpoint(files[0].parent, files) if have_tensors(files) else None


def of_checkpoint(directory: Path, files: Iterable[Path], state_directory: Path | None = None) -> str:
    """Hex digest over the names and contents of ``files``, which lie in ``directory``."""
    known = Remembered((state_directory or default_state_directory()) / "identities.json")
    whole = blake3()
    for path in sorted(files):
        whole.update(path.relative_to(directory).as_posix().encode() + b"\0")
        whole.update(bytes.fromhex(_digest_of(known, path)))
    known.save()
    return whole.hexdigest()


def of_parameters(model: Any) -> str:
    """Hex digest over the config of a model in memory, the settings and the code of its modules, and the names, shapes,
    types and values of its parameters and buffers: the ones too that no checkpoint has, such as rope frequencies.
    """
    import torch

    from stowage.weights.fingerprint import config_bytes
    from stowage.weights.module_code import settings

    source = getattr(model, "stowage", None)
    if source is not None:  # some of its parameters are offloaded
        return with_code(source.identity_of_now(), model, source.hooks)
    whole = blake3(max_threads=_threads())
    whole.update(config_bytes(model) + settings(model))
    for name, tensor in sorted({**dict(model.named_buffers()), **model.state_dict()}.items()):
        whole.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}".encode())
        raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        whole.update(memoryview(raw.numpy()))
    return with_code(whole.hexdigest(), model)


def with_code(identity: str, model: Any, own_hooks: frozenset[int] = frozenset()) -> str:
    """The ``identity`` of ``model``, or another one where code of others is in it (`code_of_others`)."""
    from stowage.weights.module_code import code_of_others

    code = code_of_others(model, own_hooks)
    return blake3(bytes.fromhex(identity) + code).hexdigest() if code else identity


def _threads() -> int:
    """All that BLAKE3 has, but one in a process that was forked from one that has used them: it waits for ever for
    threads that only its parent has.
    """
    return int(blake3.AUTO) if _used_threads_first() == os.getpid() else 1


@functools.cache
def _used_threads_first() -> int:
    return os.getpid()


def _digest(path: Path) -> str:
    """BLAKE3 of a file, a piece at a time: a file that is mapped whole would count as memory of this process."""
    whole = blake3(max_threads=_threads())
    with path.open("rb") as file:
        length = os.fstat(file.fileno()).st_size
        if length:
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as view:
                for at in range(0, length, _PIECE_BYTES):
                    with view[at : at + _PIECE_BYTES] as piece:
                        whole.update(piece)
                    mapped.madvise(mmap.MADV_DONTNEED, at, min(_PIECE_BYTES, length - at))
    return whole.hexdigest()


class FileMarks:
    """Notices whether files change while they are read: keeps the marks of ``paths`` as they are before anything is
    read of them. A name and weights that were read one after the other are of the same files if these are the same
    afterwards.
    """

    def __init__(self, paths: Iterable[Path] = ()) -> None:
        self._marks = {path: _place_and_content(path) for path in paths}

    def check(self) -> None:
        """Raises CheckpointError when one of them has been written to or replaced since."""
        for path, mark in self._marks.items():
            if not path.exists() or _place_and_content(path) != mark:
                raise CheckpointError(
                    f"{path} was changed or replaced while it was being loaded, so what was read may be of two models. "
                    "Start again when nothing writes there, such as a download."
                )


def _place_and_content(path: Path) -> tuple[int, ...]:
    """Without the change time, unlike ``mark_of``: a new link to a file, or its owner's, is no other content."""
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def mark_of(stat: os.stat_result) -> str:
    """What changes whenever a file does: device, inode, size, modification and change time."""
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


def _digest_of(known: Remembered, path: Path) -> str:
    stat = path.stat()
    key = mark_of(stat)
    if len(known.get(key, "")) == _HEX:
        return known[key]
    settled = time.time() - max(stat.st_mtime, stat.st_ctime) >= _SETTLED_S
    digest = _digest(path)
    if settled and mark_of(path.stat()) == key:
        known[key] = digest
    return digest
