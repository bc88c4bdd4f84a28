"""The main job, shown: a model answers over a long document, the process ends, and another one need not compute the
document again.

``python -m stowage.demo [--directory DIR]`` prints the placement, what each answer cost in both processes, and whether
the answers are identical; it writes ``demo.svg`` and ``demo.json``. Exit status 0 only if they are identical and the
prefix came from disk.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stowage import openmp
from stowage.demo.picture import draw, shares

RUNS = ("first process: nothing is known", "second process, after a restart")
LOGPROB_BOUND = 1e-3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m stowage.demo", description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path("demo-out"), help="where cache, picture and numbers go")
    directory: Path = parser.parse_args(arguments).directory
    openmp.wait_briefly()  # so do the processes that are started here
    cache = directory.resolve() / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    results = []
    for number, title in enumerate(RUNS):
        print(f"[{number + 1}/{len(RUNS)}] {title} ...", file=sys.stderr, flush=True)
        results.append(_in_a_process(cache, directory / f"process{number + 1}.json"))
    first, second = (result["answers"] for result in results)
    _print(results)
    identical = all(a["token_ids"] == b["token_ids"] for a, b in zip(first, second, strict=True))
    difference = max(
        abs(x - y)
        for a, b in zip(first, second, strict=True)
        for x, y in zip(a["logprobs"], b["logprobs"], strict=False)
    )
    reused = second[0]["reused_tokens"].get("disk", 0)
    (directory / "demo.svg").write_text(draw(list(zip(RUNS, (first, second), strict=True))), encoding="utf-8")
    numbers = {
        "identical": identical,
        "max_logprob_difference": difference,
        "reused_from_disk": reused,
        "runs": results,
    }
    (directory / "demo.json").write_text(json.dumps(numbers, indent=1), encoding="utf-8")
    print(
        f"\nFirst question: {_ms(first[0])} ms computed, {_ms(second[0])} ms after the restart ({reused} of "
        f"{second[0]['prompt_tokens']} tokens from disk, {first[0]['ttft_s'] / second[0]['ttft_s']:.1f}x sooner)."
        f"\nAnswers identical: {'yes' if identical else 'NO'} (largest log-probability difference {difference:.1e})."
        f"\nPicture: {directory / 'demo.svg'}   numbers: {directory / 'demo.json'}"
    )
    return 0 if identical and reused and difference < LOGPROB_BOUND else 1


def _in_a_process(cache: Path, result: Path) -> dict[str, Any]:
    """Run ``stowage.demo.ask`` as a process of its own and return what it found."""
    command = [sys.executable, "-m", "stowage.demo.ask", str(cache), str(result)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"the demo's process failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    result.unlink()
    return found


def _ms(answer: Mapping[str, Any]) -> str:
    return f"{answer['ttft_s'] * 1000:.0f}"


def _print(results: Sequence[Mapping[str, Any]]) -> None:
    print("Placement")
    for row in results[0]["placement"]:
        print(f"  {row['line']}")
    for title, result in zip(RUNS, results, strict=True):
        print(f"\n{title.capitalize()}")
        print(f"  {'first token':>11}  {'computed':>8} {'device':>7} {'host':>6} {'disk':>6}  question")
        for answer in result["answers"]:
            origin = shares(answer)
            print(
                f"  {_ms(answer):>8} ms  {origin['computed']:>8} {origin['device']:>7} {origin['host']:>6} "
                f"{origin['disk']:>6}  {answer['question']}"
            )
    print("\nAnswers of the second process")
    for answer in results[1]["answers"]:
        print(f"  {answer['question']} | {' '.join(answer['text'].split())}")


if __name__ == "__main__":
    raise SystemExit(main())
