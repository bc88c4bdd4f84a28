"""Train the committed demo model: a small Gemma 3 causal language model on a CPU.

Owns the model's shape, the training recipe and what is written to ``--out``: weights in
bfloat16, a ``config.json`` that loads them in float32, the tokenizer, and ``card.json``.
Invariants: the held-out topics are never trained on (``demo_corpus``); the
checkpoint kept is the one with the lowest held-out loss; with ``--steps`` the result
depends only on the corpus, the seed, the step count and the thread count, while with
``--minutes`` the learning rate also follows the clock, so the run ends when it should.
Stop it at any time with Ctrl-C or SIGTERM: the best checkpoint so far is finished.

    python scripts/train_demo_model.py --minutes 40 --threads 1
    python scripts/train_demo_model.py --steps 800 --seed 7
    python scripts/train_demo_model.py --resume --minutes 60   # goes on from what --out holds
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

import demo_attention  # noqa: E402  (siblings of this script; the path is set above)
from demo_card import heldout_loss, training_facts, write_card  # noqa: E402
from demo_corpus import Corpus, Document, build_corpus  # noqa: E402
from demo_muon import Muon  # noqa: E402
from demo_tokenizer import VOCABULARY, train_tokenizer  # noqa: E402

from stowage.demo.corpus import model_path  # noqa: E402

LONGEST = 8192  # max_position_embeddings
# (share of the run at which the phase starts, tokens per sequence, sequences per step):
# small steps first, where gradients agree; long sequences last, where they are dear.
PHASES = ((0.0, 512, 4), (0.45, 512, 8), (0.75, 2048, 2), (0.9, 4096, 1))
REFERENCE_REPEATS = 2  # the language reference is what is scored; the library is 9 times longer
PEAK_RATE = 4e-3
FINAL_SHARE = 0.03  # of the peak learning rate, at the end of the cosine
WARM_UP = 0.02  # share of the run
WEIGHT_DECAY = 0.1
RESUMED_SHARE = 0.55  # where a resumed run enters the schedule: a lower rate, longer steps
RESUMED_WARM_UP = 10  # steps, because the optimizers' averages start from nothing
SUMS = ("steps", "training_tokens", "seconds", "runs")  # of the card, added up over runs
EVERY = 40  # steps between held-out scores


def demo_config() -> Gemma3TextConfig:
    """The model's shape: about 4.6 M parameters, 4 sliding layers and 2 full ones."""
    return Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,  # scores are scaled by its inverse root: head_dim, as usual
        sliding_window=128,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 100_000.0},
        },
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )


@dataclass
class Progress:
    """How far a run is, in [0, 1]: by steps when their number is given, else by the clock."""

    steps: int | None
    seconds: float
    entered: float = 0.0
    started: float = field(default_factory=time.monotonic)
    done: int = 0
    stopped: bool = False

    def elapsed(self) -> float:
        """Seconds since the run started."""
        return time.monotonic() - self.started

    def share(self) -> float:
        """The share of the schedule that is behind, starting from ``entered``."""
        behind = self.done / self.steps if self.steps else self.elapsed() / self.seconds
        return min(1.0, self.entered + (1 - self.entered) * behind)

    def rate(self) -> float:
        """The learning rate of the next step."""
        ramp = min(1.0, (self.done + 1) / RESUMED_WARM_UP) if self.entered else 1.0
        return PEAK_RATE * rate_factor(self.share()) * ramp

    def stop(self, *_: object) -> None:
        """Signal handler: end after the step under way."""
        self.stopped = True


def token_stream(documents: tuple[Document, ...], tokenizer: PreTrainedTokenizerFast, order: list[int]) -> torch.Tensor:
    """The documents in ``order``, each as ``<bos> text <eos>``, in one line of token ids."""
    texts = tokenizer([documents[i].text for i in order], verbose=False)["input_ids"]
    return torch.tensor([token for ids in texts for token in [*ids, tokenizer.eos_token_id]])


def batches(
    documents: tuple[Document, ...], tokenizer: PreTrainedTokenizerFast, progress: Progress, seed: int
) -> Iterator[torch.Tensor]:
    """Endless (sequences, tokens + 1) batches; every pass shuffles documents and cuts."""
    generator = torch.Generator().manual_seed(seed)
    repeats = [REFERENCE_REPEATS if d.name.startswith("topic:") else 1 for d in documents]
    indices = [i for i, repeat in enumerate(repeats) for _ in range(repeat)]
    while True:
        length, sequences = phase = phase_at(progress.share())
        order = torch.randperm(len(indices), generator=generator).tolist()
        stream = token_stream(documents, tokenizer, [indices[i] for i in order])
        shift = int(torch.randint(length, (1,), generator=generator))
        windows = stream[shift:].unfold(0, length + 1, length)
        windows = windows[torch.randperm(len(windows), generator=generator)]
        for batch in windows.split(sequences):
            if phase_at(progress.share()) != phase:
                break
            yield batch


