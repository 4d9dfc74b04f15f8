"""Logit lens: any layer's residual stream, decoded by the final norm and the unembedding."""

from jaxtyping import Float
from torch import Tensor

from rlhf_lab.functional.masks import at_least_float32
from rlhf_lab.models.hooked_model import HookedModel, unembed_residuals


def logit_lens(
    model: HookedModel, residual: Float[Tensor, "*site d_model"]
) -> Float[Tensor, "*site d_vocab"]:
    """Log-probabilities of the model if this were the residual stream after its last block.

    1. Apply the final norm and the unembedding.
    2. Take the log-softmax over the vocabulary.

    In nats, for each residual by itself. An early layer need not write in the basis that the
    unembedding reads: a poor lens does not say that nothing is known there.

    lens(h) = log softmax(W_U norm(h) + b_U)   (nostalgebraist 2020; Belrose et al. 2023, arXiv
    2303.08112)
    """
    rows = residual.reshape(1, -1, residual.shape[-1])
    logits = at_least_float32(unembed_residuals(model, rows))
    return logits.log_softmax(dim=-1).reshape(*residual.shape[:-1], -1)
