import torch
from transformers import AutoModelForCausalLM

import stowage

model = AutoModelForCausalLM.from_pretrained("./tiny").eval()
input_ids = torch.randint(5, 512, (1, 300))

with stowage.PrefixCache(model, host_memory="256MiB", disk="./prefixes:1GiB") as prefixes:
    cache = prefixes.restore(input_ids)  # the longest stored prefix, as a Transformers cache
    out = model.generate(input_ids, past_key_values=cache, max_new_tokens=20)
    prefixes.keep(cache, out)  # what is new is stored

    cache = prefixes.restore(out)
    print(cache.get_seq_length(), "of", out.shape[1], "tokens need not be computed")
