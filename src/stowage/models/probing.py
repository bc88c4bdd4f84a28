"""Observes what a model really does with its cache and its masks, in forwards of a few tokens.

Owns those forwards. A recording cache notes which layer keeps which tensors; a recording attention notes which layer
reads whose tensors, with what, and under which mask; the mask is kept as the rule that Transformers made it by, so it
can be asked about any position. A model that keeps its state elsewhere, changes keys after they were cached, or adds
something of its own to its scores is refused with ``UnsupportedModelError``.

Never guesses and never looks at a family's name. Attention is not masked in these forwards: only shapes, identities and
masks matter, and of answers whether they depend on what they should.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from blake3 import blake3
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

from stowage.errors import CheckpointError, UnsupportedModelError
from stowage.models import compat
from stowage.models.cache_layers import states_of
from stowage.models.layout import State, rope_settings
from stowage.models.state_directory import Remembered, default_state_directory

NAME = "stowage_probe"
PROBE_TOKENS = 6
_PIECES = ((4, 2), (4, 1))
"""A prompt in two parts: the second of several tokens, and of one."""
_KNOWN = frozenset(
    "sliding_window s_aux softcap dropout position_ids position_embeddings past_key_values cache_position "
    "logits_to_keep layer_idx".split()
)
"""What models hand to attention that it heeds, or has no use for; besides switches."""
_OTHER_SIZES = ("must match the size", "should be broadcastable")
"""What torch says of a product of tensors that do not fit, with values and without."""
_CONTINUES = "continues"
_REVISION = 1
"""Raised whenever forwards are looked at for more."""
RAISED_BY_MODELS = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What a model raises that wants another cache or another attention than it is given."""

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of a mask: whether a query (third) sees a key (fourth)."""


@dataclass(frozen=True, slots=True)
class Query:
    """What attention was asked with: so many ``heads``, and how scores come to be. ``sunk``: with a sink for each head;
    ``rank``: columns of the latent that are mixed, where there is one.
    """

    heads: int
    scale: float
    softcap: float | None
    sunk: bool
    rank: int


@dataclass(frozen=True, slots=True)
class Read:
    """One call of attention. ``source``: the layer whose cached tensors it reads, as they are cached or (``latent``)
    expanded from them. ``window``: as given to attention; ``rule``: its mask's, ``None`` where it was given none.
    """

    layer: int
    source: int
    latent: bool
    window: int | None
    rule: Rule | None
    query: Query | None = None


@dataclass(slots=True)
class Probe:
    """What was seen. ``cache`` is Transformers' own, after ``PROBE_TOKENS`` tokens. ``continues``: whether recurrent
    layers may be given several tokens at once after the first time. ``logits``: of the last token.
    ``own_rows``: whether the model gives logits for the asked tokens only.
    """

    cache: Any
    reads: list[Read] = field(default_factory=list)
    logits: Tensor = field(default_factory=lambda: torch.zeros(0))
    continues: bool = True
    own_rows: bool = True


class _RecordingCache(DynamicCache):  # type: ignore[misc]
    """Transformers' cache, which also remembers what each layer was handed back."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.handed: dict[int, tuple[Tensor, Tensor]] = {}
        self.written: int | None = None

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx in self.handed:
            raise UnsupportedModelError(f"layer {layer_idx} caches twice in one forward; this is not supported yet.")
        self.handed[layer_idx] = (keys, values)
        self.written = layer_idx
        return keys, values

    def source_of(self, key: Tensor, value: Tensor) -> int | None:
        """The layer that ``key`` and ``value`` were handed to."""
        for layer, (keys, values) in self.handed.items():
            if _same(key, keys) and _same(value, values):
                return layer
        return None


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether they are one tensor, on a device without memory (meta) too."""
    if one.shape != other.shape or one.stride() != other.stride() or one.storage_offset() != other.storage_offset():
        return False
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


_recording: ContextVar[tuple[_RecordingCache, list[Read]]] = ContextVar("stowage_probe")


_seen: WeakKeyDictionary[Any, Probe] = WeakKeyDictionary()
_lock = threading.Lock()


@contextmanager
def recorded(model: Any) -> Iterator[None]:
    """Forwards of ``model`` in here go through the recording attention."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    if not model._can_set_attn_implementation():
        raise UnsupportedModelError("the model computes attention by itself, so its cache cannot be paged.")
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(NAME)
        yield
    finally:
        model.set_attn_implementation(before)


