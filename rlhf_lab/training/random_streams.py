"""Random streams: a generator for each purpose, seeded by the run's seed and the phase."""

from typing import Literal, get_args

import numpy as np
import torch

Stream = Literal[
    "sampling", "minibatches", "evaluation", "prompts", "lengths", "generate", "resampled_prompts",
    "rounding", "best_of_n", "eval_text", "continuations", "subspaces", "reference_texts",
]  # fmt: skip
STREAMS = get_args(Stream)


def phase_generator(seed: int, phase: int, stream: Stream, call: int = 0) -> torch.Generator:
    """Return the generator of one purpose in one phase, or of one of its calls, on the CPU."""
    entropy = np.random.SeedSequence([seed, phase, STREAMS.index(stream), *[call] * (call > 0)])
    state = int(entropy.generate_state(1, np.uint64)[0] >> np.uint64(1))
    return torch.Generator().manual_seed(state)
