"""The shape of a model before it is loaded: parameters of every layer by kind, what it caches, what it multiplies.

From the config alone; where the checkpoint's weights lie beside it, sizes are those in their headers. Owns how a row of
the table of families and a config become layers. Kinds of layers that a config leaves out follow the
rules of its config class. A family that is not in the table is refused, with the way out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from stowage.errors import UnsupportedModelError
from stowage.planner import headers, parts
from stowage.planner.families import FAMILIES, Experts, Family
from stowage.planner.model_config import ITEM_BYTES, PACKED, Fields, read_config, run_dtype
from stowage.planner.parts import ATTENTION, MLP, RECURRENT, ROUTER, SHARED, Heads
from stowage.planner.shapes import NORMS, Cache, Keeps, Layer, Model

_CONTEXT_UNKNOWN_TOKENS = 1 << 20


def read_model(path: str | Path, dtype: str = "auto") -> Model:
    """The model in a directory, or of a config file, as it is in memory when it is run in ``dtype``.

    Raises ``CheckpointError``, ``UnsupportedModelError``, ``ConfigError``.
    """
    fields = read_config(path)
    chosen = run_dtype(fields.dtype, dtype)
    directory = Path(path).expanduser()
    tensors = headers.read_tensors(directory) if directory.is_dir() else []
    kind, stored = fields.quantization, "" if dtype == "auto" else chosen
    if tensors and fields.family not in FAMILIES:
        return headers.measured(_run_in(headers.plain(fields, tensors), chosen), tensors, stored)
    model = _run_in(shape(fields), chosen)
    if kind and kind != PACKED:
        return replace(model, notes=(f"the checkpoint is packed ({kind}); it is planned as unpacked to {chosen}.",))
    return headers.measured(model, tensors, stored) if tensors else model


def _run_in(model: Model, dtype: str) -> Model:
    return _in_bytes(replace(model, dtype=dtype, item_bytes=ITEM_BYTES[dtype]))


def shape(fields: Fields) -> Model:
    """What the model is made of. Raises ``UnsupportedModelError`` for a family that is not in the table."""
    family = FAMILIES.get(fields.family)
    if family is None:
        raise UnsupportedModelError(
            f"models of type {fields.family!r} are not in the planner's table, so their layers are not known from the "
            f"config alone. Put the checkpoint's *.safetensors files beside config.json: then sizes are read from "
            f"their headers. Known: {', '.join(sorted(FAMILIES))}."
        )
    fields = fields.with_defaults(family.defaults)
    hidden, vocab = fields.number("hidden_size"), fields.number("vocab_size")
    tied = fields.flag("tie_word_embeddings")
    types = layer_types(fields, family)
    layers = tuple(_layer(fields, family, index, kind, types) for index, kind in enumerate(types))
    embedding, rest = vocab * hidden, _norm(family, hidden)
    if fields.family in ("gpt2", "gpt_bigcode"):
        embedding += fields.number("max_position_embeddings") * hidden
    if fields.family == "olmo":
        rest = 0
    if width := fields.number("hidden_size_per_layer_input", 0):
        embedding += fields.number("vocab_size_per_layer_input") * len(types) * width
        rest += hidden * len(types) * width + width
    bias = vocab if family.head_bias else 0
    return _in_bytes(
        Model(
            family=fields.family,
            layers=layers,
            embedding=embedding,
            rest=rest,
            head=bias if tied else vocab * hidden + bias,
            tied=tied,
            vocab=vocab,
            hidden=hidden,
            dtype=fields.dtype,
            item_bytes=ITEM_BYTES[fields.dtype],
            context_tokens=fields.number("max_position_embeddings", _CONTEXT_UNKNOWN_TOKENS),
            head_reads=vocab * hidden + bias,
        )
    )


def _in_bytes(model: Model) -> Model:
    """``model`` with the bytes that its parameters take in its type."""
    size = model.item_bytes
    layers = tuple(
        replace(layer, dense_bytes=layer.dense_parameters * size, expert_bytes=layer.expert_parameters * size)
        for layer in model.layers
    )
    return replace(
        model,
        layers=layers,
        embedding_bytes=model.embedding * size,
        rest_bytes=model.rest * size,
        head_bytes=model.head * size,
    )


def layer_types(fields: Fields, family: Family) -> list[str]:
    """One name for each layer: as the config states them, or as its class derives them."""
    stated = fields.layer_types
    if fields.family == "nemotron_h" and stated is None:
        names = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
        stated = [names[c] for c in str(fields.get("hybrid_override_pattern", "")) if c in names] or None
    count = len(stated) if fields.family == "nemotron_h" and stated else fields.number("num_hidden_layers")
    if stated is not None:
        if len(stated) != count:
            raise UnsupportedModelError(f"config.json names {len(stated)} layer types for {count} layers.")
        return stated
    if family.mixer:
        attends = _attending(fields, family.mixer)
        return [kind for index in range(count) for kind in [attends(index)]]
    windowed = bool(fields.get("sliding_window")) and (not family.switch or fields.flag(family.switch))
    if fields.get("attention_chunk_size") and fields.family == "llama4_text":
        step = fields.number("no_rope_layer_interval", 4)
        ropes = fields.get("no_rope_layers") or [int((i + 1) % step != 0) for i in range(count)]
        return ["chunked_attention" if rope else "full_attention" for rope in ropes]
    if not windowed:
        return ["full_attention"] * count
    if family.switch and fields.family in ("qwen2", "qwen2_moe", "qwen3"):
        first = fields.number("max_window_layers", 28)
        return ["sliding_attention" if index >= first else "full_attention" for index in range(count)]
    every = fields.get("sliding_window_pattern", family.every)
    if not isinstance(every, int):  # EXAONE 4 writes LLLG
        every = len(str(every))
    types = ["sliding_attention" if not every or (i + 1) % every else "full_attention" for i in range(count)]
    if fields.family == "gemma4_text":
        types[-1] = "full_attention"
    return types


def _attending(fields: Fields, mixer: str) -> Callable[[int], str]:
    """Which layers of a hybrid attend, where its config does not name them."""
    if mixer == "delta":
        step = fields.number("full_attention_interval", 4)
        return lambda index: "linear_attention" if (index + 1) % step else "full_attention"
    if mixer == "conv":
        attends = fields.get("full_attn_idxs")
        return lambda index: "full_attention" if attends is None or index in attends else "linear_attention"
    if mixer == "beside":
        return lambda index: "hybrid"
    chosen = fields.get("attn_layer_indices") or []
    return lambda index: "full_attention" if index in chosen else "linear_attention"


def _norm(family: Family, hidden: int) -> int:
    return hidden * (2 if family.norm_bias else 1)


def _layer(fields: Fields, family: Family, index: int, kind: str, types: list[str]) -> Layer:
    if fields.family == "nemotron_h":
        return _nemotron_layer(fields, family, index, kind)
    hidden = fields.number("hidden_size")
    counts: dict[str, int] = {NORMS: family.norms * _norm(family, hidden)}
    cache, pairs = _mixer(fields, family, counts, index, kind, types)
    experts = family.experts
    if experts is not None and fields.number("num_experts", 0) and experts.where(fields, index):
        return _with_experts(fields, experts, Layer(index, counts, cache, pair_operations=pairs))
    inner, gated = _inner(fields, index, len(types)), family.gated
    counts[MLP] = parts.mlp(hidden, inner, gated=gated, bias=fields.flag(family.mlp_bias))
    if fields.family == "apertus":
        counts[MLP] += 2
    if fields.family == "granitemoehybrid":
        counts[MLP] = parts.mlp(hidden, fields.number("shared_intermediate_size"))
    if fields.family == "gemma4_text":
        return _gemma4_layer(fields, Layer(index, counts, cache, pair_operations=pairs))
    return Layer(index, counts, cache, pair_operations=pairs)


def _inner(fields: Fields, index: int, layers: int) -> int:
    """Width of the dense feed-forward part."""
    if fields.family in ("gpt2", "gpt_bigcode"):
        return fields.number("n_inner", 4 * fields.number("hidden_size"))
    inner = fields.number("intermediate_size")
    if fields.family == "llama4_text":
        return fields.number("intermediate_size_mlp")
    if fields.family == "lfm2" and fields.flag("block_auto_adjust_ff_dim"):
        inner = int(float(fields.get("block_ffn_dim_multiplier", 1.0)) * int(2 * inner / 3))
        step = fields.number("block_multiple_of")
        return -(-inner // step) * step
    if fields.family == "gemma4_text" and fields.flag("use_double_wide_mlp") and _shares(fields, index, layers):
        return 2 * inner
    return inner


def _shares(fields: Fields, index: int, layers: int) -> bool:
    """Whether the layer reads another's keys and values."""
    shared = fields.number("num_kv_shared_layers", 0)
    return bool(shared) and index >= layers - shared > 0


