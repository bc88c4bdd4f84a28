"""LoRA training of a model whose weights lie somewhere, in a process of its own, for `benchmarks.lora_training`.

    python benchmarks/peers/lora_trainer.py WAY MODEL DTYPE SCRATCH CHECKPOINTING

Ways are those of `weights_engine.py`. Commands are JSON lines on stdin: {"batch": 4, "tokens": 128, "steps": 3, "cold":
true}; answers are the seconds and the loss of each step, and the most memory that the process had meanwhile.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import weights_engine


def run(model: Any, optimizer: Any, batch: int, tokens: int, steps: int, cold: bool) -> dict[str, Any]:
    """Steps on random tokens, the same for everybody. Cold: nothing is in the page cache when a step begins."""
    import torch

    Path("/proc/self/clear_refs").write_text("5\n", encoding="ascii")
    seconds, losses, anonymous = [], [], 0
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(5, model.config.vocab_size, (batch, tokens), generator=generator)
        if cold:
            weights_engine.drop_page_cache()
        began_s = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        anonymous = max(anonymous, weights_engine.status("RssAnon"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began_s)
        losses.append(loss.item())
    return {"steps_s": seconds, "losses": losses, "peak": weights_engine.status("VmHWM"), "anonymous": anonymous}


def main() -> None:
    import peft
    import torch

    way, path, dtype, scratch, checkpointing = sys.argv[1:6]
    base = weights_engine.load(way, path, dtype, scratch)
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, lora)
    if checkpointing == "checkpointing":
        model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    print(json.dumps({"rss": weights_engine.status("VmRSS")}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(model, optimizer, **json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
