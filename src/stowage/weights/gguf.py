"""Parses GGUF files: the metadata of a model, and the location of each tensor, all checked.

A header may be hostile or truncated: no count is believed before the bytes for it are found, and every tensor must lie
inside the file and overlap no other. Reads no tensor. Format: https://github.com/ggml-org/ggml, ``docs/gguf`` (versions
2 and 3, little-endian).
"""

from __future__ import annotations

import itertools
import mmap
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np

from stowage.core.geometry import round_up
from stowage.errors import CheckpointError

MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_HEADER_BYTES_MAX: Final = 512 << 20
"""Limit of metadata and tensor descriptions. The largest vocabularies take some 20 MiB."""
_FIELDS_MAX, _TENSORS_MAX, _ITEMS_MAX, _NAME_BYTES_MAX, _DIMENSIONS_MAX = 1 << 16, 1 << 20, 1 << 22, 1 << 16, 4
_ALIGNMENT_MAX: Final = 1 << 20
_SPLIT: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class Type:
    """A tensor type: blocks of ``weights`` consecutive weights of a row in ``nbytes`` bytes."""

    name: str
    weights: int
    nbytes: int


TYPES: Final[Mapping[int, Type]] = {
    number: Type(*what)
    for number, what in {
        0: ("F32", 1, 4),
        1: ("F16", 1, 2),
        2: ("Q4_0", 32, 18),
        3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24),
        8: ("Q8_0", 32, 34),
        9: ("Q8_1", 32, 40),
        10: ("Q2_K", 256, 84),
        11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144),
        13: ("Q5_K", 256, 176),
        14: ("Q6_K", 256, 210),
        15: ("Q8_K", 256, 292),
        16: ("IQ2_XXS", 256, 66),
        17: ("IQ2_XS", 256, 74),
        18: ("IQ3_XXS", 256, 98),
        19: ("IQ1_S", 256, 50),
        20: ("IQ4_NL", 32, 18),
        21: ("IQ3_S", 256, 110),
        22: ("IQ2_S", 256, 82),
        23: ("IQ4_XS", 256, 136),
        24: ("I8", 1, 1),
        25: ("I16", 1, 2),
        26: ("I32", 1, 4),
        27: ("I64", 1, 8),
        28: ("F64", 1, 8),
        29: ("IQ1_M", 256, 56),
        30: ("BF16", 1, 2),
        34: ("TQ1_0", 256, 54),
        35: ("TQ2_0", 256, 66),
        39: ("MXFP4", 32, 17),
        40: ("NVFP4", 64, 36),
        41: ("Q1_0", 128, 18),
    }.items()
}
"""By ``ggml_type`` number; sizes as ``ggml_type_size`` in https://github.com/ggml-org/ggml."""
_REPACKED: Final = {
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
"""Types repacked for some processors, which ggml has removed: programs now repack the plain type themselves."""
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in a GGUF file: ``nbytes`` of ``path`` from ``offset`` on. ``shape``: contiguous dimension last, as in
    torch (a GGUF file lists the dimensions in reverse).
    """

    name: str
    type: Type
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A parsed GGUF file, or several of one model. ``fields``: the first one's, by key; ``tensors``: all, by name."""

    paths: tuple[Path, ...]
    fields: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.fields.get("general.architecture", ""))


def splits_of(path: Path) -> list[Path]:
    """All files of the model of ``path``, in order: itself, or the splits that its name counts; of a link without the
    others beside it, those beside what it leads to. Raises CheckpointError when one is missing.
    """
    paths = _counted(path)
    if path.is_symlink() and (len(paths) == 1 or not all(one.is_file() for one in paths)):
        others = _counted(path.resolve())
        paths = others if len(others) > 1 else paths
    missing = next((one for one in paths if not one.is_file()), None) if len(paths) != 1 else None
    if missing is not None or not paths:
        raise CheckpointError(
            f"{missing or path} is missing: the model is in {len(paths)} files, and all of them must lie in one "
            "directory. Download it again."
        )
    return paths


def _counted(path: Path) -> list[Path]:
    """``path``, or the files that its name counts, there or not."""
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    return [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in range(1, int(match[3]) + 1)]


def read(path: Path) -> GgufFile:
    """The model of ``path``. Raises CheckpointError for a damaged file, or an unknown tensor type."""
    paths = splits_of(path)
    parts = [_read(one) for one in paths]
    fields, tensors = parts[0][0], dict[str, GgufTensor]()
    for number, (one, (own, found)) in enumerate(zip(paths, parts, strict=True)):
        stated = own.get("split.no", 0), own.get("split.count", 1) or 1
        if stated != (number, len(paths)):
            raise CheckpointError(
                f"{one} says that it is file {stated[0]} of {stated[1]} (from 0 on), and its name says {number} of "
                f"{len(paths)}: give it the name back under which it was published."
            )
        for tensor in found:
            if tensor.name in tensors:
                raise _damaged(one, f"{tensor.name} is there twice")
            tensors[tensor.name] = tensor
    if fields.get("split.tensors.count", len(tensors)) != len(tensors):
        raise _damaged(paths[0], f"it has {len(tensors)} tensors, and says {fields['split.tensors.count']}")
    return GgufFile(tuple(paths), fields, tensors)


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is no whole GGUF file ({why}); download it again.")


def _read(path: Path) -> tuple[dict[str, Any], list[GgufTensor]]:
    try:
        if not path.stat().st_size:
            raise ValueError("it is empty")
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        return _Reader(memoryview(mapped), path).read()  # the mapping goes with its last view
    except (OSError, ValueError, OverflowError, struct.error) as error:
        raise _damaged(path, str(error)) from error


