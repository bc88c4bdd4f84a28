"""Where Transformers' series differ: each difference is one function here, named for what it is about.

Every series from ``OLDEST`` to ``NEWEST`` is tested at both ends (``make compat``). A newer one runs, with a warning:
whether it computes what is expected is found by the trials that opening a model makes anyway. Nothing heavy is imported
at the top, so that ``stowage doctor`` can read the numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

logger = logging.getLogger("stowage.models")
OLDEST = (5, 17)
NEWEST = (5, 24)


def series(numbers: tuple[int, ...]) -> str:
    """As people write it: 5.17."""
    return ".".join(map(str, numbers))


def untested(version: str) -> str:
    """What to warn of with that version of Transformers; empty for one of the tested series."""
    found = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if OLDEST <= found <= NEWEST:
        return ""
    return (
        f"Transformers {version} is not tested; {series(OLDEST)} to {series(NEWEST)} are. Each model is tried when it "
        f"is opened. If something fails: pip install 'transformers=={series(NEWEST)}.*'"
    )


@cache
def warn_if_untested() -> None:
    """Log, once in a process, that this version of Transformers is not tested."""
    from transformers import __version__

    if warning := untested(__version__):
        logger.warning(warning)


def keeps_nothing(layer: Any) -> bool:
    """Whether a layer of Transformers' cache only stands in for one that has no cache: of experts or an MLP alone, or
    that reads another layer's keys. Up to 5.17 it was an empty layer of a recurrent class, or left out.
    """
    return type(layer).__name__ == "DummyLayer"


def declared_layer_types(config: Any) -> list[str]:
    """What ``config``, of a decoder, calls each layer's cache. What comes with the names is one mapping for all layers
    up to 5.17, and a list of them later; neither is needed here.
    """
    from transformers.cache_utils import get_layer_types_and_kwargs

    declared, _ = get_layer_types_and_kwargs(config)
    return list(declared)


def cache_argument(parameters: Sequence[str]) -> str:
    """What a model with these ``parameters`` of ``forward`` calls its cache: ``past_key_values``, of Mamba and its like
    ``cache_params``, and from 5.24 on ``cache`` in both.
    """
    names = ("past_key_values", "cache_params", "cache")
    return next((name for name in names if name in parameters), names[0])


def put_indexer_positions(cache: Any, positions: Any) -> None:
    """Tell Qwen4 (experimental) where the tokens before the coming ones stand; ``None``: there are none. Up to 5.17 the
    cache itself notes it, later the first layer with an indexer.
    """
    holder = next((layer for layer in cache.layers if hasattr(layer, "indexer_position_ids")), None)
    if holder is not None:
        holder.indexer_position_ids = positions
        return
    vars(cache).pop("position_ids", None)
    if positions is not None:
        cache.position_ids = positions


def in_value_heads(query: Any, key: Any, value: Any) -> tuple[Any, Any]:
    """``query`` and ``key`` ``[batch, tokens, heads, keys]`` of a delta rule with as many heads as ``value``. Models
    repeat them for it up to 5.17, later the rule does.
    """
    times, rest = divmod(value.shape[2], key.shape[2])
    if times == 1 or rest:
        return query, key
    return query.repeat_interleave(times, dim=2), key.repeat_interleave(times, dim=2)


def put_among_causal(config: Any) -> None:
    """Let ``AutoModelForCausalLM`` know the class of ``config``: Mistral 4's is left out there in all series so far,
    and named among those of models that see.
    """
    if config.model_type == "mistral4":
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault("mistral4", "Mistral4ForCausalLM")
