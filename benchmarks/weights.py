"""Decoding with weights on disk: tokens per second, warm and cold, against plain Transformers, Accelerate and limits.

    python -m benchmarks.weights [--rounds 3] [--layers N] [--new-tokens 8] [--ways memory,stream,...]

Needs the peers' environment (`make bench-env`) and a user who may drop the page cache. A Llama-like checkpoint (hidden
2048, 16 heads over 4 KV heads, vocabulary 32,000) of about 1.7 GB. Each round runs every way in a process of its own,
in turn: batch 1 and 8, 128 tokens in. Ways: `memory` (plain Transformers); `mapped`, `stream`, `half` (ours: over the
page cache, all from disk, half of the layers from disk), and the same in the engine (`engine-mapped`, ...), which has
its own kernels; `accelerate` (`disk_offload`), `accelerate-half` (`dispatch_model`, every second layer on disk),
`transformers` (`device_map` to disk), `airllm`, `llamacpp` (which maps a GGUF file of the same weights into memory);
`lossless-stream` (`stream` of what `stowage pack --lossless` wrote, its limit that of the bytes before). Warm: all of
the checkpoint is in the page cache when the prompts come. Greedy tokens of all must be the same, but for llama.cpp's
and the engine's, which round otherwise, and those with packed weights: `int8-memory`, `int8-mapped`, `int8-stream` and
the same with int4 (`stowage pack`), another model. Whatever is packed is compared with the cold rate of `stream` too.

The limit of a cold step is the larger of its bytes over the rate of direct reads of the checkpoint itself, read before,
measured in the same round, and the time of the same step in memory. The rate of a file that nobody has read is printed
beside it: the disk of a virtual machine may answer from its host's memory.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import gguf_llama, limits, models
from benchmarks._peer import PYTHON, Peer
from benchmarks._report import median_spread, write_result
from stowage.evaluation.pack import pack, pack_lossless

PEERS = Path(__file__).parent / "peers"
LLAMACPP = "llamacpp"
LOSSLESS = "lossless-stream"
ENGINE = ("engine-mapped", "engine-stream", "engine-half")
SCRIPTS = {LLAMACPP: "llamacpp_engine.py", "engine": "engine_weights.py"}
"""By what a way begins with; of all other ways: `weights_engine.py`."""
PACKED = tuple(f"{form}-{way}" for form in ("int8", "int4") for way in ("memory", "mapped", "stream"))
WAYS = (
    "memory",
    "mapped",
    "stream",
    "half",
    *ENGINE,
    "accelerate",
    "accelerate-half",
    "transformers",
    "airllm",
    LLAMACPP,
    LOSSLESS,
    *PACKED,
)
ALWAYS_WARM = ("memory", "int8-memory", "int4-memory")
BATCHES = (1, 8)
PROMPT_TOKENS = 128
WARM_TOKENS = 8
"""Decoded before what is measured warm: some do things once, as the engine, which records steps at the fifth."""
READS = {"disk": "of the checkpoint, read before", "disk_first": "of a new file"}
HIDDEN, INNER, HEADS, KV_HEADS = 2048, 8192, 16, 4


def checkpoint(directory: Path, dtype: str, layers: int, gguf: bool = False) -> dict[str, int]:
    """Write it, and as a GGUF file beside it if that is wanted; bytes of a layer, of a table, and of all weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama",
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HIDDEN // HEADS,
        vocab_size=models.VOCAB,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(directory, max_shard_size="1GB")
    if gguf:
        gguf_llama.write(model, directory.with_suffix(".gguf"))
    layer_bytes = sum(p.numel() * p.element_size() for p in model.model.layers[0].parameters())
    table_bytes = model.lm_head.weight.numel() * model.lm_head.weight.element_size()
    return {"layer": layer_bytes, "table": table_bytes, "all": layers * layer_bytes + 2 * table_bytes}


def measure(way: str, path: Path, dtype: str, new_tokens: int) -> dict[str, Any]:
    """One process: seconds per step, by batch and warmth."""
    with running(way, path, dtype) as peer:
        found: dict[str, Any] = {"loaded_s": peer.ready["loaded_s"]}
        for batch in BATCHES:
            for warmth in ("warm", "cold"):
                if warmth == "cold" and way in ALWAYS_WARM:
                    continue
                command = {"batch": batch, "prompt_tokens": PROMPT_TOKENS, "new_tokens": new_tokens}
                if warmth == "warm":
                    peer.ask(**command | {"new_tokens": WARM_TOKENS, "cold": False})
                    read_through(path)
                found[f"{warmth}, batch {batch}"] = peer.ask(**command, cold=warmth == "cold")
    return found


def read_through(path: Path) -> None:
    """All files of the checkpoint and beside it are in the page cache, where there is space for them."""
    for file in path.parent.rglob("*"):
        if file.is_file() and file.suffix in (".safetensors", ".gguf"):
            with file.open("rb", buffering=0) as whole:
                while whole.read(1 << 24):
                    pass


