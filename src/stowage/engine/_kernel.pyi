"""What `kernel/module.c` offers; see there, and `native.py`. Addresses are numbers; strides are in elements."""

Place = tuple[int, int, int, int, int, int]

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

def attention(
    q: int,
    out: int,
    k: Place,
    v: Place,
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
    threads: int,
    /,
) -> None: ...
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
def use_threads(address: int, /) -> None: ...
def use_instructions(name: str | None, /) -> str: ...
