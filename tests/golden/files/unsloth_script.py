import os
from unsloth import FastLanguageModel, is_bfloat16_supported
from trl import SFTTrainer, SFTConfig
max_seq_length = 2048
model, tokenizer = FastLanguageModel.from_pretrained(
    "unsloth/Llama-3.2-3B-Instruct", max_seq_length=max_seq_length, dtype=None, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(
    model, r=16, target_modules=["q_proj", "v_proj"], lora_dropout=0, use_gradient_checkpointing="unsloth",
    random_state=3407)
trainer = SFTTrainer(model=model, train_dataset=load(), args=SFTConfig(
    per_device_train_batch_size=2, gradient_accumulation_steps=8 // 2, optim="adamw_8bit",
    bf16=is_bfloat16_supported(), fp16=not is_bfloat16_supported(), learning_rate=float(os.environ["LR"]),
    max_grad_norm=0.3))
