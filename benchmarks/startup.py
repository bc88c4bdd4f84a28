"""From the command to the first token: Stowage before and beside what people run instead, on one machine.

    python -m benchmarks.startup --model .real-model/SmolLM2-135M-Instruct --rounds 5
    python -m benchmarks.startup --random --name startup_360m

Each round starts every program once, one after the other, as a user would: a new process that loads the model and
answers one prompt with one token, which is printed. Files are warm, and Python's are compiled: one round before is not
counted. Programs that are not installed are named in the result. llama.cpp is asked through llama-cpp-python with the
same weights as a GGUF file, in bfloat16 and, where ``--gguf`` names one, in that file's format; OpenVINO GenAI with a
model that it saved from them, in float16. These two get the prompt with the chat template done. ``--random`` asks a
Llama of 0.36 B with random weights and the model's tokenizer instead.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import gguf_llama, models
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
print(llm(sys.argv[2], max_tokens=1, temperature=0)["choices"][0]["text"])
"""
OPENVINO = """
import sys
import openvino_genai
pipeline = openvino_genai.LLMPipeline(sys.argv[1], "CPU", CACHE_DIR=sys.argv[1] + "/compiled")
print(pipeline.generate(sys.argv[2], max_new_tokens=1, apply_chat_template=False))
"""
SAVE_FOR_OPENVINO = """
import sys
import openvino_genai
openvino_genai.LLMPipeline(sys.argv[1], "CPU", enable_save_ov_model=True)
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
    environment = {**os.environ, **program.environment}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # what is installed is compiled
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    running = subprocess.Popen(program.command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert running.stdout is not None
    first = os.read(running.stdout.fileno(), 1)
    seconds = time.monotonic() - began
    _, said = running.communicate()
    if running.returncode or not first:
        raise SystemExit(f"{program.command[:3]} gives no answer: {said.decode(errors='replace')[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Start(seconds, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)


def write_random(like: Path, directory: Path) -> Path:
    """A Llama of 0.36 B in bfloat16, 32 layers of 960, with random weights and all else as in ``like``."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(like, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    config = AutoConfig.from_pretrained(like)
    config.update({"hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32})
    config.update({"num_attention_heads": 15, "num_key_value_heads": 5})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    return directory


def write_for_peers(model: Path, directory: Path) -> str:
    """``bf16.gguf`` for llama.cpp and ``openvino`` for OpenVINO, in ``directory``; the prompt in the chat template."""
    from transformers import AutoTokenizer

    loaded, words = models.from_checkpoint(model, "bfloat16"), model / "tokenizer.json"
    gguf_llama.write(loaded, directory / "bf16.gguf", words)
    saved = directory / "openvino"
    saved.mkdir()
    gguf_llama.write(loaded.half(), saved / "float16.gguf", words)
    subprocess.run([PYTHON, "-c", SAVE_FOR_OPENVINO, str(saved / "float16.gguf")], check=True, stdout=sys.stderr)
    (saved / "float16.gguf").unlink()
    said = [{"role": "user", "content": PROMPT}]
    return str(
        AutoTokenizer.from_pretrained(model).apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    )


def programs(model: Path, earlier: Path | None) -> dict[str, Program]:
    """Those that read ``model`` as it is; ``earlier``: the sources of another version of Stowage."""
    stowage = [sys.executable, "-m", "stowage", "run", str(model), "-p", PROMPT, "-n", "1"]
    found = {"Stowage": Program(stowage, {"PYTHONPATH": "src"})}
    if earlier is not None:
        found["Stowage, earlier"] = Program(stowage, {"PYTHONPATH": str(earlier)})
    found["Transformers"] = Program([sys.executable, "-c", TRANSFORMERS, str(model), PROMPT], {})
    vllm = [str(PYTHON), "-c", VLLM, str(model), PROMPT]
    return found | {"vLLM (CPU)": Program(vllm, VLLM_ENVIRONMENT, "vllm")}


def programs_of_peers(directory: Path, prompt: str, gguf: Path | None) -> dict[str, Program]:
    """Those that read what ``write_for_peers`` wrote to ``directory``, and ``gguf``."""
    files = {"llama.cpp, bfloat16": directory / "bf16.gguf"}
    if gguf is not None:
        files[f"llama.cpp, {gguf.suffixes[-2][1:] if gguf.suffixes[1:] else gguf.stem}"] = gguf
    openvino = [str(PYTHON), "-c", OPENVINO, str(directory / "openvino"), prompt]
    return {
        "OpenVINO GenAI, float16": Program(openvino, {}, "openvino_genai"),
        **{
            name: Program([str(PYTHON), "-c", LLAMA_CPP, str(at), prompt], {}, "llama_cpp")
            for name, at in files.items()
        },
    }


def absent(program: Program) -> str:
    """Why it cannot be started; empty: it can."""
    if not program.needs:
        return ""
    if not PYTHON.exists():
        return "there is no .venv-bench: make bench-env"
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({program.needs!r}) is None)"
    if subprocess.run([program.command[0], "-c", code], check=False).returncode:
        return f"{program.needs} is not installed in .venv-bench"
    return ""


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
    parser.add_argument("--random", action="store_true", help="a Llama of 0.36 B with this model's tokenizer")
    parser.add_argument("--gguf", type=Path, help="the same model for llama.cpp, in another format")
    parser.add_argument("--earlier", type=Path, help="the sources of another version of Stowage, to compare with")
    parser.add_argument("--only", action="append", help="a program's name; repeatable")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default="startup", help="of the result's file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stowage-bench-") as directory:
        here = Path(directory)
        model = write_random(given.model, here / "llama-360m") if given.random else given.model
        known = programs(model, given.earlier)
        if PYTHON.exists():
            known |= programs_of_peers(here, write_for_peers(model, here), given.gguf)
        wanted = {name: program for name, program in known.items() if not given.only or name in given.only}
        lacking = {name: why for name, program in wanted.items() if (why := absent(program))}
        chosen = {name: program for name, program in wanted.items() if name not in lacking}
        found = measure(chosen, given.rounds, lambda line: print(line, file=sys.stderr))
    data = {"machine": describe_machine(), "model": model.name, "rounds": given.rounds, "programs": found}
    print(write_result(given.name, data | {"absent": lacking}))
    for name, numbers in found.items():
        print(f"{name}: {numbers['first_token_s']['median']:.2f} s ({numbers['processor_s']['median']:.2f} s CPU)")


if __name__ == "__main__":
    main()