def _mixer(
    fields: Fields, family: Family, counts: dict[str, int], index: int, kind: str, types: list[str]
) -> tuple[Cache, int]:
    """Counts what mixes tokens into ``counts``; what it keeps, and the operations of a pair."""
    hidden = fields.number("hidden_size")
    if kind == "linear_attention":
        if family.mixer == "space":
            space = parts.state_space(fields)
            counts[RECURRENT], cache = space.parameters(hidden), space.cache()
        else:
            of = parts.delta_rule if family.mixer == "delta" else parts.short_convolution
            counts[RECURRENT], cache = of(fields)
        return cache, 0
    if fields.get("kv_lora_rank"):
        counts[ATTENTION] = parts.latent_attention(fields)
        return parts.latent_cache(fields), parts.latent_pair_operations(fields)
    heads = _heads(fields, family, index, kind, len(types))
    norm = family.norm(fields) if callable(family.norm) else family.norm
    counts[ATTENTION] = parts.attention(
        hidden,
        heads,
        bias=fields.flag(family.bias),
        out_bias=fields.flag(family.out_bias),
        norm=norm,
        sinks=family.sinks,
    )
    keeps, window = Keeps.FULL, 0
    if kind == "sliding_attention":
        keeps, window = Keeps.SLIDING, fields.number("sliding_window")
    elif kind == "chunked_attention":
        keeps, window = Keeps.CHUNKED, fields.number("attention_chunk_size")
    cache = parts.attention_cache(heads, keeps, window)
    if family.mixer == "beside":
        space = parts.state_space(fields)
        counts[RECURRENT] = space.parameters(hidden)
        cache = parts.both(cache, space.cache())
    return cache, parts.pair_operations(heads)


