"""Shows Transformers a checkpoint whose tensors lie packed without loss as if they did not, while it loads it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stowage.core.geometry import ALIGNMENT_BYTES
from stowage.weights.checkpoint import DTYPES, Checkpoint, Segment
from stowage.weights.lossless.packed_tensor import ITEM_BYTES, PackedTensor
from stowage.weights.parameter_location import memory_of

_one_at_a_time = threading.RLock()
"""What is shown goes through a name of Transformers' own, which all threads have."""


@contextlib.contextmanager
def readable(files: Sequence[Path]) -> Iterator[None]:
    """Within it, what Transformers opens of ``files`` has its tensors unpacked, each when it is asked for. Nothing is
    done where none is packed. Raises CheckpointError for a damaged file.
    """
    checkpoint = Checkpoint(files)
    try:
        packed = {n: s for n, s in checkpoint.tensors.items() if isinstance(s.file, PackedTensor)}
        if not packed:
            yield
            return
        from transformers import modeling_utils

        with _one_at_a_time:
            plain = modeling_utils.safe_open
            modeling_utils.safe_open = lambda path, *args, **options: _Opened(
                plain(path, *args, **options), path, packed
            )
            try:
                yield
            finally:
                modeling_utils.safe_open = plain
    finally:
        checkpoint.close()


class _Opened:
    """As ``safetensors.safe_open``, as far as Transformers uses it."""

    def __init__(self, file: Any, path: str | Path, packed: dict[str, Segment]) -> None:
        self._file = file
        home = Path(path).resolve()
        self._packed = {name: segment for name, segment in packed.items() if segment.file.path.resolve() == home}

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def metadata(self) -> Any:
        return self._file.metadata()

    def get_slice(self, name: str) -> Any:
        segment = self._packed.get(name)
        return self._file.get_slice(name) if segment is None else _Lazy(segment)

    def get_tensor(self, name: str) -> Tensor:
        segment = self._packed.get(name)
        tensor: Tensor = self._file.get_tensor(name) if segment is None else _Lazy(segment)[...]
        return tensor

    def __enter__(self) -> _Opened:
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)


class _Lazy:
    """One tensor, unpacked when it is asked for."""

    def __init__(self, segment: Segment) -> None:
        assert isinstance(segment.file, PackedTensor)
        self._tensor = segment.file

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return self._tensor.dtype

    def __getitem__(self, part: Any) -> Tensor:
        length = self._tensor.length
        memory = torch.empty(length + ALIGNMENT_BYTES, dtype=torch.uint8)
        begin = (self._tensor.phase - memory.data_ptr()) % ALIGNMENT_BYTES
        begin = begin if begin % ITEM_BYTES[self._tensor.dtype] == 0 else 0
        raw = memory[begin : begin + length]
        self._tensor.fill_all(memory_of(raw))
        return raw.view(DTYPES[self._tensor.dtype]).view(self._tensor.shape)[part]