def phase_at(share: float) -> tuple[int, int]:
    """Tokens per sequence and sequences per step at that share of the run."""
    return [(length, sequences) for start, length, sequences in PHASES if share >= start][-1]


def rate_factor(share: float) -> float:
    """The learning rate at that share of the run, as a share of its peak."""
    if share < WARM_UP:
        return max(0.02, share / WARM_UP)
    cosine = 0.5 * (1 + math.cos(math.pi * (share - WARM_UP) / (1 - WARM_UP)))
    return FINAL_SHARE + (1 - FINAL_SHARE) * cosine


def optimizers(model: torch.nn.Module, peak: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices; AdamW for the tied embedding and the norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        Muon(matrices, lr=peak, weight_decay=WEIGHT_DECAY),
        torch.optim.AdamW(others, lr=peak, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def train_step(
    model: Gemma3ForCausalLM, batch: torch.Tensor, steppers: list[torch.optim.Optimizer], rate: float
) -> float:
    """One update at that learning rate; returns the mean loss in nats per token."""
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for stepper in steppers:
        for group in stepper.param_groups:
            group["lr"] = rate
        stepper.step()
        stepper.zero_grad(set_to_none=True)
    return float(loss.detach())


def save_weights(model: Gemma3ForCausalLM, out: Path) -> None:
    """Write ``model`` in bfloat16 with a config that makes a plain load float32."""
    halved = Gemma3ForCausalLM(demo_config())
    halved.load_state_dict(model.state_dict())
    halved.to(torch.bfloat16).save_pretrained(out)
    path = out / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["dtype"] = "float32"  # bfloat16 products are slow on CPUs, where the demo runs
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def train(
    model: Gemma3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    built: Corpus,
    progress: Progress,
    seed: int,
    out: Path,
) -> dict[str, float]:
    """Train until ``progress`` is through; keep the best checkpoint; return its facts."""
    steppers = optimizers(model, PEAK_RATE)
    best: dict[str, float] = {}
    lowest = heldout_loss(model, tokenizer)
    tokens, recent = 0, []
    for batch in batches(built.train, tokenizer, progress, seed):
        recent.append(train_step(model, batch, steppers, progress.rate()))
        progress.done += 1
        tokens += batch[:, 1:].numel()
        ended = progress.stopped or progress.share() >= 1
        if progress.done % EVERY == 0 or ended:
            heldout = heldout_loss(model, tokenizer)
            mean, recent = sum(recent) / len(recent), []
            print(
                f"step {progress.done} {progress.share():.0%} {progress.elapsed():.0f}s "
                f"length {batch.shape[1] - 1} tokens {tokens} train {mean:.3f} "
                f"held-out {heldout:.3f} ppl {math.exp(heldout):.1f}",
                flush=True,
            )
            if heldout < lowest:
                lowest = heldout
                best = {"steps": progress.done, "training_tokens": tokens, "seconds": round(progress.elapsed())}
                save_weights(model, out)
        if ended:
            return best
    raise AssertionError("batches() never ends")


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=model_path())
    parser.add_argument("--minutes", type=float, default=40, help="length of the run by the clock")
    parser.add_argument("--steps", type=int, help="length of the run in steps, instead of minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on from the model in --out")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def starting_point(
    options: argparse.Namespace, built: Corpus
) -> tuple[Gemma3ForCausalLM, PreTrainedTokenizerFast, dict[str, float]]:
    """Model, tokenizer and the sums of earlier runs: new ones, or those ``--out`` holds."""
    if options.resume:
        card = json.loads((options.out / "card.json").read_text(encoding="utf-8"))
        model = Gemma3ForCausalLM.from_pretrained(
            options.out, dtype=torch.float32, attn_implementation=demo_attention.NAME
        )
        return model, AutoTokenizer.from_pretrained(options.out), {name: card[name] for name in SUMS}
    tokenizer = train_tokenizer((d.text for d in built.train), LONGEST)
    tokenizer.save_pretrained(options.out)
    model = Gemma3ForCausalLM._from_config(demo_config(), attn_implementation=demo_attention.NAME)
    return model, tokenizer, dict.fromkeys(SUMS, 0) | {"runs": 0}


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    demo_attention.register()
    built = build_corpus()
    model, tokenizer, sums = starting_point(options, built)
    print(f"{model.num_parameters()} parameters, {len(built.train)} documents", flush=True)
    entered = RESUMED_SHARE if options.resume else 0.0
    progress = Progress(options.steps, 60 * options.minutes, entered)
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, progress.stop)
    best = train(model, tokenizer, built, progress, options.seed + int(sums["runs"]), options.out)
    if not best:
        print("no held-out score was better than at the start: nothing written", flush=True)
        return
    facts = {name: sums[name] + best[name] for name in best} | {"runs": sums["runs"] + 1}
    characters = sum(len(document.text) for document in built.train)
    write_card(
        options.out, training_facts(**facts, seed=options.seed, threads=options.threads, corpus_characters=characters)
    )


if __name__ == "__main__":
    main()
