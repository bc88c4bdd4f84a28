"""Lossless compression: bytes at rest of real KV, loads and stores above the disk's own rate, and what codes there are.

    python -m benchmarks.lossless [--json] [--rounds 5] [--total-mib 512] [--model .real-model/SmolLM2-135M-Instruct]
        [--only codes|1024|4096|first_token|vllm|weights ...]

KV is that of a real model (`make real-model`) in the engine's own chunks, of five documents: prose in English, German
and French, source code, JSON. Its weights are dequantised 4-bit values, which any code flatters, so weights are those
of the demo (trained in bfloat16) and random normal ones. Disk: the chunks of `benchmarks.tiers` filled with that KV,
written as they are, packed where that pays (the default) and packed always, in turn in each round, each after writing
and reading one file of the same raw bytes with direct I/O; after `make bench-env` beside LMCache's file tier and
vLLM's, which store raw bytes. Effective rates count raw bytes. First tokens: a prompt that lies in one tier alone, of
the engine's and of the plugin's for vLLM.
Codes: each on the same bytes, ratio and raw bytes per second of processor time; those whose package is not installed
(zstandard, lz4, zipnn) are left out. With `--only` the rest of the result file stays.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from stowage import openmp

PEERS_ENVIRONMENT = dict(os.environ)

openmp.wait_briefly()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from benchmarks._codes import codes  # noqa: E402
from benchmarks._documents import documents  # noqa: E402
from benchmarks._peer import PYTHON, Peer  # noqa: E402
from benchmarks._report import describe_machine, median_spread, read_result, write_result  # noqa: E402
from benchmarks._tiers import Stowage  # noqa: E402
from benchmarks.limits import direct_reread_bytes_per_s  # noqa: E402
from benchmarks.tiers import SCRIPT, Contender, Limits, drop_page_cache, parts_of  # noqa: E402
from stowage.config.memory import Memory  # noqa: E402
from stowage.demo import corpus  # noqa: E402
from stowage.engine.engine import Engine  # noqa: E402
from stowage.engine.sampling_params import SamplingParams  # noqa: E402
from stowage.weights.checkpoint import Checkpoint, Segment  # noqa: E402
from stowage.weights.lossless import writer  # noqa: E402
from stowage.weights.placement import RING_SLOTS  # noqa: E402
from stowage.weights.reader import Read, Readers  # noqa: E402
from stowage.weights.ring import Ring  # noqa: E402

MIB = 1 << 20
MODEL = Path(".real-model/SmolLM2-135M-Instruct")
CHUNKS = (1024, 4096)
WAYS = {"raw": "off", "auto": "auto", "packed": "on"}
"""Of the disk tier, by what the tables call them: `compression`."""
PARTS = ("codes", *map(str, CHUNKS), "first_token", "vllm", "weights")
PEERS = ("lmcache_fs_native_direct", "vllm_fs")
VLLM = SCRIPT.parent / "vllm_engine.py"


def real_kv(model: Path, directory: Path, tokens: int) -> tuple[dict[str, float], bytes]:
    """Bytes at rest over raw bytes, by document, as the disk tier counts them; and raw chunks of all of them."""
    shares, chunks = {}, bytearray()
    total = saved = 0
    for what, text in documents().items():
        path = directory / what
        engine = Engine(
            str(model), Memory(kv_cache_memory="256MiB", host_memory="256MiB", disk=f"{path}:1GiB", compression="on")
        )
        try:
            assert engine.tokenizer is not None
            prompt = list(engine.tokenizer.encode(text))[:tokens]
            engine.generate([prompt], SamplingParams(max_new_tokens=1))
            store = engine.parts.store
            assert store is not None and store.flush(60.0)
            stats = store.stats()
            raw = int(stats["disk.write_bytes"]) + int(stats["disk.packed_bytes_saved"])
            shares[what] = int(stats["disk.write_bytes"]) / raw
            total, saved = total + raw, saved + int(stats["disk.packed_bytes_saved"])
            chunks += payloads(store)
        finally:
            engine.close()
    return {**shares, "all": 1 - saved / total}, bytes(chunks)


def payloads(store: Any) -> bytes:
    """What lies in the host arena, chunk after chunk."""
    arena = store.arena.numpy()
    used = np.flatnonzero(arena.reshape(-1, 4096).any(axis=1))
    return arena.reshape(-1, 4096)[used].tobytes()


def measure_codes(samples: dict[str, bytes], rounds: int) -> list[dict[str, Any]]:
    """Each code on 1 MiB pieces of each sample: share of bytes, raw GB/s both ways by one thread."""
    rows = []
    for name, pack, unpack in codes():
        for what, raw in samples.items():
            pieces = [raw[at : at + MIB] for at in range(0, len(raw), MIB)]
            packed = [pack(piece) for piece in pieces]
            assert all(unpack(one, len(piece)) == piece for one, piece in zip(packed, pieces, strict=True))
            pack_s, unpack_s = [], []
            for _ in range(rounds):
                began_s = time.process_time()
                for piece in pieces:
                    pack(piece)
                middle_s = time.process_time()
                for one, piece in zip(packed, pieces, strict=True):
                    unpack(one, len(piece))
                unpack_s.append(time.process_time() - middle_s)
                pack_s.append(middle_s - began_s)
            share = sum(map(len, packed)) / len(raw)
            rates = {"pack": len(raw) / min(pack_s) / 1e9, "unpack": len(raw) / min(unpack_s) / 1e9}
            rows.append({"code": name, "bytes": what, "share": share, **rates})
    return rows


def measure_disk(kib: int, total: int, kv: bytes, rounds: int, directory: Path, peer: Peer | None) -> dict[str, Any]:
    """Effective rates over the disk's own in the same round, in each way and of the peers; processor seconds per GB of
    ours.
    """
    count = max(4, total // (kib << 10))
    nbytes = count * (kib << 10)
    ours = Stowage(kib << 10, count, torch.frombuffer(bytearray(kv), dtype=torch.uint8))
    if peer is not None:
        peer.ask(do="start", chunk_bytes=kib << 10, count=count)
    limits = Limits(ours, directory)
    found: dict[str, list[float]] = {}
    parts, path = parts_of(count, "in order", 1), directory / "tier"
    for _ in range(rounds):
        for name in (*WAYS, *(PEERS if peer else ())):
            gc.collect()
            path.mkdir(mode=0o700)
            contender = Contender(name, ours, None if name in WAYS else peer)
            if name in WAYS:
                ours.open(path, WAYS[name])
            else:
                contender.open(path)
            contender.store(parts)  # as an engine that has run for a while: what it needs has its memory
            contender.load(parts)
            if name not in WAYS:  # their keys are those of one opening: what is there they would not store again
                contender.close()
                shutil.rmtree(path)
                path.mkdir(mode=0o700)
                contender.open(path)
            limit = limits.of_disk()
            stored_s = contender.store(parts)
            store_processor_s = ours.processor_s
            drop_page_cache(path)
            loaded_s = contender.load(parts)
            contender.close()
            shutil.rmtree(path)
            for what, seconds in (("store", stored_s), ("load", loaded_s)):
                found.setdefault(f"{name} {what} GB/s", []).append(nbytes / seconds / 1e9)
                own_s = limit["write" if what == "store" else "read"]
                found.setdefault(f"{name} {what} over the disk's", []).append(own_s / seconds)
            if name in WAYS:
                found.setdefault(f"{name} store processor s/GB", []).append(store_processor_s / nbytes * 1e9)
                found.setdefault(f"{name} load processor s/GB", []).append(ours.processor_s / nbytes * 1e9)
    limits.close()
    return {what: median_spread(values) for what, values in found.items()}


def one_tier(directory: Path) -> dict[str, dict[str, Any]]:
    """Settings with which a prompt lies in one tier, once nearer ones have forgotten it."""
    return {
        "host": {},
        "host packed": {"host_packed": "80%"},
        "disk": {"disk": f"{directory / 'kv'}:1GiB", "compression": "off"},
        "disk packed": {"disk": f"{directory / 'kv-packed'}:1GiB", "compression": "on"},
    }


def prompt_of(tokenizer: Any, tokens: int) -> list[int]:
    return list(tokenizer.encode(" ".join(documents().values())))[:tokens]


def measure_plugin(model: Path, rounds: int, tokens: int, directory: Path) -> dict[str, Any]:
    """The same of vLLM with the plugin, an engine for each tier; and bytes at rest over raw ones of its blocks."""
    ways = one_tier(directory / "vllm")
    prompt = prompt_of(AutoTokenizer.from_pretrained(model), tokens)
    engines = {
        name: Peer([PYTHON, VLLM, model, "bfloat16", json.dumps({"host_memory": "256MiB"} | settings)])
        for name, settings in ways.items()
    }
    found: dict[str, list[float]] = {}
    answers = []
    for engine in engines.values():
        answers.append(engine.ask(do="first_token", prompt=prompt)["tokens"])
        engine.ask(do="forget", host=False)
    for number in range(rounds):
        for name, engine in engines.items():
            engine.ask(do="forget", host=name != "host")
            if "disk" in ways[name]:
                drop_page_cache(Path(ways[name]["disk"].rpartition(":")[0]))
            answer = engine.ask(do="first_token", prompt=prompt)
            assert answer["cached"][0] > 0.8 * tokens, (
                f"{name}: {answer['cached']} tokens came from there"
            )  # in whole blocks
            answers.append(answer["tokens"])
            found.setdefault(f"{name} ms", []).append(answer["seconds"] * 1e3)
        other = [*prompt[:1], number + 1000, *prompt[2:]]
        computed = engines["host"].ask(do="first_token", prompt=other)
        found.setdefault("computed ms", []).append(computed["seconds"] * 1e3)
    assert all(answer == answers[0] for answer in answers), "an answer changed"
    stats = engines["disk packed"].ask(do="stats")
    saved, written = stats["disk.packed_bytes_saved"], stats["disk.write_bytes"]
    found["bytes at rest over raw bytes"] = [written / (written + saved)]
    for engine in engines.values():
        engine.end()
    return {what: median_spread(values) for what, values in found.items()}


def measure_first_tokens(model: Path, rounds: int, tokens: int, directory: Path) -> dict[str, Any]:
    """Milliseconds to the first token of a prompt that is found in one tier alone, each in turn in each round, and
    computed; tokens that a GiB of host memory holds as they are and packed.
    """
    ways = one_tier(directory)
    engines = {
        name: Engine(str(model), Memory(kv_cache_memory="128MiB", host_memory="256MiB", **settings))
        for name, settings in ways.items()
    }
    found: dict[str, list[float]] = {}
    try:
        for engine in engines.values():
            assert engine.tokenizer is not None
            prompt = prompt_of(engine.tokenizer, tokens)
            engine.generate([prompt], SamplingParams(max_new_tokens=1))
            assert engine.flush()
        for number in range(rounds):
            for name, engine in engines.items():
                engine.drop_device_cache()
                if name != "host":
                    engine.drop_host()
                if "disk" in ways[name]:
                    drop_page_cache(Path(ways[name]["disk"].rpartition(":")[0]))
                began_s = time.perf_counter()
                (completion,) = engine.generate([prompt], SamplingParams(max_new_tokens=1))
                found.setdefault(f"{name} ms", []).append((time.perf_counter() - began_s) * 1e3)
                tier = {"host": "host", "host packed": "packed"}.get(name, "disk")
                assert completion.reused_tokens[tier] > 0.9 * tokens, "it was to come from there"
            other = [*prompt[:1], number + 1000, *prompt[2:]]
            began_s = time.perf_counter()
            engines["host"].generate([other], SamplingParams(max_new_tokens=1))
            found.setdefault("computed ms", []).append((time.perf_counter() - began_s) * 1e3)
        stats = engines["host packed"].stats()["store"]
        raw = int(stats["packed.write_bytes"]) + int(stats["packed.packed_bytes_saved"])
        found["tokens per GiB, packed over as they are"] = [raw / int(stats["packed.write_bytes"])]
    finally:
        for engine in engines.values():
            engine.close()
    return {what: median_spread(values) for what, values in found.items()}


def measure_weights(rounds: int, directory: Path) -> dict[str, Any]:
    """Random normal bfloat16 tensors, read by the prefetcher into the memory that a layer computes from, as they are
    and packed: raw bytes per second over those of direct reads of the raw file in the same round. Nothing is computed
    beside it.
    """
    generator = torch.Generator().manual_seed(0)
    tensors = {f"w{n}": torch.randn(16 * MIB, generator=generator).to(torch.bfloat16) for n in range(8)}
    files = [directory / kind / "model.safetensors" for kind in ("raw", "packed")]
    for path in files:
        path.parent.mkdir()
    save_file(tensors, files[0])
    writer.write(files[:1], files[1].parent, lambda _done, _all: None)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    readers = Readers()
    found: dict[str, list[float]] = {"packed over raw bytes": [files[1].stat().st_size / files[0].stat().st_size]}
    for _ in range(rounds):
        limit = direct_reread_bytes_per_s(files[0])
        for path in files:
            drop_page_cache(directory)  # what was just written lies there
            checkpoint = Checkpoint([path])
            segments = list(checkpoint.tensors.values())

            def reads(unit: int, memory: memoryview, segments: list[Segment] = segments) -> list[Read]:
                segment = segments[unit]
                return [Read(segment.file, segment.offset, memory[: segment.length])]

            ring = Ring(len(segments), RING_SLOTS, nbytes // len(segments), reads, readers, 60.0)
            for _ in range(2):  # as in a second step: the first units were asked for while the last ones were computed
                began_s = time.perf_counter()
                for unit in range(len(segments)):
                    ring.take(unit)
                    ring.give_back(unit)
                elapsed_s = time.perf_counter() - began_s
            rate = nbytes / elapsed_s
            readers.drain(60.0)
            ring.close()
            checkpoint.close()
            found.setdefault(f"{path.parent.name} GB/s", []).append(rate / 1e9)
            found.setdefault(f"{path.parent.name} over the disk's", []).append(rate / limit)
    readers.close()
    return {what: median_spread(values) for what, values in found.items()}


def weights_samples(length: int) -> dict[str, bytes]:
    """bfloat16 of the demo's trained matrices, and random normal ones."""
    drawn = torch.randn(length // 2, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    trained = bytearray()
    with safe_open(corpus.model_path() / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            trained += file.get_tensor(name).to(torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()
    return {"random weights": drawn.view(torch.uint8).numpy().tobytes(), "demo weights": bytes(trained[:length])}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lossless", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--total-mib", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=768, help="of each document, at most")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--directory", type=Path, help="where to measure (a temporary directory)")
    parser.add_argument("--only", action="append", choices=PARTS, help="measure this alone; more than once")
    options = parser.parse_args()
    wanted = options.only or PARTS
    needs_peer = PYTHON.exists() and any(str(kib) in wanted for kib in CHUNKS)
    peer = Peer([PYTHON, SCRIPT], PEERS_ENVIRONMENT) if needs_peer else None
    found = earlier() if options.only else {"disk": {}}
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="stowage-lossless-") as name:
        directory = Path(name)
        found["kv_share"], kv = real_kv(options.model, directory, options.tokens)
        if "codes" in wanted:
            found["codes"] = measure_codes({"KV": kv[: 16 * MIB], **weights_samples(16 * MIB)}, 3)
        for kib in CHUNKS:
            if str(kib) in wanted:
                total = options.total_mib * MIB
                found["disk"][f"{kib} KiB"] = measure_disk(kib, total, kv, options.rounds, directory, peer)
        if "first_token" in wanted:
            found["first_token"] = measure_first_tokens(options.model, 3 * options.rounds, options.tokens, directory)
        if "vllm" in wanted and PYTHON.exists():
            found["vllm"] = measure_plugin(options.model, 2 * options.rounds, options.tokens, directory)
        if "weights" in wanted:
            found["weights"] = measure_weights(options.rounds, directory)
    if peer is not None:
        peer.end()
    keys = summary(found)
    write_result("lossless", {**keys, **found})
    print(json.dumps({**keys, "machine": describe_machine()}) if options.json else table(keys, found))
    return 0


def earlier() -> dict[str, Any]:
    """What the result file has."""
    kept = read_result("lossless")
    return {what: kept[what] for what in ("kv_share", *PARTS, "disk") if what in kept}


def summary(found: dict[str, Any]) -> dict[str, float]:
    """The worse one of the chunk sizes."""
    disk = found["disk"].values()
    return {
        "disk_load_share_of_raw_limit": min(case["packed load over the disk's"].median for case in disk),
        "disk_store_share_of_raw_limit": min(case["packed store over the disk's"].median for case in disk),
        "kv_bytes_share": found["kv_share"]["all"],
        "weights_cold_share_of_raw_limit": found["weights"]["packed over the disk's"].median,
        "weights_bytes_share": median(
            row["share"] for row in found["codes"] if row["code"] == "ours" and "weights" in row["bytes"]
        ),
    }


def table(keys: dict[str, float], found: dict[str, Any]) -> str:
    lines = [f"{name:32} {value:.3f}" for name, value in keys.items()]
    lines += [f"KV of {what:10} {share:.3f}" for what, share in found["kv_share"].items()]
    lines += [
        f"{row['code']:18} {row['bytes']:15} {row['share']:.3f}  {row['pack']:5.2f} and {row['unpack']:5.2f} GB/s"
        for row in found["codes"]
    ]
    lines += [f"first token {what:42} {spread.median:.2f}" for what, spread in found["first_token"].items()]
    lines += [f"vLLM, first token {what:36} {spread.median:.2f}" for what, spread in found.get("vllm", {}).items()]
    lines += [f"weights   {what:32} {spread.median:.2f}" for what, spread in found["weights"].items()]
    for kib, case in found["disk"].items():
        lines += [f"{kib:9} {what:44} {spread.median:.2f}" for what, spread in case.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
