"""Spliced KL: the loss of a model's predictions if a reconstruction replaces an activation."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.diffing.activation_store import ActivationStore, Model
from rlhf_lab.diffing.crosscoder import Crosscoder
from rlhf_lab.diffing.patching import patch_hook
from rlhf_lab.functional import kl_per_sequence, kl_per_token, log_probs
from rlhf_lab.training.capture import ROWS_AT_ONCE, capture_activations


class SplicedKL(NamedTuple):
    """KL of each model from itself with another activation at the site, in nats per text.

    Args:
        spliced: with the crosscoder's reconstruction.
        ablated: with the mean of the store.
    """

    spliced: Float[Tensor, " model"]
    ablated: Float[Tensor, " model"]


@torch.no_grad()
def spliced_kl(
    coder: Crosscoder,
    store: ActivationStore,
    models: Mapping[str, Model],
    tokens: Int[Tensor, "batch seq"],
    site: str,
    mask: Bool[Tensor, "batch seq"] | None = None,
) -> SplicedKL:
    """Run each model with the crosscoder's reconstruction of its own activations at the site.

    The KL is exact, summed over each text and averaged over texts, which have no padding.

    KL(model || spliced model)

    Args:
        mask: True where the activation is replaced; everywhere if None.
    """
    mean, total = store.activations.double().mean(0).float(), torch.zeros(2, len(store.models))
    for rows in torch.arange(len(tokens)).split(ROWS_AT_ONCE):
        ids, where = tokens[rows], None if mask is None else mask[rows]
        acts = [capture_activations(models[m], ids, [site, "logits"]) for m in store.models]
        x = torch.stack([each[site].float().cpu() for each in acts], 2)
        made = coder.decode(coder.encode(x.flatten(0, 1))).reshape_as(x)
        for i, name in enumerate(store.models):
            logprobs = log_probs(acts[i]["logits"])
            for kind, value in enumerate((made, mean.expand_as(made))):
                put = patch_hook(value[:, :, i], None, where)
                with models[name].hooks(fwd_hooks=[(site, put)]):
                    logits = capture_activations(models[name], ids, ["logits"])["logits"]
                kl = kl_per_sequence(kl_per_token(logprobs, log_probs(logits)))
                total[kind, i] += kl.sum().cpu()
    return SplicedKL(*(total / len(tokens)))
