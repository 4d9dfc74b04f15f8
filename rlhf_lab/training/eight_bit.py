"""AdamW with 8-bit moments, by bitsandbytes: one byte per number instead of four."""

from typing import Any

import torch
from torch.optim import AdamW, Optimizer

from rlhf_lab.extras import import_extra


def with_8bit_moments(optimizer: AdamW) -> Optimizer:
    """Build bitsandbytes' AdamW with block-wise quantized moments from an AdamW's groups.

    It can only minimize, so gradients are negated during its step. Tensors of fewer than 4096
    numbers keep moments of 32 bits.

    Source: Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861.
    """
    taken = ("params", "lr", "weight_decay", "betas", "eps")
    groups = [{name: group[name] for name in taken} for group in optimizer.param_groups]
    package = import_extra(
        "bitsandbytes", "optimizer='adamw_8bit'", "eightbit", ", or set optimizer='adamw'"
    )
    eight_bit = package.optim.AdamW8bit(groups)
    eight_bit.register_step_pre_hook(_negate_gradients)
    eight_bit.register_step_post_hook(_negate_gradients)
    return eight_bit


@torch.no_grad()
def _negate_gradients(optimizer: Optimizer, *inputs: Any) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_neg_(gradients)
