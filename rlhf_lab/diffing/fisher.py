"""Fisher information of a change of weights: the KL of a small step, in forward mode."""

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.func import jvp

from rlhf_lab.diffing.weight_line import WeightLine
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.torch_modes import differentiable_attention


@torch.no_grad()
def fisher_quadratic(
    model: HookedModel | WeightLine,
    tokens: Int[Tensor, "batch seq"],
    delta: Mapping[str, Float[Tensor, "..."]],
    states: Bool[Tensor, "batch seq"] | None = None,
    attention_mask: Bool[Tensor, "batch seq"] | None = None,
) -> Float[Tensor, " batch"]:
    """Compute half of delta' F delta for each text, without the Fisher matrix F.

    It is half the variance, under the model's distribution, of the derivative of the logits along
    the change, summed over the states: the KL of small steps, in nats per text.

    Args:
        model: a model, or a line of weights, for its first end.
        delta: changes of effective weights, by name.
        states: True where the KL counts; everywhere if None.
        attention_mask: False on left padding.

    KL(theta || theta + delta) = 1/2 sum_states Var_v~pi(J delta)_v + O(|delta|^3)
    (Amari 1998, "Natural Gradient Works Efficiently in Learning", section 3)
    """
    line = model if isinstance(model, WeightLine) else WeightLine(model, model, in_float64=True)
    tokens = tokens.to(line.text_device)
    mask = None if attention_mask is None else attention_mask.to(line.text_device)
    along = {name: change.to(line.before[name]) for name, change in delta.items()}
    run = lambda some: line.logits(line.before | some, tokens, mask)
    with differentiable_attention():
        logits, moved = jvp(run, ({name: line.before[name] for name in along},), (along,))
    probs = logits.softmax(-1)
    mean = (probs * moved).sum(-1, keepdim=True)
    half = (probs * (moved - mean).square()).sum(-1) / 2
    if states is not None:
        half = half.masked_fill(~states.to(line.text_device), 0.0)
    return half.sum(1)
