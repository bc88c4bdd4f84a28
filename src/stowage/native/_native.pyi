"""What the C sources of this room offer; their wrappers (see `native/__init__.py`) say what it means."""

from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stowage.core.geometry import IntArray

def best_rates(hazard: NDArray[np.float64], rates: NDArray[np.float64], /) -> None: ...

class Kernel:
    def __init__(self, arrays: tuple[NDArray[Any], ...], slots: int, rows: int, width: int) -> None: ...
    @property
    def clock(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    def admit(self, slots: IntArray, keys: list[bytes], parents: IntArray, /) -> None: ...
    def insert(self, slots: IntArray, used: bool, /) -> None: ...
    def remove(self, slots: IntArray, /) -> None: ...
    def victims(self, taken: IntArray, /) -> int: ...
    def runs(self) -> list[tuple[int, int, list[int]]]: ...
    def held(self) -> list[int]: ...
    def due(self) -> list[int]: ...
    def __len__(self) -> int: ...

class Rows:
    def __init__(self, width: int, bucket_bits: int = 12, depth_max: int = 20) -> None: ...
    def __len__(self) -> int: ...
    def extents_used(self) -> int: ...
    def insert(self, owner: int, extents: list[int], keys: NDArray[Any], fields: NDArray[Any], /) -> None: ...
    def find(self, keys: list[bytes], owners: IntArray, fields: NDArray[Any], /) -> None: ...
    def drop(self, keys: list[bytes], /) -> int: ...
    def mark(self, keys: list[bytes], /) -> None: ...
    def marked(self, owner: int, extents: list[int], /) -> tuple[list[bytes], bytearray]: ...
    def release(self, owner: int, extents: list[int], /) -> int: ...
    def check(self) -> None: ...

class Slots:
    def __init__(self, slots: int, bucket_bits: int = 12, depth_max: int = 20) -> None: ...
    def __len__(self) -> int: ...
    def set(self, keys: list[bytes], slots: IntArray, /) -> None: ...
    def find(self, keys: list[bytes], slots: IntArray, /) -> None: ...
    def slot_of(self, key: bytes, /) -> int: ...
    def has_none(self, keys: list[bytes], /) -> bool: ...
    def drop(self, keys: list[bytes], /) -> None: ...
    def items(self) -> list[tuple[bytes, int]]: ...
    def check(self) -> None: ...

def connect(path: str, /) -> bool: ...
def digests(fields: NDArray[np.uint8], payloads: list[memoryview], digests: NDArray[np.uint64], /) -> None: ...
def all_begin_on(payloads: list[memoryview], step: int, /) -> bool: ...
def copy_runs(
    source: tuple[int, int],
    target: tuple[int, int],
    from_: NDArray[np.int64],
    to: NDArray[np.int64],
    bytes_: NDArray[np.int64],
    threads: int,
    /,
) -> None: ...
def flush_from_caches(memory: memoryview, /) -> bool: ...
def packed_u32(tokens: list[int], begin: int, end: int, /) -> bytes: ...
def attributes(items: list[Any], begin: int, end: int, name: str, /) -> list[Any]: ...
def rows(
    lists: list[list[Any]], begins: list[int], width: int, name: str, without: int, /
) -> tuple[list[Any], list[int]] | None: ...
def pack_floats(source: memoryview, target: memoryview, /) -> int: ...
def pack_frames(
    sources: list[memoryview],
    most: NDArray[np.int64],
    step: int,
    target: memoryview,
    lengths: NDArray[np.int64],
    /,
) -> None: ...
def unpack_floats(source: memoryview, target: memoryview, /) -> int: ...
def unpack_frames(source: memoryview, lengths: NDArray[np.int64], frame_bytes: int, target: memoryview, /) -> int: ...
def use_steps(name: str | None, /) -> str: ...

Blocks = tuple[int, int, int, int, int, int]

def linear(
    x: int,
    rows: int,
    inputs: int,
    x_row: int,
    group: int,
    form: int,
    narrow: bool,
    threads: int,
    /,
    *layers: int,
) -> None:
    """`layers`: of each w, scales, y, outputs, w_row."""

def look_up(
    ids: int, count: int, w: int, y: int, outputs: int, inputs: int, w_row: int, format: int, narrow: int, /
) -> None:
    """Raises IndexError for an id that is no output."""

def attention(
    q: int,
    out: int,
    k: Blocks,
    v: Blocks,
    table: int,
    runs: int,
    sinks: int,
    count: int,
    heads: int,
    fold: int,
    width: int,
    value_width: int,
    block_tokens: int,
    window: int,
    kind: int,
    scale: float,
    softcap: float,
    half: bool,
    narrow: bool,
    rounded_from: int,
    threads: int,
    /,
) -> None: ...
def run_program(code: array[int], buffers: array[int], threads: int, /) -> None: ...
def norm(
    x: int,
    w: int,
    y: int,
    rows: int,
    width: int,
    eps: float,
    more: float,
    half: bool,
    way: int,
    threads: int,
    /,
) -> None: ...
def rotate(cosines: int, sines: int, tokens: int, width: int, half: bool, threads: int, /, *each: int) -> None:
    """`each` of queries and keys: x, out, heads, strides of a token and of a head."""

def delta(
    at: tuple[int, ...],
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    scale: float,
    per_key: bool,
    normed: bool,
    half: bool,
    threads: int,
    /,
) -> None:
    """`at`: q, k, v, decay, beta, state, out, rows."""

def scan(
    at: tuple[int, ...],
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    least: float,
    most: float,
    softplus: bool,
    half: bool,
    threads: int,
    /,
) -> None:
    """`at`: x, b, c, dt, bias, a, d, state, out, rows."""

def convolve(
    at: tuple[int, ...],
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    silu: bool,
    half: bool,
    threads: int,
    /,
) -> None:
    """`at`: x, w, bias, state, out, rows."""

def multiplies_halves() -> bool: ...
def trust_tiles() -> None: ...
def trust_scoring() -> None: ...
def use_grids(table: bytes, /) -> None: ...
def use_threads(address: int, /) -> None: ...
def use_instructions(name: str | None, /) -> str: ...
