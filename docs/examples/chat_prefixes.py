"""A conversation whose turns are not computed twice, with Transformers' own generate(). See docs/transformers.md.

    python docs/examples/chat_prefixes.py [MODEL] [DIRECTORY]

Without MODEL a tiny random one is made, which talks nonsense. Run it twice: the second time everything is on disk.
"""

import sys
import tempfile
import time
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import stowage

SYSTEM = "You know everything about ships and answer in one sentence. " * 20
QUESTIONS = ["What is a stowage plan?", "Who makes it?", "What happens without one?"]


def main(name: str, directory: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(name).eval()
    tokenizer = AutoTokenizer.from_pretrained(name)
    messages = [{"role": "user", "content": SYSTEM}]
    with stowage.PrefixCache(model, host_memory="256MiB", disk=f"{directory}:1GiB") as prefixes:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            inputs = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            ids, mask = inputs["input_ids"], inputs["attention_mask"]

            before, began_s = prefixes.stats()["prefixes"]["tokens_restored"], time.perf_counter()
            cache = prefixes.prefill(ids, attention_mask=mask, timeout_s=30)  # as long as a busy disk may take
            out = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=24, do_sample=False)
            prefixes.keep(cache, out, attention_mask=mask)
            elapsed_s = time.perf_counter() - began_s

            answer = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
            messages.append({"role": "assistant", "content": answer})
            found = prefixes.stats()["prefixes"]["tokens_restored"] - before
            print(f"{ids.shape[1]} tokens, {found} of them restored, {elapsed_s * 1000:.0f} ms: {answer[:30]!r}")


def tiny_model() -> str:
    from stowage.testing import tiny_models

    path = Path(tempfile.gettempdir()) / "stowage-tiny-llama"
    if not path.exists():
        tiny_models.write("llama", path)
    return str(path)


if __name__ == "__main__":
    main(*(sys.argv[1:2] or [tiny_model()]), *(sys.argv[2:3] or ["./prefixes"]))
