# Case B1: "MFU went up, but what really got better?" Logged: 3,900 to 3,920 ms per iteration, "mfu 12.9%".
dataset = "fineweb_edu"
n_layer = 12
n_head = 12
n_embd = 384
block_size = 1024
batch_size = 16
gradient_accumulation_steps = 32
dtype = "float16"
compile = True
learning_rate = 1e-3
