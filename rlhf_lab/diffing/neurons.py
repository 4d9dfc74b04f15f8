"""Neurons of the MLPs: what each adds to the shift of a logit difference between two models."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab.diffing.contrast import Words
from rlhf_lab.diffing.logit_shift import logit_reader
from rlhf_lab.errors import ConfigError
from rlhf_lab.models.device import exact
from rlhf_lab.models.hooked_model import HookedModel, is_centered

NEURON_SITE = "blocks.*.mlp.hook_post"
NEURON_GROUPS = (
    "writes the word, more active",
    "writes the other, less active",
    "writes the word, less active",
    "writes the other, more active",
)
"""By the signs of a neuron's write and of its activation's shift; the first two raise the word."""


class NeuronEnd(NamedTuple):
    """The neurons of one of two models at one position, in float64.

    Args:
        activation: behind the nonlinearity, and the gate if there is one.
        write: by how much the logit difference grows with each neuron's activation, but for the
            final norm's scale.
        bias: what b_out adds to it, but for the scale.
        inverse_scale: one over the final norm's scale.
    """

    activation: Float[Tensor, "layer batch neuron"]
    write: Float[Tensor, "layer neuron"]
    bias: Float[Tensor, " layer"]
    inverse_scale: Float[Tensor, " batch"]


class NeuronShift(NamedTuple):
    """What each neuron adds to the shift of the logit difference; with the biases, its MLP's row.

    Args:
        rows: a neuron's contribution after, less that before.
        by_activation: the share of its activation in that; the rest is its write's and the scale's.
        bias: what b_out adds to the shift.
    """

    rows: Float[Tensor, "layer batch neuron"]
    by_activation: Float[Tensor, "layer batch neuron"]
    bias: Float[Tensor, "layer batch"]


def refuse_no_neurons(model: HookedModel, probe: str) -> None:
    """Raise ConfigError for a model whose blocks have no MLP with a W_out of its own."""
    if not all(hasattr(getattr(block, "mlp", None), "W_out") for block in model.blocks):
        raise ConfigError(
            f"the model has blocks without an MLP of single neurons; leave out {probe}, and look "
            "at whole parts with LogitShift."
        )


@torch.no_grad()
def neuron_end(model: HookedModel, acts: dict[str, Tensor], words: Words) -> NeuronEnd:
    """One model's neurons, from activations at `NEURON_SITE` and of the final norm's scale.

    Args:
        acts: at one position: `[batch ...]`.
        words: whose logits are compared, and the second is taken off the first.

    write_j = <W_out[j], q>, with q as `logit_reader` gives it, less its mean under a LayerNorm
    """
    reader = logit_reader(model, words)
    if is_centered(model.ln_final):
        reader = reader - reader.mean()
    layers = [block.mlp for block in model.blocks]
    posts = [acts[NEURON_SITE.replace("*", str(layer))] for layer in range(len(layers))]
    biases = [getattr(mlp, "b_out", None) for mlp in layers]
    return NeuronEnd(
        torch.stack([exact(post) for post in posts]),
        torch.stack([exact(mlp.W_out) @ reader for mlp in layers]),
        torch.stack([reader.new_zeros(()) if b is None else exact(b) @ reader for b in biases]),
        1 / exact(acts["ln_final.hook_scale"])[:, 0],
    )


def neuron_shift(before: NeuronEnd, after: NeuronEnd) -> NeuronShift:
    """Split the MLPs' rows of a shift by neuron, and each neuron's by what changed of it.

    Two factors change at once, the activation a and the write over the scale e = w s; each gets
    half of what they make together (Shapley 1953).

    row = a1 e1 - a0 e0 = (a1 - a0) (e0 + e1) / 2 + (e1 - e0) (a0 + a1) / 2
    """
    e0, e1 = (end.write[:, None] * end.inverse_scale[None, :, None] for end in (before, after))
    a0, a1 = before.activation, after.activation
    b0, b1 = (end.bias[:, None] * end.inverse_scale for end in (before, after))
    return NeuronShift(a1 * e1 - a0 * e0, (a1 - a0) * (e0 + e1) / 2, b1 - b0)


def neuron_groups(
    write: Float[Tensor, "layer neuron"], moved: Float[Tensor, "layer neuron"]
) -> Int[Tensor, "layer neuron"]:
    """The number of each neuron's group among `NEURON_GROUPS`; -1 where one of the two is 0.

    Args:
        write: of the model before, which may be over its scale.
        moved: the shift of the mean activation.

    (after Yang et al. 2024, arXiv 2411.06424, who find four groups of neurons behind what DPO does
    to toxicity, most of it not of the few neurons that write it most)
    """
    raises = write * moved > 0
    group = torch.where(raises, 0, 2) + torch.where(raises, moved < 0, moved > 0).long()
    return group.masked_fill((write == 0) | (moved == 0), -1)