def _mask(
    *, batch_size: int, q_length: int, kv_length: int, mask_function: Rule, device: Any = None, **_: Any
) -> Tensor:
    """A mask that shows everything and carries its rule."""
    mask = torch.ones((batch_size, 1, q_length, kv_length), dtype=torch.bool, device=device)
    mask.stowage_rule = mask_function  # type: ignore[attr-defined]
    return mask


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: Any = None, **options: Any
) -> tuple[Tensor, None]:
    cache, reads = _recording.get()
    name = type(module).__name__
    rule = getattr(attention_mask, "stowage_rule", None)
    if attention_mask is not None and rule is None:
        raise UnsupportedModelError(f"{name} changes its mask by itself; this is not supported yet.")
    strange = sorted(k for k, given in options.items() if k not in _KNOWN and not isinstance(given, bool | None))
    if strange:
        raise UnsupportedModelError(f"{name} hands {', '.join(strange)} to its attention; this is not supported yet.")
    source = cache.source_of(key, value)
    # As ``ForwardStep.reading``.
    layer = int(getattr(module, "layer_idx", -1)) if cache.written is None else cache.written
    cache.written = None
    latent = source is None and layer in cache.handed and hasattr(module, "expand_kv")
    if (source is None and not latent) or (layer in cache.handed and source not in (None, layer)):
        raise UnsupportedModelError(f"{name} changes keys or values after they are cached; this is not supported yet.")
    asked = Query(
        heads=query.shape[1],
        scale=query.shape[3] ** -0.5 if scaling is None else float(scaling),
        softcap=options.get("softcap"),
        sunk=options.get("s_aux") is not None,
        rank=int(module.kv_lora_rank) if latent else 0,
    )
    reads.append(Read(layer, layer if source is None else source, latent, options.get("sliding_window"), rule, asked))
    out = scaled_dot_product_attention(query, key, value, enable_gqa=query.shape[1] != key.shape[1])
    return out.transpose(1, 2).contiguous(), None


def look(model: Any, identity: str = "") -> Probe:
    """Forwards of a few tokens of ``model``, on its device, in evaluation mode; what was seen is remembered until
    ``forget``, because an engine may be running the model meanwhile. ``identity``: of its weights; what answers showed
    (``continues``) is then remembered between processes, for a class of Transformers'.
    Raises ``UnsupportedModelError``.
    """
    with _lock:
        if model not in _seen:
            _seen[model] = _look(model, _key(model, identity) if identity else "")
        return _seen[model]


def _key(model: Any, identity: str) -> str:
    """Of all that the answers of ``model`` depend on; empty for code that may change without a sign."""
    kind = type(model)
    if kind.__module__.partition(".")[0] != "transformers" or "dev" in transformers.__version__:
        return ""
    of = (_REVISION, transformers.__version__, torch.__version__, kind.__name__, model.dtype, model.device, identity)
    return blake3("/".join(map(str, of)).encode()).hexdigest()


def forget(model: Any) -> None:
    """No engine runs ``model`` any more: look again before the next one does."""
    with _lock:
        _seen.pop(model, None)


@torch.inference_mode()
def _look(model: Any, key: str) -> Probe:
    known = Remembered(default_state_directory() / "probes.json") if key else {}
    with refusing(model.config), recorded(model):
        probe = _forwards(model, (PROBE_TOKENS,))
        if key in known:
            probe.continues = known[key] == _CONTINUES
            return probe
        _refuse_state_elsewhere(model)
        probe.continues = _continues(model, probe)
    if isinstance(known, Remembered):
        known[key] = _CONTINUES if probe.continues else "singly"
        known.save()
    return probe


@torch.inference_mode()
def probe_once(model: Any) -> Probe:
    """One forward of ``model``, which may be without values (``meta_forward``): no answer is compared."""
    with refusing(model.config), recorded(model):
        return _forwards(model, (PROBE_TOKENS,))