def _heads(fields: Fields, family: Family, index: int, kind: str, layers: int) -> Heads:
    query, key, size = fields.number("num_attention_heads"), fields.kv_heads, fields.head_dim
    if fields.family in ("gpt2", "gpt_bigcode"):
        key = 1 if fields.flag("multi_query") else query
    if fields.family != "gemma4_text":
        return Heads(query, key, size, gated=family.mixer == "delta")
    equal = fields.flag("attention_k_eq_v")
    own = fields.of_layer(index)
    if own is not None:
        key, size = own.kv_heads, own.head_dim
    elif kind == "full_attention":
        size = fields.number("global_head_dim", 512)
        key = fields.number("num_global_key_value_heads", key) if equal else key
    shares = _shares(fields, index, layers)
    return Heads(query, key, size, values=not (equal and kind == "full_attention"), reads=shares)


def _with_experts(fields: Fields, experts: Experts, layer: Layer) -> Layer:
    hidden, inner, count = fields.number("hidden_size"), fields.number(experts.inner), fields.number("num_experts")
    counts = {**layer.parameters, ROUTER: parts.linear(hidden, count, experts.router_bias)}
    if shared := experts.shared(fields):
        counts[SHARED] = shared
    return replace(
        layer,
        parameters=counts,
        experts=count,
        experts_per_token=min(count, fields.number("num_experts_per_tok")),
        expert_parameters=parts.mlp(hidden, inner, gated=experts.gated, bias=experts.bias),
    )


def _gemma4_layer(fields: Fields, layer: Layer) -> Layer:
    """With inputs of its own for each layer, and experts beside the dense part."""
    hidden, counts = fields.number("hidden_size"), dict(layer.parameters)
    if width := fields.number("hidden_size_per_layer_input", 0):
        counts[MLP] += 2 * hidden * width
        counts[NORMS] += hidden
    if not fields.flag("enable_moe_block"):
        return replace(layer, parameters=counts)
    counts[NORMS] += 3 * hidden
    layer = _with_experts(fields, Experts(), replace(layer, parameters=counts))
    more = hidden + layer.experts
    return replace(layer, parameters={**layer.parameters, ROUTER: layer.parameters[ROUTER] + more})


def _nemotron_layer(fields: Fields, family: Family, index: int, kind: str) -> Layer:
    """One part to each layer, behind one norm."""
    hidden = fields.number("hidden_size")
    counts, bias = {NORMS: hidden}, fields.flag("mlp_bias")
    if kind == "linear_attention":
        space = parts.nemotron_state_space(fields)
        return Layer(index, {**counts, RECURRENT: space.parameters(hidden)}, space.cache())
    if kind == "full_attention":
        heads = Heads(fields.number("num_attention_heads"), fields.kv_heads, fields.head_dim)
        total = parts.attention(hidden, heads, bias=False, out_bias=False)
        cache = parts.attention_cache(heads, Keeps.FULL, 0)
        return Layer(index, {**counts, ATTENTION: total}, cache, pair_operations=parts.pair_operations(heads))
    if kind == "mlp":
        inner = fields.number("intermediate_size")
        return Layer(index, {**counts, MLP: parts.mlp(hidden, inner, gated=False, bias=bias)})
    count, latent = fields.number("num_experts"), fields.number("moe_latent_size", 0)
    counts[ROUTER] = hidden * count
    if latent:
        counts[MLP] = parts.linear(hidden, latent, bias) + parts.linear(latent, hidden, bias)
    counts[SHARED] = parts.mlp(hidden, fields.number("moe_shared_expert_intermediate_size"), gated=False, bias=bias)
    of_one = parts.mlp(latent or hidden, fields.number("moe_intermediate_size"), gated=False)
    return Layer(
        index,
        counts,
        experts=count,
        experts_per_token=min(count, fields.number("num_experts_per_tok")),
        expert_parameters=of_one,
    )
