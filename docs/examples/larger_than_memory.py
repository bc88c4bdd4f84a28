"""A model that is larger than the memory it is given, answering as it does with all of it.

python docs/examples/larger_than_memory.py MODEL [SHARE]
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import stowage

PROMPT = "A ship that is too small for its cargo"


def main(name: str, share: str = "0.6") -> None:
    whole = AutoModelForCausalLM.from_pretrained(name).eval()
    tokenizer = AutoTokenizer.from_pretrained(name)
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    expected = whole.generate(ids, max_new_tokens=16, do_sample=False)
    weights_bytes = sum(parameter.nbytes for parameter in whole.parameters())
    del whole

    model = stowage.offload(name, device_memory=int(weights_bytes * float(share)))
    answer = model.generate(ids, max_new_tokens=16, do_sample=False)
    placement = model.stowage.placement
    print(f"{weights_bytes} bytes of weights, {placement.device_bytes} of them in memory")
    print(f"{placement.pass_bytes} bytes are read for every step")
    print("the same answer:", torch.equal(answer, expected))


if __name__ == "__main__":
    main(*sys.argv[1:])
