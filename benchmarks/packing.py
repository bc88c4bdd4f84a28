"""What fewer bits cost: perplexity of `stowage pack`'s forms and of llama.cpp's mixtures, by bits of a weight.

    python -m benchmarks.packing CHECKPOINT [--text FILE] [--tokens 8192] [--ways "mixed 5,Q4_K_M"] [--as-published]

Needs the peers' environment (`make bench-env`). CHECKPOINT: the directory of a Llama with a tokenizer, in 16 or 32
bits. Both quantise the same bfloat16 weights; the embedding, which is the output layer too, is in 8 bits. The engine
scores all of them on the same tokens of the text, in windows of 512; llama.cpp scores its own too. Ours are fitted to
other text that comes with Stowage; llama.cpp's read none.

Weights that had been in 4 bits before lie on a grid, and what has the same grid loses nothing by them. So all channels
are first multiplied by random factors between 0.78 and 1.28 that leave the function as it is: what a norm, or the
matrix before, multiplies, the next one divides. `--as-published` leaves the weights alone.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks import gguf_llama, models
from benchmarks._peer import PYTHON, Peer
from benchmarks._report import read_result, write_result
from stowage import Engine, Memory
from stowage.demo import corpus
from stowage.evaluation import calibration, pack
from stowage.evaluation import perplexity as scoring

OURS: Final = {
    "int8": "int8",
    "int4": "int4_32",
    "q4_k": "q4_k",
    "mxfp4": "mxfp4_block",
    "mixed 4.5": 4.5,
    "mixed 5": 5.0,
    "mixed 5.5": 5.5,
    "mixed 6": 6.0,
}
THEIRS: Final = {"Q8_0": 7, "Q4_0": 2, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_M": 17}
"""Of llama.cpp's `llama_ftype`."""
PEERS: Final = Path("benchmarks/peers")
WINDOW_TOKENS: Final = 512
MEMORY: Final = Memory(kv_cache_memory="64MiB")


def off_the_grid(model: Any) -> None:
    """Multiply channels of the Llama ``model`` by random factors that leave its function as it is."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def factors(count: int) -> Any:
        return (torch.rand(count, generator=generator) * 0.5 - 0.25).exp()

    config = model.config
    groups = config.num_attention_heads // config.num_key_value_heads
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, after in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            by = factors(config.hidden_size)
            norm.weight.data /= by
            for linear in after:
                linear.weight.data *= by
        by = factors(config.intermediate_size)
        mlp.up_proj.weight.data *= by[:, None]
        mlp.down_proj.weight.data /= by
        by = factors(attention.v_proj.out_features)
        attention.v_proj.weight.data *= by[:, None]
        heads = by.view(config.num_key_value_heads, 1, -1).expand(-1, groups, -1)  # those of a group read one value
        attention.o_proj.weight.data /= heads.reshape(-1)


def packed(way: str, source: Path, out: Path, read: str) -> float:
    """Write `stowage pack`'s form ``way``: bits of a weight in the layers' matrices."""
    form = OURS[way]
    weights = "mixed" if isinstance(form, float) else way
    if weights == "int8":
        return pack.pack(str(source), out, weights).bits
    return pack.pack(
        str(source), out, weights, fit=lambda part: calibration.fit(str(source), MEMORY, read, form, part)
    ).bits


def quantised(way: str, plain: Path, out: Path) -> float:
    """Write llama.cpp's mixture ``way``: bits of a weight in the layers' matrices."""
    import gguf

    script = PEERS / "llamacpp_quantize.py"
    subprocess.run([PYTHON, script, plain, out, str(THEIRS[way]), "mixture"], check=True, capture_output=True)
    tensors = gguf.GGUFReader(out).tensors
    found = [t for t in tensors if t.name.startswith("blk.") and len(t.shape) == 2]
    return float(8 * sum(t.n_bytes for t in found) / sum(t.n_elements for t in found))


def perplexity(model: Path, tokenizer: Any, ids: list[int]) -> float:
    with Engine(model, MEMORY, dtype="bfloat16", tokenizer=tokenizer) as engine:
        total, scored = scoring.score(engine, ids)
    return math.exp(total / scored)


def perplexity_of_llamacpp(path: Path, ids: list[int]) -> float:
    peer = Peer([PYTHON, PEERS / "llamacpp_engine.py", "llamacpp", path, "bfloat16", path.parent])
    windows = [ids[at : at + WINDOW_TOKENS] for at in range(0, len(ids), WINDOW_TOKENS)]
    scores = peer.ask(score=windows)["scores"]
    peer.end()
    return math.exp(sum(scores) / (len(ids) - len(windows)))


def _earlier(name: str, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What runs with the same settings found before: not all has to be measured at once."""
    written = read_result(name)
    return dict(written["forms"]) if written.get("settings") == settings else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--text", type=Path, help="plain text, instead of what `stowage pack` scores")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--ways", default=",".join((*OURS, *THEIRS)), help="separated by commas")
    parser.add_argument("--as-published", action="store_true")
    parser.add_argument("--name", default="packing", help="of the result's file")
    asked = parser.parse_args()
    import torch
    from transformers import AutoTokenizer

    text = asked.text.read_text(encoding="utf-8") if asked.text else corpus.heldout_text()
    tokenizer = AutoTokenizer.from_pretrained(asked.checkpoint)
    ids = tokenizer.encode(text)[: asked.tokens]
    text_name = str(asked.text or "held-out text")
    settings = {"tokens": len(ids), "as_published": asked.as_published, "text": text_name}
    table: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="stowage-bench-") as name:
        scratch = Path(name)
        source, plain = scratch / "model", scratch / "plain.gguf"
        built = models.from_checkpoint(asked.checkpoint, "float32")
        if not asked.as_published:
            off_the_grid(built)
        built = built.to(torch.bfloat16)
        built.save_pretrained(source)
        tokenizer.save_pretrained(source)
        gguf_llama.write(built, plain, source / "tokenizer.json")
        before = perplexity(source, tokenizer, ids)
        of_peer = perplexity_of_llamacpp(plain, ids)
        table |= _earlier(asked.name, settings)
        table["bfloat16"] = {"bits": 16.0, "perplexity": before, "times": 1.0, "by_llamacpp": of_peer}
        for way in asked.ways.split(","):
            out = scratch / (way.replace(" ", "-") + (".gguf" if way in THEIRS else ""))
            began_s = time.perf_counter()
            bits = packed(way, source, out, corpus.calibration_text()) if way in OURS else quantised(way, plain, out)
            spent_s = time.perf_counter() - began_s
            found = perplexity(out, tokenizer, ids)
            size = sum(file.stat().st_size for file in (out.glob("*.safetensors") if out.is_dir() else [out]))
            table[way] = {"bits": bits, "bytes": size, "seconds": spent_s, "perplexity": found, "times": found / before}
            if way in THEIRS:
                table[way]["by_llamacpp"] = perplexity_of_llamacpp(out, ids)
            print(way, table[way], flush=True)
            write_result(asked.name, {"settings": settings, "forms": table})
    print("| | bits of a weight | MB | perplexity | times | by llama.cpp itself |\n|---|---|---|---|---|---|")
    for way, row in sorted(table.items(), key=lambda item: item[1]["bits"]):
        own = f"{row['by_llamacpp']:.3f}" if "by_llamacpp" in row else ""
        size = f"{row['bytes'] / 1e6:.0f}" if "bytes" in row else ""
        print(f"| {way} | {row['bits']:.2f} | {size} | {row['perplexity']:.3f} | {row['times']:.4f} | {own} |")


if __name__ == "__main__":
    main()
