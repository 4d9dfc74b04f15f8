"""Logit lens: a layer's residual stream read as the last one is, by final norm and unembedding."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.functional import kl_per_token, log_probs
from rlhf_lab.functional.masks import at_least_float32
from rlhf_lab.models.hooked_model import HookedModel, unembed_residuals

NUMBERS_READ = 2**24  # logits of one model that are in memory at once


def logit_lens(
    model: HookedModel, residual: Float[Tensor, "*site d_model"]
) -> Float[Tensor, "*site d_vocab"]:
    """What the model would say if this were the residual stream behind its last block.

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


@torch.no_grad()
def lens_divergence(
    model: HookedModel,
    reference: HookedModel,
    residuals: Float[Tensor, "*site batch seq d_model"],
    reference_residuals: Float[Tensor, "*site batch seq d_model"],
    states: Bool[Tensor, "batch seq"],
) -> Float[Tensor, "*site batch seq"]:
    """Compute the KL of two models' lenses in nats; 0 where `states` is False.

    KL(lens(h) || lens_ref(h_ref)); at the last residual, the KL of the models
    """
    chosen = states.to(residuals.device).expand(residuals.shape[:-1])
    size = max(1, NUMBERS_READ // model.cfg.d_vocab)
    both = (h[chosen].split(size) for h in (residuals, reference_residuals))
    read = lambda model, h: log_probs(logit_lens(model, h[None]))
    found = [
        kl_per_token(read(model, one), read(reference, other))[0]
        for one, other in zip(*both, strict=True)
    ]
    out = residuals.new_zeros(residuals.shape[:-1], dtype=torch.float32)
    return out.masked_scatter(chosen, torch.cat(found).float())
