"""Agreement of a hooked model with the one that plain transformers loads from a directory.

Both run in float32, which both can represent whole: transformers computes the norms and rotary
angles of a Llama in float32 whatever the dtype, so that float64 on one side alone measures the
rounding of the other.
"""

import copy
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf_lab.models.load import model_from_files
from rlhf_lab.models.transformer_lens import HookedTransformer

TOLERANCE = 1e-4
"""Of both figures of an `Agreement`; SmolLM2-135M has 1.2e-5 and 8e-6 where nothing is wrong."""
CHECKED_ROWS, CHECKED_TOKENS = 2, 256


class Agreement(NamedTuple):
    """How far two models' log-probs are apart.

    Attributes:
        weighed: at the worst position, the mean distance of the log-probs, weighed by the
            probability that both give on average, in nats.
        relative: the largest distance of any log-prob l, in parts of 1 + |l|; it sees a token that
            both find unlikely, whose log-prob rounding moves the most.
    """

    weighed: float
    relative: float

    @property
    def holds(self) -> bool:
        """Whether both are within what rounding explains; nan is not."""
        return self.weighed <= TOLERANCE and self.relative <= TOLERANCE


def agreement(
    ours: Float[Tensor, "*batch d_vocab"], theirs: Float[Tensor, "*batch d_vocab"]
) -> Agreement:
    """Compare two models' logits at the same tokens."""
    ours, theirs = (logits.double().log_softmax(-1) for logits in (ours, theirs))
    distance = (ours - theirs).abs()
    weight = (ours.exp() + theirs.exp()) / 2
    weighed = (weight * distance).nan_to_num(nan=torch.inf).sum(-1).max()
    relative = (distance / (1 + ours.abs())).nan_to_num(nan=torch.inf).max()
    return Agreement(weighed.item(), relative.item())


@torch.no_grad()
def agreement_with_files(model: HookedTransformer, directory: Path) -> Agreement:
    """Compare a model with the one in a Hugging Face directory, on random tokens on the CPU."""
    reloaded = model_from_files(AutoModelForCausalLM, str(directory), "model", dtype=torch.float32)
    shape = CHECKED_ROWS, min(CHECKED_TOKENS, model.cfg.n_ctx)
    tokens = torch.randint(model.cfg.d_vocab, shape, generator=torch.Generator().manual_seed(0))
    ours = copy.deepcopy(model).to("cpu", print_details=False)
    ours = ours.to(torch.float32, print_details=False)
    ours.reset_hooks(including_permanent=True)
    found = ours.eval()(tokens, attention_mask=torch.ones_like(tokens))
    return agreement(found, reloaded.eval()(tokens).logits)
