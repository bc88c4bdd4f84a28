"""Two questions about one document: the second finds the document on the device, a second run of this program on disk.

python docs/examples/two_questions.py MODEL FILE
"""

import sys
from pathlib import Path

from stowage import Engine, Memory, SamplingParams

QUESTIONS = ("Which deck stows the most?", "How many crates are there in all?")


def main(model: str, file: str) -> None:
    document = Path(file).read_text()
    memory = Memory(kv_cache_memory="64MiB", host_memory="64MiB", disk="./cache:1GiB")
    with Engine(model, memory) as engine:
        for question in QUESTIONS:
            (answer,) = engine.generate([f"{document}\n{question}\n"], SamplingParams(max_new_tokens=16))
            reused = ", ".join(f"{tokens} from {tier}" for tier, tokens in answer.reused_tokens.items() if tokens)
            print(f"{question} {answer.prompt_tokens} tokens, {reused or 'none reused'}; {answer.ttft_s * 1000:.0f} ms")


if __name__ == "__main__":
    main(*sys.argv[1:])