@contextmanager
def refusing(config: Any) -> Iterator[None]:
    """What a model of ``config`` raises in here refuses it."""
    try:
        yield
    except UnsupportedModelError:
        raise
    except RAISED_BY_MODELS as error:
        rope = next((r for r in rope_settings(config) if r.get("partial_rotary_factor") not in (None, 1.0)), None)
        if rope is not None and any(words in str(error) for words in _OTHER_SIZES):
            raise UnsupportedModelError(
                f"config.json says partial_rotary_factor = {str(rope['partial_rotary_factor'])[:20]} and rope_type = "
                f"{str(rope.get('rope_type'))[:20]!r}, and Transformers' {config.model_type!r} rotates whole heads: it "
                "computes no such model. Correct config.json, or give the checkpoint that it came with."
            ) from error
        raise UnsupportedModelError(
            f"the model does not run with Transformers' own dynamic cache and a replaced attention: {error}"
        ) from error


def _forwards(
    model: Any, pieces: Sequence[int], *, disturbed: tuple[int, State] | None = None, foreign: int = 0
) -> Probe:
    """A prompt computed in ``pieces``; what is recorded is the last one. Before it, the state of one layer may be
    ``disturbed``, or so many tokens of a ``foreign`` prompt be computed.
    """
    ids = torch.arange(1, PROBE_TOKENS + 1, device=model.device)[None] % model.config.vocab_size
    positions = torch.arange(PROBE_TOKENS, device=model.device)[None]
    cache = _RecordingCache(model.config)
    probe = Probe(cache)
    begin = 0
    for i, count in enumerate(pieces):
        cache.handed.clear()
        probe.reads.clear()
        if i and disturbed is not None:
            layer, (name, state) = disturbed
            getattr(cache.layers[layer], name)[state].fill_(1.0)
        if i and foreign:
            _forwards(model, (foreign,))
        token = _recording.set((cache, probe.reads))
        part = slice(begin, begin + count)
        asked = {"logits_to_keep": torch.tensor([count - 1], device=model.device)} if takes_rows(model) else {}
        try:
            out = model(
                input_ids=ids[:, part],
                position_ids=positions[:, part],
                **{cache_name(model): cache},
                use_cache=True,
                **asked,
            )
        finally:
            _recording.reset(token)
        probe.logits, probe.own_rows = out.logits[:, -1], out.logits.shape[1] == 1
        begin += count
    return probe


def cache_name(model: Any) -> str:
    """What the model calls its cache."""
    return compat.cache_argument(list(inspect.signature(model.forward).parameters))


def takes_rows(model: Any) -> bool:
    """Whether the model can be asked for the logits of certain tokens."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def _refuse_state_elsewhere(model: Any) -> None:
    """Raise for a model that keeps something between forwards besides its cache: another prompt's forward in between
    would change the answer. And for one that computes no numbers, of which nothing can be compared.
    """
    several, single = _PIECES
    _, count = single
    first = _forwards(model, several).logits
    if first.isnan().any():
        raise CheckpointError(
            f"the model computes NaN, and no number, in {str(model.dtype).removeprefix('torch.')}. If that is float16, "
            "give --dtype bfloat16 or float32; else its weights are damaged: download them again."
        )
    if not torch.equal(first, _forwards(model, several, foreign=count).logits):
        raise UnsupportedModelError(
            "the model keeps a state of its own between forwards, outside of its cache, so prompts cannot take turns."
        )


def _continues(model: Any, whole: Probe) -> bool:
    """Whether recurrent layers go on from their state when they are given several tokens; if not, they must at least do
    so when given one. A layer that begins anew instead answers the same whatever its state was.
    """
    index = next((i for i, layer in enumerate(whole.cache.layers) if states_of(layer)), None)
    if index is None:
        return True
    states = states_of(whole.cache.layers[index])
    several, single = _PIECES
    if _heeds(model, several, index, states):
        return True
    if _heeds(model, single, index, states):
        return False
    raise UnsupportedModelError(f"layer {index} keeps a state and does not go on from it, so nothing can be reused.")


def _heeds(model: Any, pieces: Sequence[int], layer: int, states: Sequence[State]) -> bool:
    """Whether the answer to the last piece changes with each of the layer's ``states``."""
    plain = _forwards(model, pieces).logits
    return all(not torch.equal(plain, _forwards(model, pieces, disturbed=(layer, state)).logits) for state in states)
