import torch

import stowage

model = stowage.offload("./tiny", device_memory="500KiB")
out = model.generate(torch.randint(5, 512, (1, 30)), max_new_tokens=10)
placement = model.stowage.placement
print(placement.device_bytes, "bytes in memory,", placement.pass_bytes, "read for every step")
