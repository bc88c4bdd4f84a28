import peft
import torch
from transformers import Trainer, TrainingArguments

import stowage

model = stowage.offload("./tiny", device_memory="500KiB")
lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
model = peft.get_peft_model(model, lora)

texts = [torch.randint(5, 512, (64,)) for _ in range(16)]  # your own: token ids
data = [{"input_ids": ids, "labels": ids} for ids in texts]
settings = TrainingArguments(
    "./out",
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    max_steps=4,
    learning_rate=1e-3,
    gradient_checkpointing=True,
    use_cpu=True,
    report_to="none",
)
Trainer(model=model, args=settings, train_dataset=data).train()
model.save_pretrained("./my-lora")
