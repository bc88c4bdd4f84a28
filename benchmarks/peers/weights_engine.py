"""A Transformers model whose weights lie somewhere, in a process of its own, for `benchmarks.weights`.

    python benchmarks/peers/weights_engine.py WAY MODEL DTYPE SCRATCH

Commands are JSON lines on stdin: {"batch": 1, "prompt_tokens": 128, "new_tokens": 8, "cold": true}; answers are seconds
of the prompt and of each step, and the tokens. With "text", ids, its tokens are read instead of random ones and the
answer's own. Ways: memory, mapped, stream, half, experts:BYTES (ours: Stowage's sources must be on the path; int8- and
int4- before the first three, lossless- before stream: the model is a packed one), accelerate, accelerate-half,
transformers, airllm (the peers').
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

OURS = ("mapped", "stream", "half", "experts")
DIRECT = ("stream", "half", "experts")
"""They read past the page cache, and ahead."""


def load(way: str, path: str, dtype: str, scratch: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    if way.endswith("-memory"):
        from stowage.models import loading

        return _in_memory(loading.load(path, dtype).model)
    if way.partition(":")[0] in OURS:
        import stowage

        if way.startswith("experts:"):
            return stowage.offload(path, device_memory=way.partition(":")[2], dtype=dtype)
        if way == "mapped":
            return stowage.offload(path, weights="*=mapped", host_memory="100%", dtype=dtype)
        if way == "stream":
            return stowage.offload(
                path, weights="lm_head=stream,model.layers.*=stream", device_memory="100%", dtype=dtype
            )
        return stowage.offload(path, weights="last 1 of 2=stream", dtype=dtype)
    kind = getattr(torch, dtype)
    if way == "memory":
        return _in_memory(AutoModelForCausalLM.from_pretrained(path, dtype=kind).eval())
    if way == "transformers":
        places = {
            "model.embed_tokens": "cpu",
            "model.norm": "cpu",
            "model.rotary_emb": "cpu",
            "model.layers": "disk",
            "lm_head": "disk",
        }
        return AutoModelForCausalLM.from_pretrained(path, dtype=kind, device_map=places, offload_folder=scratch).eval()
    if way == "airllm":
        from airllm.airllm_base import AirLLMBaseModel

        AirLLMBaseModel.get_tokenizer = lambda _model, **_given: None  # the checkpoint has none, and ids are given
        with contextlib.redirect_stdout(sys.stderr):
            return AirLLMBaseModel(path, device="cpu", dtype=kind, layer_shards_saving_path=scratch)
    from accelerate import disk_offload, dispatch_model

    model = AutoModelForCausalLM.from_pretrained(path, dtype=kind).eval()
    if way == "accelerate":
        return disk_offload(model, offload_dir=scratch, execution_device=torch.device("cpu"))
    layers = AutoConfig.from_pretrained(path).num_hidden_layers
    halves = {f"model.layers.{n}": "disk" if n % 2 else "cpu" for n in range(layers)}
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu", **halves}
    return dispatch_model(model, places, main_device="cpu", offload_dir=scratch)


def _in_memory(model: Any) -> Any:
    """From the mapped file into memory."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def drop_page_cache() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n", encoding="ascii")


def run(
    model: Any, way: str, batch: int, prompt_tokens: int, new_tokens: int, cold: bool, text: list[int] | None = None
) -> dict[str, Any]:
    """Greedy decoding, one forward at a time. Cold: nothing is in the page cache when a forward begins. What reads past
    the page cache reads ahead too: between its forwards nothing is dropped, so that no time is given to it.
    """
    import torch
    from transformers import DynamicCache

    generator = torch.Generator().manual_seed(batch)
    ids = torch.randint(5, model.config.vocab_size, (batch, prompt_tokens), generator=generator)
    given = torch.tensor(text)[None] if text is not None else None
    ids = given[:, :prompt_tokens] if given is not None else ids
    before: dict[str, float] = {}
    Path("/proc/self/clear_refs").write_text("5\n", encoding="ascii")
    cache, seconds, tokens = DynamicCache(config=model.config), [], []
    for step in range(1 + new_tokens):
        if cold and (step == 0 or way not in DIRECT):
            drop_page_cache()
        began_s = time.perf_counter()
        with torch.inference_mode():
            out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ids = out.logits[:, -1:].argmax(-1)
        seconds.append(time.perf_counter() - began_s)
        tokens.append(ids[:, 0].tolist())
        ids = given[:, prompt_tokens + step :][:, :1] if given is not None else ids
        before = before or (model.stowage.stats() if way in OURS else {})
    stats = model.stowage.stats() if way in OURS else {}
    decoded = {name: value - before[name] for name, value in stats.items()}
    found = {"prefill_s": seconds[0], "steps_s": seconds[1:], "tokens": tokens, "stats": stats, "decoded": decoded}
    return {**found, "peak": status("VmHWM"), "own": status("RssAnon")}


def status(name: str) -> int:
    """Bytes, as the kernel counts this process's."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def main() -> None:
    way, path, dtype, scratch = sys.argv[1:5]
    began_s = time.perf_counter()
    packed, _, plain = way.partition("-")
    if packed in ("int8", "int4", "lossless"):  # computed with under the same name, but for what is in memory
        way = plain if plain != "memory" else way
    model = load(way, path, dtype, scratch)
    print(json.dumps({"loaded_s": time.perf_counter() - began_s}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(model, way.partition(":")[0], **json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
