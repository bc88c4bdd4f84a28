"""What `kernel/module.c` offers; see there, and `native.py`. Addresses are numbers; strides are in elements."""

Place = tuple[int, int, int, int, int, int]

def linear(
    x: int,
    w: int,
    scales: int,
    y: int,
    rows: int,
    inputs: int,
    outputs: int,
    x_row: int,
    w_row: int,
    group: int,
    form: int,
    threads: int,
    /,
) -> None: ...
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
def multiplies_halves() -> bool: ...
def use_threads(address: int, /) -> None: ...
def use_instructions(name: str | None, /) -> str: ...
