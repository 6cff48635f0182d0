# Case B2: against B1 the width, the micro-batch and the learning rate differ at once.
dataset = "fineweb_edu"
n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
batch_size = 8
gradient_accumulation_steps = 64
dtype = "float16"
compile = True
learning_rate = 3e-4
min_lr = 3e-5
