"""Mixtures of experts whose router was trained, at a size that is worth offloading: for `benchmarks.weights_moe` and
`benchmarks.published_moe`.

A router with random weights chooses by a token's embedding alone and has no favourites. So a small model (hidden 128, 8
layers of 64 experts of which 4 are chosen) is trained on the demo's corpus for some minutes, with a loss that balances
the experts of each layer, and then widened: each hidden element becomes several equal ones, and each matrix is repeated
and divided so that all activations, and the router's choices, stay what they were.

Families: `qwen3_moe` (its experts take 1.6 GB in float32, eight times as wide), `gpt_oss` (biases, attention sinks,
windows of 128 tokens in every second layer) and `deepseek_v3` (latent attention, a first layer without experts, and an
expert that all tokens share).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, Final

import torch
from scripts.demo_corpus import build_corpus
from torch import Tensor, nn

from stowage.demo.corpus import model_path

HIDDEN, INNER, LAYERS, EXPERTS, CHOSEN, VOCAB = 128, 32, 8, 64, 4, 4096
"""``LAYERS``: those with experts."""
WIDER = 8
BATCH, LENGTH = 6, 192
BALANCE = 0.02
"""How much it costs to prefer some experts of a layer, beside the loss of the text."""
CORRECTED = 0.01
"""What a step adds to the score of an expert of DeepSeek-V3's that was chosen less often than others."""
ROUTERS: Final = {"qwen3_moe": ".mlp.gate", "gpt_oss": ".mlp.router", "deepseek_v3": ".mlp.gate"}
_KEPT: Final = (
    "q_norm.weight",
    "k_norm.weight",
    "q_a_layernorm.weight",
    "kv_a_layernorm.weight",
    "router.bias",
    "_correction_bias",
)
"""Of a head, a latent or all experts, which stay as wide as they are."""
_WIDE_OUTPUTS: Final = ("q_b_proj.weight", "kv_b_proj.weight")
_WIDE_INPUTS: Final = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight", "lm_head.weight", "gate.weight", "router.weight")


def config(family: str, wider: int, inner: int = 0) -> Any:
    """Of a model ``wider`` times as wide as the small one, with experts ``inner`` times as wide (0: as much)."""
    from transformers import AutoConfig

    width = INNER * (inner or wider)
    own: dict[str, dict[str, Any]] = {
        "qwen3_moe": {
            "moe_intermediate_size": width,
            "num_experts": EXPERTS,
            "norm_topk_prob": True,
            "head_dim": 32,
            "num_key_value_heads": 2 * wider,
        },
        "gpt_oss": {"num_local_experts": EXPERTS, "head_dim": 32, "num_key_value_heads": 2 * wider},
        "deepseek_v3": {
            "moe_intermediate_size": width,
            "n_routed_experts": EXPERTS,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 128,
            "kv_lora_rank": 128,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "num_key_value_heads": 4 * wider,
            "num_nextn_predict_layers": 0,
            "norm_topk_prob": True,
        },
    }
    dense = family == "deepseek_v3"
    return AutoConfig.for_model(
        family,
        hidden_size=HIDDEN * wider,
        intermediate_size=width * (1 + 3 * dense),
        num_hidden_layers=LAYERS + dense,
        num_attention_heads=4 * wider,
        num_experts_per_tok=CHOSEN,
        vocab_size=VOCAB,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **own[family],
    )


def tokens_of(text: str) -> Tensor:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path())
    return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])


def train(family: str, steps: int) -> Any:
    """The small model after ``steps`` of training."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(family, 1), dtype=torch.float32).train()
    chosen: list[Tensor] = []

    def hear(router: Any, _given: Any, found: Any) -> None:
        logits = found[0].flatten(0, -2)
        chosen.append(logits)
        if family == "deepseek_v3":  # which balances by adding to the scores of those that were chosen seldom
            bias = router.e_score_correction_bias
            often = torch.bincount(
                (logits.detach().sigmoid() + bias).topk(CHOSEN).indices.reshape(-1), minlength=EXPERTS
            )
            bias += CORRECTED * (often.float().mean() - often).sign()

    for name, module in model.named_modules():
        if name.endswith(ROUTERS[family]) and not isinstance(module, nn.Linear):
            module.register_forward_hook(hear)
    data = tokens_of("\n\n".join(document.text for document in build_corpus().train))
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=steps, pct_start=0.1)
    began_s = time.perf_counter()
    for step in range(steps):
        starts = torch.randint(0, len(data) - LENGTH, (BATCH,))
        ids = torch.stack([data[at : at + LENGTH] for at in starts.tolist()])
        chosen.clear()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        assert len(chosen) == LAYERS
        optimiser.zero_grad(set_to_none=True)
        (loss + BALANCE * sum(imbalance(logits) for logits in chosen)).backward()
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


def widened(name: str, weight: Tensor, wider: int, inner: int) -> Tensor:
    """The small model's parameter ``name``, no stack of experts, for hidden states ``wider`` and experts ``inner``
    times as wide.
    """
    if name.endswith(_KEPT):
        return weight
    if name.endswith(("embed_tokens.weight", "down_proj_bias")):
        return weight.repeat(1, wider)
    if name.endswith("gate_up_proj_bias"):
        return weight.repeat(1, inner)
    if weight.dim() == 1:
        return weight.repeat(wider)
    if name.endswith(_WIDE_OUTPUTS):
        return weight.repeat(wider, 1)
    if name.endswith(_WIDE_INPUTS):
        return weight.repeat(1, wider) / wider
    outputs, inputs = (inner, wider) if ".mlp." in name else (wider, wider)
    if name.endswith("down_proj.weight"):
        outputs, inputs = inputs, outputs
    return weight.repeat(outputs, inputs) / inputs


def experts_of(family: str, module: Any) -> dict[str, Tensor]:
    """The stacks of the small model's experts, (experts, outputs, inputs): gate, up and down."""
    wide, down = module.gate_up_proj.detach(), module.down_proj.detach()
    if family == "gpt_oss":  # it has inputs first, and gate and up in turn
        wide, down = wide.transpose(1, 2), down.transpose(1, 2)
        return {"gate": wide[:, ::2], "up": wide[:, 1::2], "down": down}
    gate, up = wide.chunk(2, 1)
    return {"gate": gate, "up": up, "down": down}


@torch.no_grad()
def widen(small: Any, wider: int = WIDER) -> Any:
    """The same function of a `qwen3_moe` with hidden states and experts ``wider`` times as wide."""
    from transformers import AutoModelForCausalLM

    big = AutoModelForCausalLM.from_config(config("qwen3_moe", wider), dtype=torch.float32).eval()
    target = dict(big.named_parameters())
    for name, weight in small.named_parameters():
        if name.endswith("gate_up_proj"):
            stacks = experts_of("qwen3_moe", small.get_submodule(name.rpartition(".")[0]))
            wide = torch.cat([stacks[part].repeat(1, wider, wider) for part in ("gate", "up")], 1) / wider
        elif weight.dim() == 3:
            wide = weight.repeat(1, wider, wider) / wider
        else:
            wide = widened(name, weight, wider, wider)
        target[name].copy_(wide)
    return big


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where the small model is written")
    parser.add_argument("--family", choices=ROUTERS, default="qwen3_moe")
    parser.add_argument("--steps", type=int, default=600)
    asked = parser.parse_args()
    train(asked.family, asked.steps).save_pretrained(asked.directory)


if __name__ == "__main__":
    main()