@contextmanager
def running(way: str, path: Path, dtype: str, before: Sequence[str] = ()) -> Iterator[Peer]:
    """One process with the checkpoint at ``path``, and a directory for what it writes beside it. ``before``: what its
    command begins with.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        model = path.with_name(way.partition("-")[0]) if way in (*PACKED, LOSSLESS) else path
        script = PEERS / SCRIPTS.get(way.partition("-")[0], "weights_engine.py")
        model = path.with_suffix(".gguf") if way.startswith(LLAMACPP) else model
        peer = Peer([*before, PYTHON, script, way, model, dtype, scratch])
        try:
            yield peer
        finally:
            peer.end()


def report(rounds: list[dict[str, Any]], sizes: dict[str, int], layers: int) -> dict[str, Any]:
    """Print tokens per second, the ratio to memory and to the limit of the same round; the numbers to keep."""
    kept: dict[str, Any] = {}
    half_bytes = layers // 2 * sizes["layer"]
    offloaded = {
        "accelerate": sizes["all"],
        "accelerate-half": half_bytes,
        "transformers": sizes["all"] - sizes["table"],
        LLAMACPP: sizes["all"] - sizes["table"],
    }
    for case in [f"{warmth}, batch {batch}" for batch in BATCHES for warmth in ("warm", "cold")]:
        print(case)
        for way in WAYS:
            taken = [r for r in rounds if case in r.get(way, {})]
            if not taken:
                continue
            batch = int(case.rpartition(" ")[2])
            step_s = [sum(r[way][case]["steps_s"]) / len(r[way][case]["steps_s"]) for r in taken]
            rate = median_spread([batch / s for s in step_s])
            entry: dict[str, Any] = {"tokens_per_s": rate}
            entry["prefill_s"] = median_spread([r[way][case]["prefill_s"] for r in taken])
            entry["peak_bytes"] = max(r[way][case]["peak"] for r in taken)
            entry["own_bytes"] = max(r[way][case]["own"] for r in taken)
            text = f"  {way:<16} {rate.median:7.2f} tokens/s ({rate.least:.2f} to {rate.largest:.2f})"
            text += f"  prefill {entry['prefill_s'].median:.2f} s, peak {entry['peak_bytes'] / 1e9:.2f} GB"
            compared = [(s, r) for s, r in zip(step_s, taken, strict=True) if "memory" in r]
            plain_s = [_mean(r["memory"][f"warm, batch {batch}"]["steps_s"]) for _, r in compared]
            if plain_s:
                entry["of_memory"] = median_spread([m / s for m, (s, _) in zip(plain_s, compared, strict=True)])
                text += f"  {entry['of_memory'].median:6.1%} of memory"
            whole = [(s, r["stream"][case]["steps_s"]) for s, r in zip(step_s, taken, strict=True) if "stream" in r]
            if way in (*PACKED, LOSSLESS) and whole and case.startswith("cold"):
                entry["of_stream"] = median_spread([_mean(unpacked) / s for s, unpacked in whole])
                text += f"  {entry['of_stream'].median:.2f} x stream"
            counted = "stream" if way == LOSSLESS and "stream" in taken[0] else way
            step_bytes = int(taken[0][counted][case]["stats"].get("pass_bytes", offloaded.get(way, 0)))
            if plain_s and step_bytes and (case.startswith("cold") or way.endswith(("stream", "half"))):
                limit_s = [max(step_bytes / r["disk"], m) for m, (_, r) in zip(plain_s, compared, strict=True)]
                entry["of_limit"] = median_spread([a / s for a, (s, _) in zip(limit_s, compared, strict=True)])
                text += f"  {entry['of_limit'].median:6.1%} of the limit ({step_bytes / 1e9:.2f} GB a step)"
            print(text)
            kept.setdefault(case, {})[way] = entry
    return kept


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default=models.native_dtype())
    parser.add_argument("--layers", type=int, default=0, help="of the model; 0: about 1.7 GB")
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--directory", type=Path, default=Path.home() / ".cache")
    parser.add_argument("--name", default="weights", help="of the result's file")
    asked = parser.parse_args()
    ways = asked.ways.split(",")
    layers = asked.layers or (14 if asked.dtype == "bfloat16" else 6)
    with tempfile.TemporaryDirectory(dir=asked.directory) as name:
        path = Path(name) / "model"
        sizes = checkpoint(path, asked.dtype, layers, gguf=LLAMACPP in ways)
        for form in sorted({way.partition("-")[0] for way in ways if way in PACKED}):
            pack(str(path), path.with_name(form), form)
        if LOSSLESS in ways:
            pack_lossless(str(path), path.with_name("lossless"))
        rounds: list[dict[str, Any]] = []
        for number in range(asked.rounds):
            shard = max(path.glob("*.safetensors"), key=lambda file: file.stat().st_size)
            found: dict[str, Any] = {
                "disk": limits.direct_reread_bytes_per_s(shard),
                "disk_first": limits.direct_read_bytes_per_s(Path(name), 1 << 30),
            }
            rates = ", ".join(f"{found[what] / 1e9:.2f} GB/s {said}" for what, said in READS.items())
            print(f"round {number + 1} of {asked.rounds}: direct reads {rates}")
            for way in ways:
                found[way] = measure(way, path, asked.dtype, asked.new_tokens)
                steps = [_mean(v["steps_s"]) for k, v in found[way].items() if "batch" in k]
                print(f"  {way:<16} loaded in {found[way]['loaded_s']:5.1f} s, steps of", *(f"{s:.2f}" for s in steps))
            for batch in BATCHES:
                same = [way for way in ways if way not in (*PACKED, *ENGINE, LLAMACPP)]
                said = {str(v["tokens"]) for w in same for k, v in found[w].items() if k.endswith(f"batch {batch}")}
                assert len(said) <= 1, "an answer changed"
            rounds.append(found)
    kept = report(rounds, sizes, layers)
    reads = {f"direct_{what}_bytes_per_s": median_spread([r[what] for r in rounds]) for what in READS}
    write_result(asked.name, {"dtype": asked.dtype, "layers": layers, "bytes": sizes, **reads, "results": kept})


if __name__ == "__main__":
    main()
