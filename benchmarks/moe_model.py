"""A mixture of experts whose router was trained, at a size that is worth offloading: for `benchmarks.weights_moe`.

A router with random weights chooses by a token's embedding alone and has no favourites. So a small model (hidden 128, 8
layers, 64 experts of which 4 are chosen) is trained on the demo's corpus for some minutes, with a loss that balances
the experts of each layer, and then widened: each hidden element becomes eight equal ones, and each matrix is repeated
and divided so that all activations, and the router's choices, stay what they were. Its experts take 1.6 GB in float32.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stowage.demo import corpus

HIDDEN, INNER, LAYERS, EXPERTS, CHOSEN, VOCAB = 128, 32, 8, 64, 4, 4096
WIDER = 8
BATCH, LENGTH = 6, 192
BALANCE = 0.02
"""How much it costs to prefer some experts of a layer, beside the loss of the text."""


def config(wider: int) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=HIDDEN * wider,
        moe_intermediate_size=INNER * wider,
        intermediate_size=INNER * wider,
        num_hidden_layers=LAYERS,
        num_attention_heads=4 * wider,
        num_key_value_heads=2 * wider,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        norm_topk_prob=True,
        vocab_size=VOCAB,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        router_aux_loss_coef=0.0,
    )


def tokens_of(text: str) -> Tensor:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(corpus.model_path())
    return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])


def train(steps: int) -> Any:
    """The small model after ``steps`` of training."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(1), dtype=torch.float32).train()
    data = tokens_of("\n\n".join(document.text for document in corpus.build_corpus().train))
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=steps, pct_start=0.1)
    began_s = time.perf_counter()
    for step in range(steps):
        starts = torch.randint(0, len(data) - LENGTH, (BATCH,))
        ids = torch.stack([data[at : at + LENGTH] for at in starts.tolist()])
        out = model(input_ids=ids, labels=ids, output_router_logits=True, use_cache=False)
        loss = out.loss
        optimiser.zero_grad(set_to_none=True)
        (loss + BALANCE * sum(imbalance(logits) for logits in out.router_logits)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}, {time.perf_counter() - began_s:.0f} s", flush=True)
    return model.eval()


def imbalance(logits: Tensor) -> Tensor:
    """Of one layer's router (tokens, experts): 1 when all experts are chosen equally often."""
    shares = logits.float().softmax(-1)
    often = torch.zeros(EXPERTS).index_add_(
        0, shares.topk(CHOSEN).indices.reshape(-1), torch.ones(logits.shape[0] * CHOSEN)
    )
    return EXPERTS * (often / often.sum() * shares.mean(0)).sum()


@torch.no_grad()
def widen(small: Any, wider: int = WIDER) -> Any:
    """The same function with hidden states ``wider`` times as wide."""
    from transformers import AutoModelForCausalLM

    big = AutoModelForCausalLM.from_config(config(wider), dtype=torch.float32).eval()
    target = dict(big.named_parameters())
    for name, weight in small.named_parameters():
        if name.endswith("embed_tokens.weight"):
            wide = weight.repeat(1, wider)
        elif name.endswith(("lm_head.weight", ".gate.weight")):
            wide = weight.repeat(1, wider) / wider
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            wide = weight
        elif weight.dim() == 1:
            wide = weight.repeat(wider)
        elif name.endswith("gate_up_proj"):
            wide = torch.cat([half.repeat(1, wider, wider) for half in weight.chunk(2, 1)], 1) / wider
        else:
            wide = weight.repeat(*[1] * (weight.dim() - 2), wider, wider) / wider
        target[name].copy_(wide)
    return big


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where the small model is written")
    parser.add_argument("--steps", type=int, default=600)
    asked = parser.parse_args()
    train(asked.steps).save_pretrained(asked.directory)


if __name__ == "__main__":
    main()
