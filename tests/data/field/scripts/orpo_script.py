from transformers import AutoModelForCausalLM
from trl import ORPOConfig, ORPOTrainer

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct", torch_dtype="bfloat16")
cfg = ORPOConfig(
    output_dir="out", per_device_train_batch_size=2, max_length=2048, gradient_checkpointing=True, bf16=True, beta=0.1
)
ORPOTrainer(model=model, args=cfg, train_dataset=None).train()
