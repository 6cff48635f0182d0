import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments
quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B", dtype=torch.bfloat16, quantization_config=quantized)
model = get_peft_model(model, LoraConfig(r=64, target_modules="all-linear"))
args = TrainingArguments(output_dir="out", per_device_train_batch_size=16, bf16=True, gradient_checkpointing=True)
