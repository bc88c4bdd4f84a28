"""``stowage simulate``: what it prints for people and machines, and what it refuses. The figures: tests/property."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import traces
from tests.cli.conftest import OwnProcess, Stowage

SMALL = ("--block-size", "16", "--kv-bytes-per-token", "256", "--prefill-tokens-per-s", "200", "--jobs", "1")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return traces.write(tmp_path / "trace.jsonl", traces.conversations(80, 2, gap_ms=20_000))


def test_json(call: Stowage, trace: Path) -> None:
    result = call(
        "simulate", trace, *SMALL, "--host-memory", "512KiB", "--disk", "4MiB", "--object", "--nodes", 2, "--json"
    )
    assert result.exit_code == 0 and result.stderr == "", result.output
    report = json.loads(result.stdout)
    (found,) = report["results"]
    assert report["trace"] == str(trace) and report["sweep"] is None and found["value"] is None
    assert found["requests"] == 80 and found["nodes"] == 2 and found["scenario"]["host_bytes"] == 512 << 10
    assert set(found["hit_rate"]) == {"host", "disk", "object", "all"} and 0 < found["hit_rate"]["all"] < 1
    assert found["computed_tokens"] + sum(found["reused_tokens"].values()) == found["input_tokens"]
    assert found["disk_years"] is None and found["cost_per_million_tokens"] is None
    assert found["disk_written_bytes_per_day"] > 0 and found["scenario"]["policy"] == "cost"


def test_a_sweep_for_people(call: Stowage, trace: Path, tmp_path: Path) -> None:
    options = (
        "--sweep",
        "host_memory=64KiB,2MiB",
        "--disk",
        "4MiB",
        "--disk-endurance",
        "1TB",
        "--price-node-hour",
        "2.5",
    )
    result = call("simulate", trace, *SMALL, *options, "--picture", tmp_path / "p.svg")
    assert result.exit_code == 0, result.output
    for text in ("80 prompts", "64KiB", "2MiB", "host hits", "disk hits", "years", "cost/M", "TTFT p50"):
        assert text in result.stdout
    assert "picture:" in result.stderr and (tmp_path / "p.svg").read_text().startswith("<svg")
    report = json.loads(call("simulate", trace, *SMALL, *options, "--json").stdout)
    assert report["sweep"] == "host_memory" and [item["value"] for item in report["results"]] == ["64KiB", "2MiB"]
    small, large = report["results"]
    assert small["hit_rate"]["host"] < large["hit_rate"]["host"] and large["cost_per_million_tokens"] > 0


@pytest.mark.parametrize(
    ("sweep", "key", "values"),
    [
        ("disk=0,4MiB", "disk_bytes", [0, 4 << 20]),
        ("nodes=1,3", "nodes", [1, 3]),
        ("eviction_policy=lru,arc", "policy", ["lru", "arc"]),
        ("routing=random,round-robin", "routing", ["random", "round-robin"]),
    ],
)
def test_what_can_be_swept(sweep: str, key: str, values: list[object], call: Stowage, trace: Path) -> None:
    report = json.loads(call("simulate", trace, *SMALL, "--host-memory", "1MiB", "--sweep", sweep, "--json").stdout)
    assert [item["scenario"][key] for item in report["results"]] == values


def test_compression_makes_a_disk_larger(call: Stowage, trace: Path) -> None:
    def found(*share: object) -> dict[str, Any]:
        sizes = ("--kv-bytes-per-token", 1024, "--host-memory", "256KiB", "--disk", "4MiB")
        result = call("simulate", trace, *SMALL, *sizes, "--json", *share)
        (report,) = json.loads(result.stdout)["results"]
        return report

    raw, packed = found(), found("--packed-share", 0.5)
    assert raw["scenario"]["packed_share"] == 1 and packed["scenario"]["packed_share"] == 0.5
    assert packed["hit_rate"]["disk"] > raw["hit_rate"]["disk"]
    refused = call("simulate", trace, *SMALL, "--packed-share", 1.5)
    assert refused.exit_code == 2 and "--packed-share is 1.5" in refused.stderr


def test_prompts_pile_up(call: Stowage, trace: Path) -> None:
    slow = call("simulate", trace, *SMALL, "--host-memory", "1MiB", "--speed-up", "1000")
    assert slow.exit_code == 0 and "prompts pile up" in slow.stderr
    assert "pile up" not in call("simulate", trace, *SMALL, "--host-memory", "1MiB", "--limit", "5").stderr


def test_a_model_says_what_a_token_takes(call: Stowage, trace: Path, tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 512, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ("--block-size", "16", "--model", tmp_path, "--jobs", "1", "--json")
    (found,) = json.loads(call("simulate", trace, *options).stdout)["results"]
    assert found["scenario"]["kv_bytes_per_token"] == 4 * 2 * 2 * 16 * 2
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "mistral", "sliding_window": 64}))
    result = call("simulate", trace, *options)
    assert result.exit_code == 2 and "--kv-bytes-per-token" in result.stderr


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--host-memory", "1KiB"), "The least that works is 4096 bytes"),
        (("--host-memory", "lots"), "lots"),
        (("--host-memory", "30%"), "percentage"),
        (("--disk", "4KiB"), "The least that works"),
        (("--eviction-policy", "fifo"), "lru"),
        (("--routing", "any"), "round-robin"),
        (("--nodes", "0"), "nodes"),
        (("--sweep", "host_memory"), "host_memory=16GiB"),
        (("--sweep", "colour=red"), "host_memory, disk, nodes"),
        (("--sweep", "nodes=two"), "whole numbers"),
        (("--speed-up", "0"), "--speed-up"),
        (("--limit", "-1"), "--limit"),
        (("--disk-endurance", "much"), "DWPD"),
        (("--price-node-hour", "-1"), "price"),
        (("--copy-rate", "0"), "--copy-rate is 0"),
        (("--nodes", "100000000"), "--nodes is 100000000; it must be from 1 to 4,096"),
        (("--sweep", "nodes=1,100000000"), "--nodes is 100000000"),
        (("--sticky-blocks", "9" * 20), "--sticky-blocks is a very large number"),
        (("--prefill-fixed-ms", "1e308"), "--prefill-fixed-ms (in seconds)"),
        (("--price-node-hour", "1e308"), "--price-node-hour"),
        (("--disk-latency-ms", "1e300"), "--disk-..."),
        (("--speed-up", "1e308"), "--speed-up"),
        (("--disk-read", "0"), "above 0"),
        (("--picture", "no/such/p.svg"), "no directory"),
        (("--block-size", "17"), "Line 1 of the trace"),
        (("--model", "nowhere"), "nowhere"),
    ],
)
def test_refusals(options: tuple[str, ...], text: str, call: Stowage, trace: Path) -> None:
    result = call("simulate", trace, *SMALL, *options)
    assert result.exit_code == 2 and text in result.stderr and "Traceback" not in result.stderr, result.output
    assert result.stdout == ""


def test_a_trace_that_is_none(call: Stowage, tmp_path: Path) -> None:
    result = call("simulate", tmp_path / "nothing")
    assert result.exit_code == 2 and "cannot be read" in result.stderr


def test_help_needs_neither_numpy_nor_torch(call_process: OwnProcess, trace: Path) -> None:
    result = call_process("simulate", "--help", PYTHONPROFILEIMPORTTIME="1")
    loaded = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if "|" in line}
    assert result.returncode == 0 and "--sweep" in result.stdout and "stowage.cli.simulate" in loaded
    assert not {"numpy", "torch", "rich.table"} & loaded
    ran = call_process("simulate", str(trace), *SMALL, PYTHONPROFILEIMPORTTIME="1")
    loaded = {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines() if "|" in line}
    assert ran.returncode == 0 and "torch" not in loaded and "transformers" not in loaded, sys.version
