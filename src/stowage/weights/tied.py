"""Tied parameters, one parameter by the config, of which a checkpoint's files hold two copies.

Transformers ties such a pair if its values are the same, and leaves it as it is if not: it compares them when all is
loaded. Offloaded parameters show nothing then, so their bytes are compared before, in the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stowage.weights.checkpoint import Checkpoint, Segment, same_bytes


def resolve_tied(model: Any, checkpoint: Checkpoint) -> dict[str, str]:
    """Take pairs that differ in ``checkpoint`` from what ``model`` ties. Returns those pairs of which it has both, the
    same: by the name of one that of the other. While ``model`` is loaded, these are tied without a look at them.
    """
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    both = dict[str, str]()
    for name, source in list(tied.items()):
        own, other = (_found(path, checkpoint.tensors) for path in (name, source))
        if own is None or other is None or own is other:
            continue
        if same_bytes(own, other):
            both[name] = source
        else:
            del tied[name]
    if both:
        _tie_unseen(model, both)
    return both


def _found(path: str, tensors: Mapping[str, Segment]) -> Segment | None:
    """The tensor of the parameter ``path``, also where what is in front of its module is called otherwise in files."""
    if path in tensors:
        return tensors[path]
    end = f".{'.'.join(path.split('.')[-2:])}"
    alike = [name for name in tensors if f".{name}".endswith(end)]
    return tensors[alike[0]] if len(alike) == 1 else None


def _tie_unseen(model: Any, both: Mapping[str, str]) -> None:
    """Let the next tying of ``model`` take one of each pair for missing, so that it becomes the other."""
    own = model.tie_weights

    def tie_weights(missing_keys: set[str] | None = None, *args: Any, **given: Any) -> Any:
        del model.tie_weights  # its class's from now on
        if missing_keys is not None:
            missing_keys.update(name for name, source in both.items() if source not in missing_keys)
        return own(missing_keys, *args, **given)

    model.tie_weights = tie_weights
