"""Logit lens: any layer's residual stream, decoded by the final norm and the unembedding."""

from jaxtyping import Float
from torch import Tensor

from rlhf_lab.diffing.activation_store import Model
from rlhf_lab.functional.masks import at_least_float32
from rlhf_lab.models.hooked_model import unembed_residuals


def logit_lens(
    model: Model, residual: Float[Tensor, "*site d_model"]
) -> Float[Tensor, "*site d_vocab"]:
    """Decode a residual stream into log-probabilities, as if it were the last block's output.

    1. Apply the final norm and the unembedding.
    2. Take the log-softmax over the vocabulary.

    In nats; each vector is decoded on its own. Early layers do not have to use the basis that the
    unembedding reads, so a poor prediction does not mean that the information is missing.

    lens(h) = log softmax(W_U norm(h) + b_U)   (nostalgebraist 2020; Belrose et al. 2023, arXiv
    2303.08112)
    """
    rows = residual.reshape(1, -1, residual.shape[-1])
    logits = at_least_float32(unembed_residuals(getattr(model, "base_model", model), rows))
    return logits.log_softmax(dim=-1).reshape(*residual.shape[:-1], -1)
