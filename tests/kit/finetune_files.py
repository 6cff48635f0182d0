"""Configs of other trainers, as people write them."""

AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
load_in_4bit: true
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
lora_modules_to_save: [embed_tokens, lm_head]
datasets:
  - path: mine/data
    type: alpaca
val_set_size: 0.05
evals_per_epoch: 4
sequence_len: 2048
sample_packing: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_bnb_8bit
learning_rate: 2e-4
bf16: auto
gradient_checkpointing: true
flash_attention: true
plugins:
  - axolotl.integrations.liger.LigerPlugin
  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin
liger_rope: true
liger_fused_linear_cross_entropy: true
wandb_project: mine
deepspeed: deepspeed_configs/zero2.json
context_paralel_size: 2
"""

LLAMA_FACTORY = """
model_name_or_path: Qwen/Qwen3-4B
stage: sft
do_train: true
finetuning_type: lora
lora_target: all
quantization_bit: 4
dataset: identity
template: qwen3
cutoff_len: 1024
output_dir: saves
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
bf16: true
ddp_timeout: 180000000
use_galore: false
"""
