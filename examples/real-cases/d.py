# Case D: "what will this run need: tokens, FLOPs, hours, VRAM, power, cost?" Logged: 3.9 s per iteration.
dataset = "fineweb_edu"
dataset_tokens = 3.68e9  # an option of foretrain: the prepared subset has about 3.68 B tokens
n_layer = 12
n_head = 12
n_embd = 384
block_size = 1024
batch_size = 16
gradient_accumulation_steps = 32
dtype = "float16"
compile = True
learning_rate = 1e-3
max_iters = 20_000
lr_decay_iters = 20_000
eval_iters = 200
eval_interval = 500
