"""Every error that Stowage raises on purpose. Imports nothing, may be imported by everybody.

::

    StowageError
    ├── ConfigError                a setting that cannot be used; the text says what, why, and the fix
    │   └── BudgetError            a memory budget that cannot work; the text names the least that would
    ├── ModelError
    │   ├── CheckpointError        a checkpoint that is missing or damaged
    │   └── UnsupportedModelError  a model family that this version does not run
    ├── RequestError               one request that cannot be served: prompt too long, bad sampling parameter
    └── StorageError
        ├── DirectoryError         a directory that is foreign-owned, a link, not writable, or no directory
        ├── FormatError            bytes at rest that are not what they should be
        └── TransferError          a copy between device and host that failed; ends as a recompute

The engine turns operating errors into a miss, a recompute, or one of these. Anything else that escapes is a bug.
"""


def first_line(error: BaseException) -> str:
    """What somebody else's ``error`` says first; its type where it says nothing."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def reason(error: BaseException) -> str:
    """As ``first_line``; of Triton's compiler the last line, since it begins with where."""
    if type(error).__module__.startswith("triton"):
        return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
    return first_line(error)


class StowageError(Exception):
    """Base of the tree. ``str(error)`` is one paragraph for the user: what happened, why, and what to do."""


class ConfigError(StowageError):
    """A setting that cannot be used as given."""


class BudgetError(ConfigError):
    """A memory budget that is too small to work. The text names the least that would work."""


class ModelError(StowageError):
    """A model that cannot be run."""


class CheckpointError(ModelError):
    """A checkpoint that is missing, incomplete or damaged."""


class UnsupportedModelError(ModelError):
    """A model family, or an option of one, that this version refuses rather than answer wrongly."""


class RequestError(StowageError):
    """One request that cannot be served. Other requests are not affected."""


class StorageError(StowageError):
    """A tier that cannot be used."""


class DirectoryError(StorageError):
    """A cache directory that is owned by another user, a link, not writable, or not a directory."""


class FormatError(StorageError):
    """Bytes at rest that are not what they should be. Callers treat the chunk as a miss."""


class TransferError(StorageError):
    """A copy between device and host that failed. The engine computes again what it would have brought."""


def damaged(path: object, error: Exception) -> CheckpointError:
    """The error for a checkpoint's file that is not what its format says."""
    return CheckpointError(f"{path} is damaged ({error}); download the checkpoint again.")
