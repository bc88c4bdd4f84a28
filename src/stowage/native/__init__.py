"""All compiled code: one optional extension, and whether it is there. Beside it, memory in huge pages.

    policy/       the inner loops of the default eviction policy     cache.policy.native
    tables/       keys to slots, and keys to rows                    core.table
    checksums.c   checksums of many payloads in one call             storage.format.batch
    lossless/     floating-point numbers in fewer bytes              core.lossless
    copies.c      many runs of bytes between two memories            transfer.cpu
    caches.c      flushes memory from the processors' caches         core.read_buffers
    words.c       codes of quantized weights, by outputs           weights.quantized.row_major
    gather.c      numbers and attributes of scattered objects        core.gather
    kernels/      linear layers, attention, norms, recurrences       executor.kernels

Each part has one Python module that wraps it and does the same, more slowly, where ``extension`` is ``None``. That is
more than a model for tests: as long as there are no wheels, it is what runs where there is no C compiler (a slim
container). ``STOWAGE_PURE_PYTHON=1`` has every wrapper leave compiled code alone. Property tests hold both to the same
answers, but for ``kernels/``, whose sums have an order of their own. What both sides must agree on, such as the length
of an array, C compares with what it is given.
"""

from __future__ import annotations

from stowage.native.switches import PURE_PYTHON, is_on

try:
    from stowage.native import _native as extension
except ImportError:  # pragma: no cover - where nothing could be compiled
    extension = None  # type: ignore[assignment]

__all__ = ["extension", "is_built", "is_wanted"]


def is_built() -> bool:
    """Whether there is compiled code at all."""
    return extension is not None


def is_wanted() -> bool:
    """Whether it is used."""
    return is_built() and not is_on(PURE_PYTHON)
