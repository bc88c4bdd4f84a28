"""Score the saved demo model and write its card.

Owns the held-out measure and ``card.json``. The measure: ``heldout.txt``, encoded whole,
in consecutive windows of ``CONTEXT`` tokens that each start with ``<bos>`` in place of the
text before, so every token is scored once, in float32; loss in nats per token. The card's
figures come from the files on disk, loaded as a user loads them.

    python scripts/demo_card.py       # rescore the committed model, rewrite its figures
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from stowage.demo import corpus  # noqa: E402  (needs the path above in a bare checkout)

CONTEXT = 1024
SAMPLE_TOKENS = 48
TEMPERATURE = 0.8
PROMPTS = (
    "When an exception is raised in the body of the function,",
    "The object returned by this method is",
    "If the argument is not given, the default value",
)
DOCUMENT_PROMPTS = (  # picked from 18 for greedy continuations that loop less than the others
    "If the module is not found in the search path,",
    "A package is",
    "A module can be loaded",
)


def heldout_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """``heldout.txt`` in token ids, without special tokens."""
    # verbose=False: the text is cut into windows later, so its length is no cause for a warning
    return tokenizer(corpus.heldout_text(), add_special_tokens=False, verbose=False)["input_ids"]


@torch.no_grad()
def heldout_loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, context: int = CONTEXT) -> float:
    """Mean loss on ``heldout.txt`` in nats per token, at ``context`` tokens a window."""
    ids = heldout_ids(tokenizer)
    total = 0.0
    for start in range(0, len(ids), context - 1):
        window = torch.tensor([[tokenizer.bos_token_id, *ids[start : start + context - 1]]])
        logits = model(input_ids=window, use_cache=False).logits
        total += float(cross_entropy(logits[0, :-1], window[0, 1:], reduction="sum"))
    return total / len(ids)


@torch.no_grad()
def continuation(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    temperature: float | None = None,
    seed: int = 0,
) -> str:
    """``SAMPLE_TOKENS`` tokens after ``text``: greedy, or sampled at ``temperature``."""
    torch.manual_seed(seed)
    encoded = tokenizer(text, return_tensors="pt")
    how = {"do_sample": temperature is not None}
    if temperature is not None:
        how |= {"temperature": temperature, "top_k": 0}
    out = model.generate(
        input_ids=encoded["input_ids"],
        attention_mask=encoded["attention_mask"],
        max_new_tokens=SAMPLE_TOKENS,
        pad_token_id=tokenizer.pad_token_id,
        **how,
    )
    return tokenizer.decode(out[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True)


def samples(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[dict[str, str]]]:
    """What the model writes after each of ``PROMPTS``, and after ``document.txt``."""
    document = corpus.document_text().rstrip("\n")
    return {
        "samples": [
            {
                "prompt": prompt,
                "greedy": continuation(model, tokenizer, prompt),
                f"temperature_{TEMPERATURE}": continuation(model, tokenizer, prompt, TEMPERATURE),
            }
            for prompt in PROMPTS
        ],
        "document_samples": [
            {
                "prompt": f"<document.txt>\n\n{prompt}",
                "greedy": continuation(model, tokenizer, f"{document}\n\n{prompt}"),
                f"temperature_{TEMPERATURE}": continuation(model, tokenizer, f"{document}\n\n{prompt}", TEMPERATURE),
            }
            for prompt in DOCUMENT_PROMPTS
        ],
    }


def measured(out: Path) -> dict[str, object]:
    """Everything the card says about the files under ``out``, loaded in float32."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    tokens = len(heldout_ids(tokenizer))
    return {
        "parameters": model.num_parameters(),
        "stored_dtype": "bfloat16",
        "run_dtype": "float32",
        "heldout_perplexity_per_token": round(math.exp(heldout_loss(model, tokenizer)), 2),
        "heldout_context_tokens": CONTEXT,
        "heldout_tokens": tokens,
        "heldout_perplexity_at_4096": round(math.exp(heldout_loss(model, tokenizer, 4096)), 2),
        "characters_per_token": round(len(corpus.heldout_text()) / tokens, 3),
        "document_tokens": len(tokenizer(corpus.document_text())["input_ids"]),
        **samples(model, tokenizer),
    }


def write_card(out: Path, facts: dict[str, object]) -> None:
    """Write ``card.json``: how the model was trained, then what its files measure."""
    card = {**facts, **measured(out)}
    text = json.dumps(card, indent=2, ensure_ascii=False) + "\n"
    (out / "card.json").write_text(text, encoding="utf-8")
    print(text)


def training_facts(**facts: object) -> dict[str, object]:
    """The card's training part, with the versions that shaped the corpus and the run."""
    return {
        "corpus": "pydoc_data.topics and standard-library docstrings and comments",
        "corpus_python": platform.python_version(),
        "torch": torch.__version__,
        **facts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=corpus.model_path())
    options = parser.parse_args()
    card = options.out / "card.json"
    write_card(options.out, json.loads(card.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
