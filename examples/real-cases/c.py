# Case C: "out of memory: what do I change?" 12 GB card, beside a desktop that holds about 2.1 GB.
dataset = "fineweb_edu"
n_layer = 12
n_head = 12
n_embd = 576
block_size = 1024
batch_size = 16
gradient_accumulation_steps = 32
dtype = "float16"
compile = True
eval_iters = 200
eval_interval = 500
