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
    """The random numbers of one purpose in one phase, from nothing but the seed.

    No random state runs through a training run, so a phase can be repeated from its weights alone,
    and nothing that draws random numbers on the side changes it. They come from the CPU, and so
    are the same on every device. `call` numbers the uses of one purpose in a phase.
    """
    entropy = np.random.SeedSequence([seed, phase, STREAMS.index(stream), *[call] * (call > 0)])
    state = int(entropy.generate_state(1, np.uint64)[0] >> np.uint64(1))
    return torch.Generator().manual_seed(state)
