"""One process of the demo: load the model, ask every question over the document, say what each answer cost.

Run as ``python -m stowage.demo.ask CACHE RESULT``; writes ``RESULT`` as JSON. The demo runs it twice with the same
cache directory: what the second process knows, it knows from disk.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stowage.config.memory import Memory
from stowage.demo.corpus import document_text, model_path
from stowage.demo.prompts import NEW_TOKENS, QUESTIONS, SEED, TEMPERATURE
from stowage.engine.engine import Engine
from stowage.engine.placement_report import placement
from stowage.engine.sampling import SamplingParams

DISK_LIMIT = "256MiB"


def memory(cache: Path) -> Memory:
    """The demo's budgets."""
    return Memory(kv_cache_memory="64MiB", host_memory="64MiB", disk=f"{cache}:{DISK_LIMIT}")


def ask(cache: Path) -> dict[str, Any]:
    """Ask every question, in order; each answer with its cost."""
    params = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=TEMPERATURE, seed=SEED, logprobs=1)
    document = document_text().rstrip("\n")
    with Engine(model_path(), memory(cache), dtype="float32") as engine:
        engine.generate("A short prompt, so that nobody's first answer pays for warming up.", params)
        answers = []
        for question in QUESTIONS:
            (completion,) = engine.generate(document + "\n\n" + question, params)
            answers.append(
                {
                    "question": question,
                    "text": completion.text,
                    "token_ids": completion.token_ids,
                    "logprobs": [report.logprob for report in completion.logprobs or []],
                    "prompt_tokens": completion.prompt_tokens,
                    "reused_tokens": dict(completion.reused_tokens),
                    "ttft_s": completion.ttft_s,
                }
            )
        engine.flush()
        return {
            "placement": [asdict(row) | {"line": str(row)} for row in placement(engine)],
            "answers": answers,
            "store": engine.stats()["store"],
        }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(ask(Path(sys.argv[1]))), encoding="utf-8")
