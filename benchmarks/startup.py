"""From the command to the first token: Stowage before and beside what people run instead, on one machine.

    python -m benchmarks.startup --model .real-model/SmolLM2-135M-Instruct --rounds 5

Each round starts every program once, one after the other, as a user would: a new process that loads the model and
answers one prompt with one token, which is printed. Files are warm: one round before is not counted. Programs that are
not installed are named in the result. llama.cpp is asked through llama-cpp-python and loads the same model as GGUF,
where ``--gguf`` says which file.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks._peer import PYTHON
from benchmarks._report import describe_machine, median_spread, write_result

PROMPT = "What is the capital of France?"

TRANSFORMERS = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
prompt = tokenizer.apply_chat_template([{"role": "user", "content": sys.argv[2]}], add_generation_prompt=True,
                                       return_tensors="pt", return_dict=True)
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=1, do_sample=False)[0, -1:]))
"""
VLLM = """
import sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], max_model_len=2048, enforce_eager=True, kv_cache_memory_bytes=256 << 20)
said = [{"role": "user", "content": sys.argv[2]}]
print(llm.chat(said, SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)[0].outputs[0].text)
"""
LLAMA_CPP = """
import sys
from llama_cpp import Llama
llm = Llama(sys.argv[1], n_ctx=2048, verbose=False)
said = [{"role": "user", "content": sys.argv[2]}]
print(llm.create_chat_completion(said, max_tokens=1, temperature=0)["choices"][0]["message"]["content"])
"""
OPENVINO = """
import sys
from optimum.intel import OVModelForCausalLM
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = OVModelForCausalLM.from_pretrained(sys.argv[1])
prompt = tokenizer.apply_chat_template([{"role": "user", "content": sys.argv[2]}], add_generation_prompt=True,
                                       return_tensors="pt", return_dict=True)
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=1, do_sample=False)[0, -1:]))
"""
VLLM_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@dataclass(frozen=True, slots=True)
class Program:
    """One that is started: its command, what its environment has besides, and the module that it needs."""

    command: Sequence[str]
    environment: dict[str, str]
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Start:
    """One start: until the first byte of the answer, and of the processor in all."""

    first_token_s: float
    processor_s: float


def start(program: Program) -> Start:
    """Raises SystemExit where there is no answer."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    running = subprocess.Popen(
        program.command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **program.environment}
    )
    assert running.stdout is not None
    first = os.read(running.stdout.fileno(), 1)
    seconds = time.monotonic() - began
    _, said = running.communicate()
    if running.returncode or not first:
        raise SystemExit(f"{program.command[:3]} gives no answer: {said.decode(errors='replace')[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Start(seconds, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)


def programs(model: Path, gguf: Path | None, earlier: Path | None) -> dict[str, Program]:
    """All that could be compared; ``earlier``: the sources of another version of Stowage."""
    stowage = [sys.executable, "-m", "stowage", "run", str(model), "-p", PROMPT, "-n", "1"]
    found = {"Stowage": Program(stowage, {"PYTHONPATH": "src"})}
    if earlier is not None:
        found["Stowage, earlier"] = Program(stowage, {"PYTHONPATH": str(earlier)})

    def script(code: str, python: str, given: Path) -> list[str]:
        return [python, "-c", code, str(given), PROMPT]

    bench = str(PYTHON)
    found["Transformers"] = Program(script(TRANSFORMERS, sys.executable, model), {})
    found["vLLM (CPU)"] = Program(script(VLLM, bench, model), VLLM_ENVIRONMENT, "vllm")
    found["OpenVINO"] = Program(script(OPENVINO, bench, model), {}, "optimum.intel")
    found["llama.cpp"] = Program(script(LLAMA_CPP, bench, gguf or Path("none.gguf")), {}, "llama_cpp")
    return found


def absent(program: Program, gguf: Path | None) -> str:
    """Why it cannot be started; empty: it can."""
    if not program.needs:
        return ""
    if not PYTHON.exists():
        return "there is no .venv-bench: make bench-env"
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({program.needs.split('.')[0]!r}) is None)"
    if subprocess.run([program.command[0], "-c", code], check=False).returncode:
        return f"{program.needs} is not installed in .venv-bench"
    return "no --gguf was given" if program.needs == "llama_cpp" and gguf is None else ""


def measure(chosen: dict[str, Program], rounds: int, note: Callable[[str], None]) -> dict[str, Any]:
    """Median and spread of each, started in turn."""
    starts: dict[str, list[Start]] = {name: [] for name in chosen}
    for turn in range(rounds + 1):
        for name, program in chosen.items():
            one = start(program)
            note(f"{turn} {name}: {one.first_token_s:.2f} s, {one.processor_s:.2f} s of the processor")
            starts[name] += [one] * bool(turn)
    return {
        name: {
            "first_token_s": asdict(median_spread([one.first_token_s for one in found])),
            "processor_s": asdict(median_spread([one.processor_s for one in found])),
        }
        for name, found in starts.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(".real-model/SmolLM2-135M-Instruct"))
    parser.add_argument("--gguf", type=Path, help="the same model for llama.cpp")
    parser.add_argument("--earlier", type=Path, help="the sources of another version of Stowage, to compare with")
    parser.add_argument("--only", action="append", help="a program's name; repeatable")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    known = programs(given.model, given.gguf, given.earlier)
    wanted = {name: program for name, program in known.items() if not given.only or name in given.only}
    lacking = {name: why for name, program in known.items() if (why := absent(program, given.gguf))}
    chosen = {name: program for name, program in wanted.items() if name not in lacking}
    found = measure(chosen, given.rounds, lambda line: print(line, file=sys.stderr))
    data = {"machine": describe_machine(), "model": given.model.name, "rounds": given.rounds, "programs": found}
    print(write_result("startup", data | {"absent": lacking}))
    for name, numbers in found.items():
        print(f"{name}: {numbers['first_token_s']['median']:.2f} s ({numbers['processor_s']['median']:.2f} s CPU)")


if __name__ == "__main__":
    main()
