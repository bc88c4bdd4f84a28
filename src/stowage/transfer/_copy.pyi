"""What `kernel/module.c` offers; see `cpu.py`."""

from numpy import int64
from numpy.typing import NDArray

def copy_runs(
    source: tuple[int, int],
    target: tuple[int, int],
    from_: NDArray[int64],
    to: NDArray[int64],
    bytes_: NDArray[int64],
    threads: int,
    /,
) -> None: ...
