"""Measures what a forward of the engine takes besides its matrix products, with tiny models in the engine itself.

    a step        scheduling, handing tokens over                     by a model of few layers, after other reading
    a layer       calls, norms, rotation, attention over few keys     by one of more layers
    a sequence    its share of that, in a batch                       by a batch
    attention     of decoding steps                                   by longer prompts
    a logit       drawing a token                                     by a larger vocabulary
    an element    of activations: what norms, rotation and gates do   by a prompt, through linear layers that do nothing
    a mixture     routing, for each layer that has experts            by models with few and many experts that are met
    an expert     the calls for each expert that is met

In real use a model's weights evict a step's code and data from the caches; here other memory does so before each step.

Runs in the process of ``compute``: torch and Transformers are imported here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

_LAYERS_FEW, _LAYERS_MORE = 2, 10
_BATCH = 8
_TOKENS = 24
_HEADS, _KV_HEADS, _HEAD_SIZE = 16, 4, 64
_PROMPT_FEW, _PROMPT_MORE = 6, 518
_VOCAB_FEW, _VOCAB_MORE = 64, 32768
_WIDE, _WIDE_TOKENS = 1024, 64
_EXPERTS, _CHOSEN_FEW, _CHOSEN_MORE = 32, 2, 16
_ROUNDS = 3
_OTHER_BYTES = 64 << 20


def measure() -> dict[str, Any]:
    """Fields of ``Machine``: ``step_s``, ``layer_s``, ``sequence_s``, ``attention_steps``, ``logit_s``,
    ``elements_per_s``, ``mixture_s``, ``expert_s``.
    """
    few_s, few_batch_s = _steps_s(_llama(_LAYERS_FEW), 1, _BATCH)
    more_s, more_batch_s = _steps_s(_llama(_LAYERS_MORE), 1, _BATCH)
    layers = _LAYERS_MORE - _LAYERS_FEW
    layer_s = max((more_s - few_s) / layers, 1e-9)
    sequence_s = max((more_batch_s - few_batch_s) / layers - layer_s, 0.0) / (_BATCH - 1)
    (cold_s,) = _steps_s(_llama(_LAYERS_FEW), 1, cold=True)
    step_s = max(cold_s - _LAYERS_FEW * layer_s, 1e-9)
    wide_s = _prefilling_s(_llama(_LAYERS_FEW, hidden=_WIDE, inner=4 * _WIDE))
    elements = _LAYERS_FEW * _BATCH * _WIDE_TOKENS * 5 * _WIDE
    return {
        "step_s": step_s,
        "layer_s": layer_s,
        "sequence_s": sequence_s,
        "logit_s": max(_drawing_s() - few_batch_s, 0.0) / (_BATCH * (_VOCAB_MORE - _VOCAB_FEW)),
        "attention_steps": _attention_steps(),
        "elements_per_s": elements / max(wide_s - few_s, 1e-9),
        **_experts(few_s),
    }


def _attention_steps() -> dict[int, float]:
    """Operations per second of attention when decoding, by sequences of a batch. Keys are in caches."""
    heads = {"num_attention_heads": _HEADS, "num_key_value_heads": _KV_HEADS, "head_dim": _HEAD_SIZE}
    batches = (1, _BATCH)
    found = _steps_s(_llama(_LAYERS_MORE, **heads), *batches, prompts=(_PROMPT_FEW, _PROMPT_MORE))
    operations = _LAYERS_MORE * (_PROMPT_MORE - _PROMPT_FEW) * 4 * _HEADS * _HEAD_SIZE
    short, long = found[: len(batches)], found[len(batches) :]
    return {
        batch: batch * operations / max(long_s - short_s, 1e-9)
        for batch, short_s, long_s in zip(batches, short, long, strict=True)
    }


def _experts(few_s: float) -> dict[str, float]:
    (met_few_s,) = _steps_s(_mixture(_CHOSEN_FEW), 1)
    (met_more_s,) = _steps_s(_mixture(_CHOSEN_MORE), 1)
    expert_s = max((met_more_s - met_few_s) / (_CHOSEN_MORE - _CHOSEN_FEW) / _LAYERS_FEW, 1e-9)
    mixture_s = max((met_few_s - few_s) / _LAYERS_FEW - _CHOSEN_FEW * expert_s, 1e-9)
    return {"expert_s": expert_s, "mixture_s": mixture_s}


def _llama(layers: int, hidden: int = 64, inner: int = 256, **fields: Any) -> Any:
    return _built("llama", layers, hidden, intermediate_size=inner, **fields)


def _mixture(chosen: int) -> Any:
    return _built(
        "qwen3_moe", _LAYERS_FEW, 64, moe_intermediate_size=64, num_experts=_EXPERTS, num_experts_per_tok=chosen
    )


def _built(family: str, layers: int, hidden: int, **fields: Any) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    usual = {
        "num_attention_heads": hidden // 16 if hidden == 64 else hidden // 64,
        "num_key_value_heads": 2,
        "head_dim": 16 if hidden == 64 else 64,
        "vocab_size": _VOCAB_FEW,
    }
    config = AutoConfig.for_model(family, hidden_size=hidden, num_hidden_layers=layers, **{**usual, **fields})
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def _steps_s(model: Any, *batches: int, prompts: Sequence[int] = (_PROMPT_FEW,), cold: bool = False) -> list[float]:
    """Seconds of a decoding step of each of ``batches`` after each of ``prompts``; ``cold``: with empty caches."""
    other = np.ones(_OTHER_BYTES if cold else 0, dtype=np.uint8)
    with _engine(model) as engine:
        return [_step_s(engine, batch, length, other.max) for length in prompts for batch in batches]


def _step_s(
    engine: Any, batch: int, length: int = _PROMPT_FEW, between: Callable[..., object] = lambda **_options: None
) -> float:
    """``between`` is called after each step, and takes none of its time."""
    from stowage.engine.sampling_params import SamplingParams

    params = SamplingParams(_TOKENS, ignore_eos=True)
    seconds: list[float] = []
    # Each round asks the same, so that a long prompt is computed once.
    prompts = [[at, length % 60, *(1 + i % 60 for i in range(length - 2))] for at in range(batch)]
    for _ in range(_ROUNDS):
        stamps: list[tuple[float, float]] = []

        def heard(_delta: Any, stamps: list[tuple[float, float]] = stamps) -> None:
            ended_s = time.perf_counter()
            between(initial=0)
            stamps.append((ended_s, time.perf_counter()))

        requests = [engine.submit(prompt, params) for prompt in prompts[1:]]
        requests.append(engine.submit(prompts[0], params, heard))
        for request in requests:
            request.wait()
        seconds += [ended_s - began_s for (_, began_s), (ended_s, _) in pairwise(stamps[2:])]
    return sorted(seconds)[len(seconds) // 4]


def _drawing_s() -> float:
    """Seconds of a step that draws from many logits per sequence, which take no time to compute."""
    import torch

    model = _llama(_LAYERS_FEW, vocab_size=_VOCAB_MORE)
    with _engine(model) as engine:
        model.lm_head.forward = partial(_blank, torch.zeros(1, _BATCH * _PROMPT_FEW, _VOCAB_MORE, dtype=model.dtype))
        return _step_s(engine, _BATCH)


def _prefilling_s(model: Any) -> float:
    """Seconds of a forward of a batch of prompts, through linear layers that do nothing."""
    import torch
    from torch import nn

    from stowage.engine.sampling_params import SamplingParams

    with _engine(model) as engine:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                blank = torch.zeros(1, _BATCH * _WIDE_TOKENS, module.out_features, dtype=model.dtype)
                module.forward = partial(_blank, blank)  # type: ignore[method-assign]
        seconds: list[float] = []
        for turn in range(_ROUNDS + 1):
            prompts = [[turn, at, *range(_WIDE_TOKENS - 2)] for at in range(_BATCH)]
            done = engine.generate(prompts, SamplingParams(1, ignore_eos=True))
            seconds.append(max(one.ttft_s for one in done))
    return min(seconds)


def _blank(blank: Any, x: Any) -> Any:
    """Of ``blank``, as many rows as ``x`` has."""
    return blank[:, : x.shape[-2]]


def _engine(model: Any) -> Any:
    from stowage.config.memory import Memory
    from stowage.engine.engine import Engine

    return Engine(model, Memory(kv_cache_memory="128MiB", max_num_seqs=_BATCH))
