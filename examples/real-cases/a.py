# Case A: "why does a 30M model take 6.5 GB, and how could I have known from the config?"
# Logged: nvidia-smi 6,582 MiB on the card, of which the Python process held 4,464 MiB; parameters 29.94M.
dataset = "fineweb_edu"
n_layer = 6
n_head = 6
n_embd = 384
block_size = 512
batch_size = 16
gradient_accumulation_steps = 4
bias = False
dropout = 0.0
dtype = "float16"
compile = True
eval_iters = 200
