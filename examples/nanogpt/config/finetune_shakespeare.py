# The settings of karpathy/nanoGPT config/finetune_shakespeare.py (3adf61e).
out_dir = "out-shakespeare"
eval_interval = 5
eval_iters = 40
wandb_log = False
wandb_project = "shakespeare"
dataset = "shakespeare"
init_from = "gpt2-xl"
always_save_checkpoint = False
batch_size = 1
gradient_accumulation_steps = 32
max_iters = 20
learning_rate = 3e-5
decay_lr = False
