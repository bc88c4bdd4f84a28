"""One process of the demo: load the model, ask every question over the document, say what each answer cost.

Run as ``python -m stowage.demo.ask MODEL CACHE RESULT``; writes ``RESULT`` as JSON. The demo runs it twice with
the same cache directory: what the second process knows, it knows from disk. A chat model is asked questions about the
document; the small model of this repository only goes on with a text, and gets the beginnings of sentences.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stowage.config.memory import Memory
from stowage.demo.corpus import document_text, model_path
from stowage.engine.engine import Engine
from stowage.engine.placement_report import placement
from stowage.engine.sampling_params import SamplingParams

DISK_LIMIT = "512MiB"
NEW_TOKENS = 40


@dataclass(frozen=True, slots=True)
class Script:
    """What the demo asks. ``instruction``: what a chat begins with, before the document; empty: no chat model."""

    questions: tuple[str, ...]
    params: SamplingParams
    dtype: str
    instruction: str = ""

    def prompt(self, document: str, question: str, tokenizer: Any) -> str | list[int]:
        """One question after the document: text, or the tokens of a chat."""
        if not self.instruction:
            return f"{document}\n\n{question}"
        system = {"role": "system", "content": f"{self.instruction}\n\n{document}"}
        messages = [system, {"role": "user", "content": question}]
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])


CHAT = Script(
    questions=("What is a package?", "What is a future statement?", "Summarize this document in one sentence."),
    params=SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0, stop=("\n", ". "), logprobs=1),
    dtype="auto",
    instruction="Answer questions about this document in one or two sentences.",
)
CONTINUE = Script(
    questions=("If the module is not found in the search path,", "A package is", "A module can be loaded"),
    params=SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.8, seed=7, logprobs=1),
    dtype="float32",
)
"""A model this small repeats itself when greedy. Draws are seeded, so identical answers mean identical logits."""


def memory(cache: Path) -> Memory:
    """The demo's budgets."""
    return Memory(kv_cache_memory="128MiB", host_memory="128MiB", disk=f"{cache}:{DISK_LIMIT}")


def ask(model: Path, cache: Path) -> dict[str, Any]:
    """Ask every question, in order; each answer with its cost."""
    script = CONTINUE if model == model_path() else CHAT
    document = document_text().rstrip("\n")
    with Engine(str(model), memory(cache), dtype=script.dtype) as engine:
        engine.generate("A short prompt, so that nobody's first answer pays for warming up.", script.params)
        answers = []
        for question in script.questions:
            (completion,) = engine.generate([script.prompt(document, question, engine.tokenizer)], script.params)
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
    Path(sys.argv[3]).write_text(json.dumps(ask(Path(sys.argv[1]), Path(sys.argv[2]))), encoding="utf-8")
