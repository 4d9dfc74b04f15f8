"""KL attribution: the KL of two models, by outputs of components or by groups of weights."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.diffing.groups import Groups, check_partition, sum_by_group
from rlhf_lab.diffing.weight_line import NODES, WeightLine, integrate
from rlhf_lab.functional import kl_per_token, log_probs

TEXTS_PER_PASS = 8  # sequences in one backward pass

ReadOut = Callable[[Float[Tensor, "n d_model"]], Float[Tensor, "n d_vocab"]]


class OutputKL(NamedTuple):
    """A KL in nats at each state, by the components through whose outputs it appears."""

    rows: Float[Tensor, "component n"]  # with `read_out` they sum to `kl`
    read_out: Float[Tensor, " n"]  # of the changed unembedding at the first model's residual
    kl: Float[Tensor, " n"]


def kl_by_output(
    parts0: Float[Tensor, "component n d_model"],
    parts1: Float[Tensor, "component n d_model"],
    read_out0: ReadOut,
    read_out1: ReadOut,
    nodes: int = NODES,
) -> OutputKL:
    """Split KL(second || first) exactly by the outputs in which the models differ.

    1. Exchange the final norm and unembedding at the first model's last residual, for their KL.
    2. Move the residual in a straight line to the second model's, and integrate the KL's gradient
       along each component's change, which includes changes of its input.

    Args:
        parts0, parts1: outputs of each component to the residual stream, at n states.
        read_out0, read_out1: logits of a last residual.

    att_c = int_0^1 <dKL/dh, c1 - c0> da  along h0 + a (h1 - h0)
    (integrated gradients: Sundararajan et al. 2017, arXiv 1703.01365)
    """
    h0, change = parts0.sum(0), parts1 - parts0
    with torch.no_grad():
        reference = log_probs(read_out0(h0)[None])
        of_read_out, whole = (
            kl_per_token(log_probs(read_out1(h)[None]), reference)[0] for h in (h0, parts1.sum(0))
        )

    def differentiate(node: float) -> Float[Tensor, "component n"]:
        with torch.enable_grad():
            h = (h0 + node * change.sum(0)).requires_grad_()
            kl = kl_per_token(log_probs(read_out1(h)[None]), reference).sum()
            (gradient,) = torch.autograd.grad(kl, h)
        return torch.einsum("cnd,nd->cn", change, gradient)

    rows = integrate(differentiate, whole - of_read_out, 1e-3 * whole.max() + 1e-6, nodes)
    return OutputKL(rows, of_read_out, whole)


def kl_by_weights(
    line: WeightLine,
    groups: Groups,
    tokens: Int[Tensor, "batch seq"],
    states: Bool[Tensor, "batch seq"],
    attention_mask: Bool[Tensor, "batch seq"] | None = None,
    nodes: int = NODES,
) -> Float[Tensor, "group part"]:
    """Split KL(second || first) exactly by the groups of weights that changed, in nats.

    Return sums over each 8 sequences, a part. All groups come from the same backward passes, one at
    each node. The nodes double while more than 1e-3 of the KL is missing.

    Args:
        states: where the KL counts.
        attention_mask: False on padding to the left of a prompt.

    att_g = int_0^1 <grad KL(theta_0 + a delta || theta_0), delta_g> da
    """
    check_partition(groups, line.before)
    mask = torch.ones_like(states) if attention_mask is None else attention_mask

    def split_part(rows: Int[Tensor, " rows"]) -> Float[Tensor, " group"]:
        with torch.no_grad():
            reference = log_probs(line.logits(line.before, tokens[rows], mask[rows]))

        def kl(weights: dict[str, Tensor]) -> Float[Tensor, ""]:
            logprobs = log_probs(line.logits(weights, tokens[rows], mask[rows]))
            each = kl_per_token(logprobs, reference)
            return each.masked_fill(~states[rows].to(each.device), 0.0).sum()

        def differentiate(node: float) -> Float[Tensor, " group"]:
            along = {name: each.requires_grad_() for name, each in line.at(node).items()}
            with torch.enable_grad():
                leaves = list(along.values())
                gradients = torch.autograd.grad(kl(along), leaves, materialize_grads=True)
            pairs = zip(along, gradients, strict=True)
            return sum_by_group({n: x.double() * line.delta[n].double() for n, x in pairs}, groups)

        with torch.no_grad():
            whole = kl(line.after).cpu()
        return integrate(differentiate, whole, 1e-3 * whole + 1e-6, nodes)

    return torch.stack([*map(split_part, torch.arange(len(tokens)).split(TEXTS_PER_PASS))], 1)
