"""Writes a checkpoint's shards again with their tensors packed without loss, one tensor at a time.

A shard keeps its name, its tensors theirs; what does not pay lies as it is. Packed tensors come first, in multiples of
64 bytes, so that the others stay aligned.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stowage.core import lossless
from stowage.core.geometry import ALIGNMENT_BYTES, round_up
from stowage.errors import CheckpointError, UnsupportedModelError
from stowage.weights.file import File, safetensors_header
from stowage.weights.lossless.packed_tensor import FRAME_BYTES, ITEM_BYTES, METADATA
from stowage.weights.safetensors_file import SafetensorsFile, check_room, not_taken

_LEAST_BYTES: Final = 64 << 10
"""Smaller tensors, norms and biases, stay as they are."""
_THREADS: Final = 4
_FRAMES_AT_ONCE: Final = 64
_SAMPLES: Final = 4
"""Frames of each tensor that are packed before anything is written: is there room?"""


@dataclass(slots=True)
class Written:
    """What was written: ``packed`` and ``kept`` tensors, and the files' bytes before and after."""

    packed: int = 0
    kept: int = 0
    bytes_before: int = 0
    bytes_after: int = 0


def write(files: Sequence[Path], source: Path, directory: Path, progress: Callable[[int, int], None]) -> Written:
    """Each of ``files``, below ``source``, to the same path below ``directory``, where none of them is. ``progress``
    is told how many tensors are done, of how many. Raises CheckpointError, StorageError, and UnsupportedModelError for
    what is packed already.
    """
    written = Written()
    headers = [_header(path) for path in files]
    count = sum(len(header) - ("__metadata__" in header) for header, _ in headers)
    try:
        least = sum(_sampled_bytes(path, *header) for path, header in zip(files, headers, strict=True))
        check_room(directory, least * 31 // 32, "what is written while this is packed")
    except OSError as error:
        raise not_taken(directory, error) from error
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "stowage-pack") as pool:
        for path, (header, data_at) in zip(files, headers, strict=True):
            try:
                into = directory / path.relative_to(source)
                into.parent.mkdir(parents=True, exist_ok=True)
                _Shard(path, into, data_at, header, pool, written).write(
                    lambda: progress(written.packed + written.kept, count)
                )
            except OSError as error:
                raise not_taken(directory, error) from error
    return written


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The header, and where the tensors begin; the file was found whole."""
    with path.open("rb") as file:
        header, data_at = safetensors_header(file.fileno())
    if METADATA in (header.get("__metadata__") or {}):
        raise UnsupportedModelError(f"{path} is packed already: give the checkpoint that it was made from.")
    return header, data_at


def _sampled_bytes(path: Path, header: dict[str, Any], data_at: int) -> int:
    """What the tensors of a shard take packed, by samples: within 1 % most often."""
    file, found = File.open(path), 0
    try:
        for entry in (entry for name, entry in header.items() if name != "__metadata__"):
            length, begin = _length(entry), data_at + entry["data_offsets"][0]
            if not _is_large(entry):
                found += length
                continue
            frames = range(0, length, FRAME_BYTES)
            some = frames[:: -(-len(frames) // _SAMPLES)]
            raw = [memoryview(_read(file, begin + at, min(FRAME_BYTES, length - at))) for at in some]
            found += length * sum(_packed(one).nbytes for one in raw) // sum(one.nbytes for one in raw)
    finally:
        file.close()
    return found


class _Shard:
    def __init__(
        self, source: Path, path: Path, data_at: int, header: dict[str, Any], pool: ThreadPoolExecutor, written: Written
    ) -> None:
        self._source, self._path = source, path
        self._source_at = data_at
        self._metadata = dict(header.get("__metadata__") or {})
        self._tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        self._pool, self._written = pool, written
        self._packed: dict[str, dict[str, Any]] = {}
        frames = sum(-(-_length(entry) // FRAME_BYTES) for entry in self._tensors.values())
        room = len(json.dumps(header)) * 4 + 512 + frames * 12
        self._data_at = round_up(8 + room)

    def write(self, done: Callable[[], None]) -> None:
        file = File.open(self._source)
        into = SafetensorsFile(self._path, self._data_at)
        try:
            kept = []
            for name, entry in sorted(self._tensors.items(), key=lambda each: each[1]["data_offsets"]):
                if _is_large(entry) and self._pack(file, into, name, entry):
                    self._written.packed += 1
                    done()
                else:
                    kept.append((name, entry))
            for name, entry in sorted(kept, key=lambda each: _length(each[1]) % ALIGNMENT_BYTES > 0):
                self._keep(file, into, name, entry)
                self._written.kept += 1
                done()
            into.finish({**self._metadata, METADATA: json.dumps(self._packed, separators=(",", ":"))})
            self._written.bytes_before += file.length
            self._written.bytes_after += into.data_at + into.nbytes
        finally:
            into.close()
            file.close()

    def _pack(self, file: File, into: SafetensorsFile, name: str, entry: dict[str, Any]) -> bool:
        """Whether that paid."""
        length, begin = _length(entry), self._source_at + entry["data_offsets"][0]
        lengths: list[int] = []
        end = into.nbytes
        step = _FRAMES_AT_ONCE * FRAME_BYTES
        for at in range(0, length, step):
            raw = memoryview(_read(file, begin + at, min(step, length - at)))
            frames = [raw[part : part + FRAME_BYTES] for part in range(0, len(raw), FRAME_BYTES)]
            for packed in self._pool.map(_packed, frames):
                into.write(packed, end)
                lengths.append(len(packed))
                end += len(packed)
        padded_bytes = round_up(end - into.nbytes, ALIGNMENT_BYTES)
        if padded_bytes > lossless.worth_bytes(length):
            return False  # the next tensor overwrites it
        into.write(bytes(into.nbytes + padded_bytes - end), end)
        into.add(name, "U8", [padded_bytes], padded_bytes)
        self._packed[name] = {
            "dtype": entry["dtype"],
            "shape": entry["shape"],
            "phase": begin % ALIGNMENT_BYTES,
            "frames": lengths,
        }
        return True

    def _keep(self, file: File, into: SafetensorsFile, name: str, entry: dict[str, Any]) -> None:
        length, begin = _length(entry), self._source_at + entry["data_offsets"][0]
        for at in range(0, length, FRAME_BYTES * _FRAMES_AT_ONCE):
            raw = _read(file, begin + at, min(FRAME_BYTES * _FRAMES_AT_ONCE, length - at))
            into.write(raw, into.nbytes + at)
        into.add(name, entry["dtype"], entry["shape"], length)


def _is_large(entry: dict[str, Any]) -> bool:
    return entry["dtype"] in ITEM_BYTES and _length(entry) >= _LEAST_BYTES


def _length(entry: dict[str, Any]) -> int:
    begin, end = entry["data_offsets"]
    return int(end) - int(begin)


def _packed(frame: memoryview) -> memoryview:
    """In fewer bytes, or as it is."""
    room = memoryview(bytearray(frame.nbytes))
    length = lossless.pack(frame, room[: frame.nbytes - 1])
    return room[:length] if length else frame


def _read(file: File, offset: int, length: int) -> bytes:
    raw = bytearray()
    while len(raw) < length:
        part = file.pread(length - len(raw), offset + len(raw))
        if not part:
            raise CheckpointError(f"{file.path} ends too early; download the checkpoint again.")
        raw += part
    return bytes(raw)
