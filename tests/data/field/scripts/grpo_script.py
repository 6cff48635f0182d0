from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

dataset = load_dataset("my/tldr", split="train")


def reward_len(completions, **kwargs):
    return [-abs(20 - len(c)) for c in completions]


args = GRPOConfig(
    output_dir="out",
    per_device_train_batch_size=8,
    num_generations=8,
    max_prompt_length=512,
    max_completion_length=1024,
    bf16=True,
    gradient_checkpointing=True,
    learning_rate=1e-6,
)
trainer = GRPOTrainer(model="Qwen/Qwen2.5-0.5B-Instruct", reward_funcs=reward_len, args=args, train_dataset=dataset)
trainer.train()
