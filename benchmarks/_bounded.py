"""A process whose memory is bounded by the kernel, page cache included: what it maps of files counts as well."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


@contextmanager
def bounded(limit_bytes: int) -> Iterator[list[str]]:
    """What a command begins with so that its process has at most ``limit_bytes``: a control group below, or, in version
    2, beside this process's own. Raises SystemExit where this user may not make one.
    """
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines())
    if "memory" in own:
        parent, limit = _ROOT / "memory" / own["memory"].strip("/"), "memory.limit_in_bytes"
    else:
        parent, limit = (_ROOT / own[""].strip("/")).parent, "memory.max"
    group = parent / f"stowage-benchmark-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(limit_bytes), encoding="ascii")
    except OSError as error:
        raise SystemExit(f"no control group with a limit can be made in {parent}: {error.strerror}") from error
    try:
        yield ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group)]
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    """Once the last of its processes is gone, which is a moment after it ended."""
    for _ in range(100):
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.1)
    group.rmdir()
