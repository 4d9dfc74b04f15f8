"""Neurons of the MLPs, and the contribution of each to the shift of a logit difference."""

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


class NeuronEnd(NamedTuple):
    """Neurons of one model at one position, in float64.

    Args:
        activation: after the nonlinearity and the gate, if any.
        write: derivative of the logit difference by each activation, times the final norm's scale.
        bias: contribution of b_out, times the scale.
        inverse_scale: one over the final norm's scale.
    """

    activation: Float[Tensor, "layer batch neuron"]
    write: Float[Tensor, "layer neuron"]
    bias: Float[Tensor, " layer"]
    inverse_scale: Float[Tensor, " batch"]


class NeuronShift(NamedTuple):
    """Contribution of each neuron to the shift of the logit difference.

    Args:
        rows: of each neuron; with `bias` they sum to the MLP's row.
        by_activation: by the neuron's activation; the rest is by its write and the scale.
        bias: of b_out.
    """

    rows: Float[Tensor, "layer batch neuron"]
    by_activation: Float[Tensor, "layer batch neuron"]
    bias: Float[Tensor, "layer batch"]


def refuse_no_neurons(model: HookedModel, probe: str) -> None:
    """Raise ConfigError for blocks without an MLP with W_out."""
    if not all(hasattr(getattr(block, "mlp", None), "W_out") for block in model.blocks):
        raise ConfigError(
            f"The model has blocks without an MLP of single neurons. Remove {probe}, and use "
            "LogitShift."
        )


@torch.no_grad()
def neuron_end(model: HookedModel, acts: dict[str, Tensor], words: Words) -> NeuronEnd:
    """Return the neurons, from activations of `NEURON_SITE` and the norm's scale at one position.

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
    """Split the MLPs' rows of a shift by neuron, and each neuron's by activation and write.

    Each factor, the activation a and the write over the scale e = w s, gets its Shapley value.

    row = a1 e1 - a0 e0 = (a1 - a0) (e0 + e1) / 2 + (e1 - e0) (a0 + a1) / 2
    """
    e0, e1 = (end.write[:, None] * end.inverse_scale[None, :, None] for end in (before, after))
    a0, a1 = before.activation, after.activation
    b0, b1 = (end.bias[:, None] * end.inverse_scale for end in (before, after))
    return NeuronShift(a1 * e1 - a0 * e0, (a1 - a0) * (e0 + e1) / 2, b1 - b0)


def neuron_groups(
    write: Float[Tensor, "layer neuron"], moved: Float[Tensor, "layer neuron"]
) -> Int[Tensor, "layer neuron"]:
    """Return the index of each neuron's group in `NEURON_GROUPS`; -1 if a sign is 0.

    Args:
        write: of the model before.
        moved: the shift of the mean activation.

    (after Yang et al. 2024, arXiv 2411.06424)
    """
    raises = write * moved > 0
    group = torch.where(raises, 0, 2) + torch.where(raises, moved < 0, moved > 0).long()
    return group.masked_fill((write == 0) | (moved == 0), -1)
