"""Settings of small runs, and the device of tests: CUDA if there is a GPU, else the CPU."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {"preset": "reel", "device": DEVICE, "total_phases": 2, "warmup_steps": 1}
SMALL |= {"batch_size": 8, "num_minibatches": 2, "gen_len": 6}
