"""What a forward of the engine takes besides its matrix products. Measured on tiny models, through the engine itself.

    a step        scheduling, sampling, handing tokens over           by a model of few layers
    a layer       calls, norms, rotation, attention over few keys     by one of more layers
    a sequence    its share of that, in a batch                       by a batch
    an element    of activations: what norms, rotation and gates do   by a prompt, through linear layers that do nothing
    a mixture     routing, for each layer that has experts            by models with few and many experts that are met
    an expert     the calls for each expert that is met

Runs in the process of ``compute``: torch and Transformers are imported here. Owns no number.
"""

from __future__ import annotations

import time
from functools import partial
from itertools import pairwise
from typing import Any

_LAYERS_FEW, _LAYERS_MORE = 2, 10
_BATCH = 8
_TOKENS = 24
_WIDE, _WIDE_TOKENS = 1024, 64
_EXPERTS, _CHOSEN_FEW, _CHOSEN_MORE = 32, 2, 16
_ROUNDS = 3


def measure() -> dict[str, float]:
    """Fields of ``Machine``: ``step_s``, ``layer_s``, ``sequence_s``, ``elements_per_s``, ``mixture_s``,
    ``expert_s``.
    """
    few_s, few_batch_s = _steps_s(_llama(_LAYERS_FEW), 1, _BATCH)
    more_s, more_batch_s = _steps_s(_llama(_LAYERS_MORE), 1, _BATCH)
    layers = _LAYERS_MORE - _LAYERS_FEW
    layer_s = max((more_s - few_s) / layers, 1e-9)
    sequence_s = max((more_batch_s - few_batch_s) / layers - layer_s, 0.0) / (_BATCH - 1)
    step_s = max(few_s - _LAYERS_FEW * layer_s, 1e-9)
    wide_s = _prefilling_s(_llama(_LAYERS_FEW, hidden=_WIDE, inner=4 * _WIDE))
    elements = _LAYERS_FEW * _BATCH * _WIDE_TOKENS * 5 * _WIDE
    (met_few_s,) = _steps_s(_mixture(_CHOSEN_FEW), 1)
    (met_more_s,) = _steps_s(_mixture(_CHOSEN_MORE), 1)
    expert_s = max((met_more_s - met_few_s) / (_CHOSEN_MORE - _CHOSEN_FEW) / _LAYERS_FEW, 1e-9)
    return {
        "step_s": step_s,
        "layer_s": layer_s,
        "sequence_s": sequence_s,
        "elements_per_s": elements / max(wide_s - few_s, 1e-9),
        "expert_s": expert_s,
        "mixture_s": max((met_few_s - few_s) / _LAYERS_FEW - _CHOSEN_FEW * expert_s, 1e-9),
    }


def _llama(layers: int, hidden: int = 64, inner: int = 256) -> Any:
    return _built("llama", layers, hidden, intermediate_size=inner)


def _mixture(chosen: int) -> Any:
    return _built(
        "qwen3_moe", _LAYERS_FEW, 64, moe_intermediate_size=64, num_experts=_EXPERTS, num_experts_per_tok=chosen
    )


def _built(family: str, layers: int, hidden: int, **fields: Any) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 16 if hidden == 64 else hidden // 64,
        num_key_value_heads=2,
        head_dim=16 if hidden == 64 else 64,
        vocab_size=64,
        **fields,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def _steps_s(model: Any, *batches: int) -> list[float]:
    """Seconds of a decoding step with each of ``batches``."""
    with _engine(model) as engine:
        return [_step_s(engine, batch) for batch in batches]


def _step_s(engine: Any, batch: int) -> float:
    from stowage.engine.sampling import SamplingParams

    params = SamplingParams(_TOKENS, ignore_eos=True)
    seconds: list[float] = []
    for turn in range(_ROUNDS):
        stamps: list[float] = []

        def heard(_delta: Any, stamps: list[float] = stamps) -> None:
            stamps.append(time.perf_counter())

        prompts = [[turn % 60, at, 1, 2, 3, 4] for at in range(batch)]
        requests = [engine.submit(prompt, params) for prompt in prompts[1:]]
        requests.append(engine.submit(prompts[0], params, heard))
        for request in requests:
            request.wait()
        seconds += [after - before for before, after in pairwise(stamps[2:])]
    return sorted(seconds)[len(seconds) // 4]


def _prefilling_s(model: Any) -> float:
    """Seconds of a forward of a batch of prompts, through linear layers that do nothing."""
    import torch
    from torch import nn

    from stowage.engine.sampling import SamplingParams

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

    return Engine(model, Memory(kv_cache_memory="8MiB", max_num_seqs=_BATCH))
