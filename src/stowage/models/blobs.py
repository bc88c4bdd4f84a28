"""Compares files of a hub cache with the digests that the hub stated of them.

A snapshot in the cache of ``huggingface_hub`` has links to blobs. The blob of a large file is called by its SHA-256, of
any other by git's SHA-1. Nothing says what the bytes of other directories should be.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from stowage.errors import CheckpointError
from stowage.models.files import weight_files

_NAME = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def check_blobs(checkpoint: Path) -> int:
    """How many files of a directory or GGUF file are those of the hub: weights, and what is JSON. 0: it is in no hub
    cache. Reads all of them. Raises ``CheckpointError`` for the first that is damaged.
    """
    files = [checkpoint] if checkpoint.is_file() else [*sorted(checkpoint.glob("*.json")), *weight_files(checkpoint)]
    stated = [
        (file, blob) for file in files if (blob := file.resolve()).parent.name == "blobs" and _NAME.fullmatch(blob.name)
    ]
    for file, blob in stated:
        if _digest(blob) != blob.name:
            raise CheckpointError(
                f"{file} is damaged: its digest is not the one that the hub stated, after which it is called. Remove "
                f"{blob} and download the model again; if that happens again, check the disk and the memory."
            )
    return len(stated)


def _digest(blob: Path) -> str:
    """In the kind of its name."""
    try:
        with blob.open("rb") as file:
            if len(blob.name) == 64:
                return hashlib.file_digest(file, "sha256").hexdigest()
            git = hashlib.sha1(b"blob %d\0" % blob.stat().st_size, usedforsecurity=False)
            return hashlib.file_digest(file, lambda: git).hexdigest()
    except OSError as error:
        raise CheckpointError(f"{blob} cannot be read: {error}. Remove it and download the model again.") from error
