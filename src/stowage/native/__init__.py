"""All compiled code: one optional extension, and whether it is there.

    policy/       the inner loops of the default eviction policy     cache.policy.native
    tables/       keys to slots, and keys to rows                    core.table.native
    checksums.c   checksums of many payloads in one call             storage.format.batch
    copies.c      many runs of bytes between two memories            transfer.cpu
    kernels/      linear layers, attention, norms, recurrences       executor.kernels

Each part has one Python module that wraps it and does the same, more slowly, where ``extension`` is ``None``: a package
that was installed without a C compiler works. ``STOWAGE_PURE_PYTHON=1`` has every wrapper leave it alone.
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
