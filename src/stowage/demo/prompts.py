"""What the demo asks: a chat model questions about the document; the small model of this repository, which only goes on
with a text, the beginnings of sentences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stowage.engine.sampling_params import SamplingParams

NEW_TOKENS = 40


@dataclass(frozen=True, slots=True)
class Script:
    """``instruction``: what a chat begins with, before the document; empty: the model is no chat model."""

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
"""A model this small repeats itself when it is greedy. The draws are seeded, so identical answers still mean identical
logits.
"""
