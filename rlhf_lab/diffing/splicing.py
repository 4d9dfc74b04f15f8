"""Spliced KL: what a reconstruction in an activation's place costs a model's predictions."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.diffing.activation_store import ActivationStore, Model
from rlhf_lab.diffing.crosscoder import Crosscoder
from rlhf_lab.functional import kl_per_sequence, kl_per_token, log_probs
from rlhf_lab.training.capture import ROWS_AT_ONCE, capture_activations


class SplicedKL(NamedTuple):
    """KL of each model from itself with something else at the site, in nats per text.

    Args:
        spliced: with the crosscoder's reconstruction.
        ablated: with the mean of what the store keeps.
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

    1. Take both models' activations on the texts, and what the crosscoder makes of them.
    2. Run each model with these, and with the mean activation, at the positions under the mask.
    3. Take the exact KL of its own predictions from those, summed over the text.

    Texts are without padding. KL(own || spliced), mean over texts
    """
    shown = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    mean = store.activations.double().mean(0).float()
    spliced, ablated = [], []
    for rows in torch.arange(len(tokens)).split(ROWS_AT_ONCE):
        ids, there = tokens[rows], shown[rows]
        acts = {m: capture_activations(models[m], ids, [site, "logits"]) for m in store.models}
        x = torch.stack([acts[m][site].float().cpu() for m in store.models], 2)
        made = coder.decode(coder.encode(x.flatten(0, 1))).reshape_as(x)
        for i, name in enumerate(store.models):
            for found, instead in (
                (spliced, made[:, :, i]),
                (ablated, mean[i].expand_as(made[:, :, i])),
            ):
                logits = with_activation(models[name], ids, site, instead, there)
                logprobs = log_probs(acts[name]["logits"])
                kl = kl_per_token(logprobs, log_probs(logits.to(logprobs.device)))
                found.append(kl_per_sequence(kl).double().cpu())
    by_model = lambda found: torch.stack(
        [torch.cat(found[i :: len(store.models)]).mean() for i in range(len(store.models))]
    ).float()
    return SplicedKL(by_model(spliced), by_model(ablated))


@torch.no_grad()
def with_activation(
    model: Model,
    tokens: Int[Tensor, "batch seq"],
    site: str,
    instead: Float[Tensor, "batch seq d_model"],
    mask: Bool[Tensor, "batch seq"],
) -> Float[Tensor, "batch seq d_vocab"]:
    """A model's logits with another activation at a site, where the mask is True."""

    def put(activation: Tensor, hook: object) -> Tensor:
        there = mask.to(activation.device)[..., None]
        return torch.where(there, instead.to(activation), activation)

    with model.hooks(fwd_hooks=[(site, put)]):
        return capture_activations(model, tokens, ["logits"])["logits"]
