from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

name = "Qwen/Qwen2.5-0.5B-Instruct"
model = AutoModelForCausalLM.from_pretrained(name, torch_dtype="bfloat16")
tok = AutoTokenizer.from_pretrained(name)
args = DPOConfig(
    output_dir="out", per_device_train_batch_size=4, max_length=1024, beta=0.1, bf16=True, gradient_checkpointing=True
)
peft_config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
trainer = DPOTrainer(
    model=model,
    args=args,
    processing_class=tok,
    train_dataset=load_dataset("my/pairs", split="train"),
    peft_config=peft_config,
)
trainer.train()
