"""One engine in a process of its own: answers all prompts of a round, given together. For `benchmarks.multi_turn` and
`benchmarks.engine`.

    python benchmarks/peers/turns.py WAY MODEL DTYPE DEVICE_KV_BYTES HOST_BYTES [DEVICE]

WAY: `stowage`, `stowage-device` (no tier below the device), `batch-dependent`, `int8-activations`, `torch` (Stowage
without its kernels), `transformers` (one prompt after the other, no reuse), `generate` (Transformers' `generate()` of
all prompts as one batch; they are of one length), `continuous` (its continuous batching), `vllm`, `vllm-no-reuse`
(prefix caching off), `vllm-stowage` (with the plugin), `llamacpp` (a GGUF file that is read into memory), `openvino` (a
GGUF file).
Commands are JSON lines on stdin, {"prompts": [[...], ...], "tokens": 16}; an answer has for each prompt the seconds
from the round's begin to its first token, how many of its tokens were reused, and its greedy tokens. All of Stowage's
ways and Transformers run in Stowage's own environment, those of vLLM, llama.cpp and OpenVINO in the peers', with
Stowage's sources on its path. DEVICE: what they compute on, all but these three; a CPU if it is left out.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

SEQUENCES_MAX, CONTEXT_TOKENS = 20, 1536

Round = Callable[[list[list[int]], int], dict[str, Any]]


def stowage(model: str, dtype: str, device_bytes: int, host_bytes: int, device: str, **more: Any) -> Round:
    from stowage import openmp

    openmp.wait_briefly()  # as `stowage run` and `stowage serve`
    from stowage import Engine, Memory, SamplingParams

    memory = Memory(kv_cache_memory=device_bytes, host_memory=host_bytes, max_num_seqs=SEQUENCES_MAX)
    engine = Engine(model, memory, dtype=dtype, device=device, **more)

    def answer(prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
        done = engine.generate(list(prompts), params)
        return {
            "ttft_s": [one.ttft_s for one in done],
            "reused": [sum(one.reused_tokens.values()) for one in done],
            "tokens": [one.token_ids for one in done],
        }

    return answer


def without_kernels(model: str, dtype: str, device_bytes: int, host_bytes: int, device: str) -> Round:
    os.environ["STOWAGE_PURE_PYTHON"] = "1"
    return stowage(model, dtype, device_bytes, host_bytes, device)


def transformers(model: str, dtype: str, device: str) -> Round:
    import torch
    from transformers import DynamicCache

    loaded = _loaded(model, dtype, device)

    @torch.inference_mode()
    def answer(prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        began_s = time.perf_counter()
        found: dict[str, Any] = {"ttft_s": [], "reused": [0] * len(prompts), "tokens": []}
        for prompt in prompts:
            cache = DynamicCache(config=loaded.config)
            ids = torch.tensor([prompt], device=device)
            drawn: list[int] = []
            while len(drawn) < tokens:
                logits = loaded(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
                drawn.append(int(logits[0, -1].argmax()))
                ids = torch.tensor([drawn[-1:]], device=device)
                if len(drawn) == 1:
                    found["ttft_s"].append(time.perf_counter() - began_s)
            found["tokens"].append(drawn)
        return found

    return answer


def _loaded(model: str, dtype: str, device: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).to(device).eval()


def generate(model: str, dtype: str, device: str) -> Round:
    import torch

    loaded = _loaded(model, dtype, device)

    @torch.inference_mode()
    def answer(prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        ids = torch.tensor(prompts, device=device)
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": tokens}
        out = loaded.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return {"tokens": out[:, ids.shape[1] :].tolist()}

    return answer


def continuous(model: str, dtype: str, device: str) -> Round:
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    loaded = _loaded(model, dtype, device)

    def answer(prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=tokens)
        done = loaded.generate_batch(
            inputs=prompts,
            generation_config=config,
            continuous_batching_config=ContinuousBatchingConfig(num_blocks=512, max_batch_tokens=CONTEXT_TOKENS),
            progress_bar=False,
        )
        return {"tokens": [one.generated_tokens for one in done.values()]}

    return answer


def vllm(model: str, dtype: str, device_bytes: int, host_bytes: int, reuse: bool = True) -> Round:
    from vllm_engine import start  # beside this file

    llm = start(
        model,
        dtype,
        {"host_memory": host_bytes} if host_bytes else None,
        enable_prefix_caching=reuse,
        max_model_len=CONTEXT_TOKENS,
        max_num_seqs=SEQUENCES_MAX,
        max_num_batched_tokens=CONTEXT_TOKENS,
        kv_cache_memory_bytes=device_bytes,
    )
    from vllm import SamplingParams

    engine = llm.llm_engine
    asked = 0

    def answer(prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        nonlocal asked
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        began_s = time.perf_counter()
        names = [str(asked + at) for at in range(len(prompts))]
        asked += len(prompts)
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        first: dict[str, float] = {}
        done: dict[str, Any] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.outputs and output.outputs[0].token_ids:
                    first.setdefault(output.request_id, time.perf_counter() - began_s)
                done[output.request_id] = output
        return {
            "ttft_s": [first[name] for name in names],
            "reused": [done[name].num_cached_tokens for name in names],
            "tokens": [list(done[name].outputs[0].token_ids) for name in names],
        }

    return answer


def llamacpp(model: str) -> Round:
    import numpy as np
    from llamacpp_engine import Model  # beside this file

    loaded = Model(model, mapped=False)

    def answer(prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        context = loaded.context(len(prompts), len(prompts[0]) + tokens)
        ids, begin, drawn = np.array(prompts), 0, []
        for _ in range(tokens):
            ids, begin = loaded.forward(context, ids, begin), begin + ids.shape[1]
            drawn.append(ids[:, 0])
        loaded.free(context)
        return {"tokens": np.stack(drawn, 1).tolist()}

    return answer


def openvino(model: str) -> Round:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    pipeline = genai.LLMPipeline(model, "CPU")

    def answer(prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        ids = np.array(prompts, dtype=np.int64)
        config = genai.GenerationConfig(max_new_tokens=tokens, min_new_tokens=tokens, ignore_eos=True, do_sample=False)
        given = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        return {"tokens": [list(drawn) for drawn in pipeline.generate(given, config).tokens]}

    return answer


def main() -> None:
    way, model, dtype, device_bytes, host_bytes, *rest = sys.argv[1:]
    device = rest[0] if rest else "cpu"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed goes to stderr: the answers have the pipe for themselves
    sizes = (int(device_bytes), int(host_bytes))
    ways: dict[str, Callable[[], Round]] = {
        "stowage": lambda: stowage(model, dtype, *sizes, device),
        "stowage-device": lambda: stowage(model, dtype, sizes[0], 0, device),
        "batch-dependent": lambda: stowage(model, dtype, sizes[0], 0, device, batch_dependent=True),
        "int8-activations": lambda: stowage(model, dtype, sizes[0], 0, device, int8_activations=True),
        "torch": lambda: without_kernels(model, dtype, sizes[0], 0, device),
        "generate": lambda: generate(model, dtype, device),
        "continuous": lambda: continuous(model, dtype, device),
        "transformers": lambda: transformers(model, dtype, device),
        "llamacpp": lambda: llamacpp(model),
        "openvino": lambda: openvino(model),
        "vllm": lambda: vllm(model, dtype, sizes[0], 0),
        "vllm-no-reuse": lambda: vllm(model, dtype, sizes[0], 0, reuse=False),
        "vllm-stowage": lambda: vllm(model, dtype, *sizes),
    }
    answer = ways[way]()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(answer(command["prompts"], command["tokens"])), file=answers, flush=True)


if __name__ == "__main__":
    main()