class _Reader:
    """Parses a file's header. Raises ValueError, saying why, if damaged; CheckpointError for an unknown type."""

    def __init__(self, view: memoryview, path: Path) -> None:
        self._view, self._path, self._at = view, path, 0
        self._end = min(len(view), _HEADER_BYTES_MAX)

    def read(self) -> tuple[dict[str, Any], list[GgufTensor]]:
        if bytes(self._view[:4]) != MAGIC:
            raise ValueError("it does not begin as one")
        self._at = 4
        version = self._number("I")
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{self._path} is a GGUF file of version {version}; those that are read are 2 and 3, little-endian. "
                "Give a newer file of the model, or the Hugging Face checkpoint that it was made from."
            )
        tensors, count = self._number("Q"), self._number("Q")
        if tensors > min(_TENSORS_MAX, self._end // 24) or count > min(_FIELDS_MAX, self._end // 13):
            raise ValueError(f"{len(self._view):,} bytes hold no {tensors} tensors and {count} fields")
        fields = dict[str, Any]()
        for _ in range(count):
            name = self._string(_NAME_BYTES_MAX)
            if name in fields:
                raise ValueError(f"{name[:80]!r} is there twice")
            fields[name] = self._value(self._number("I"))
        return fields, self._tensors(tensors, fields)

    def _tensors(self, count: int, fields: Mapping[str, Any]) -> list[GgufTensor]:
        alignment = fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= _ALIGNMENT_MAX or alignment & (alignment - 1):
            raise ValueError(f"an alignment of {alignment!r}")
        said = [self._description() for _ in range(count)]
        begin = round_up(self._at, alignment)
        tensors, names = list[GgufTensor](), set[str]()
        for name, kind, shape, offset in said:
            if name in names:
                raise ValueError(f"{name[:80]!r} is there twice")
            names.add(name)
            nbytes = prod(shape) // kind.weights * kind.nbytes
            if offset % alignment:
                raise ValueError(f"{name[:80]} begins at byte {offset}, which is no multiple of {alignment}")
            tensors.append(GgufTensor(name, kind, shape, self._path, begin + offset, nbytes))
        end = max((tensor.offset + tensor.nbytes for tensor in tensors), default=0)
        if end > len(self._view):
            short = f"it has {len(self._view):,} bytes of {end:,}"
            raise ValueError(f"{short}: {next(t.name for t in tensors if t.offset + t.nbytes == end)[:80]} ends there")
        _refuse_overlaps(tensors)
        return tensors

    def _description(self) -> tuple[str, Type, tuple[int, ...], int]:
        name, count = self._string(_NAME_BYTES_MAX), self._number("I")
        if not 1 <= count <= _DIMENSIONS_MAX:
            raise ValueError(f"{name[:80]} has {count} dimensions")
        shape = tuple(self._number("Q") for _ in range(count))[::-1]
        number, offset = self._number("I"), self._number("Q")
        kind = TYPES.get(number)
        if kind is None:
            called = _REPACKED.get(number)
            raise CheckpointError(
                f"{self._path} has {name[:80]} in {called or f'the unknown type {number}'}, which is not computed with "
                f"here. Give a file of the model in {called[:-4] if called else 'another type, such as Q4_K_M'}."
            )
        if min(shape) < 1 or prod(shape) >= 1 << 62 or shape[-1] % kind.weights:
            raise ValueError(f"{name[:80]} has the shape {shape}")
        return name, kind, shape, offset

    def _number(self, form: str) -> int:
        (value,) = struct.unpack("<" + form, self._bytes(struct.calcsize("<" + form)))
        return int(value)

    def _bytes(self, count: int) -> memoryview:
        if count > self._end - self._at:
            raise ValueError(f"it ends in its header: it has {len(self._view):,} bytes")
        self._at += count
        return self._view[self._at - count : self._at]

    def _string(self, most: int) -> str:
        length = self._number("Q")
        if length > most:
            raise ValueError(f"a name of {length} bytes")
        return str(self._bytes(length), "utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string(self._end)
        if kind == _ARRAY:
            kind, count = self._number("I"), self._number("Q")
            if count > _ITEMS_MAX:
                raise ValueError(f"a list of {count} values")
            if kind == _STRING:
                self._room(8 * count)
                return [self._string(self._end) for _ in range(count)]
            if kind not in _SCALARS:
                raise ValueError(f"a list of the type {kind}")
            dtype = np.dtype("?" if _SCALARS[kind] == "?" else "<" + _SCALARS[kind])
            values = np.frombuffer(self._bytes(count * dtype.itemsize), dtype)
            return [_plain(value) for value in values] if dtype == "<f4" else values.tolist()
        if kind not in _SCALARS:
            raise ValueError(f"a value of the type {kind}")
        (value,) = struct.unpack("<" + _SCALARS[kind], self._bytes(struct.calcsize("<" + _SCALARS[kind])))
        return _plain(np.float32(value)) if _SCALARS[kind] == "f" else value

    def _room(self, count: int) -> None:
        if count > self._end - self._at:
            raise ValueError(f"it ends in its header: it has {len(self._view):,} bytes")


def _plain(value: np.float32) -> float:
    """The shortest decimal of this float32: 1e-5, as a config has it, and not 9.99999975e-06."""
    return float(str(value))


def _refuse_overlaps(tensors: Sequence[GgufTensor]) -> None:
    for one, other in itertools.pairwise(sorted(tensors, key=lambda tensor: tensor.offset)):
        if one.offset + one.nbytes > other.offset:
            raise ValueError(f"{one.name[:80]} and {other.name[:80]} share bytes")
