"""Steering of continuations: vectors added to the residual stream at one position of prefixes."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab.functional.masks import at_least_float32
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.models.hooked_transformer import HookPoint
from rlhf_lab.models.value_head import init_cache
from rlhf_lab.sampling import draw_token
from rlhf_lab.sampling_spec import SamplingSpec


@torch.no_grad()
def continue_steered(
    policy: TransformerWithValueHead,
    prefixes: Int[Tensor, "rows prefix"],
    site: str,
    added: Float[Tensor, "rows d_model"],
    spec: SamplingSpec,
    noise: Float[Tensor, "gen rows"],
) -> tuple[Int[Tensor, "rows seq"], Float[Tensor, " rows"]]:
    """Continue each prefix with its vector added at the site, at its last position.

    Later tokens see it through the KV cache. One token per step is drawn by the given noise, as in
    `sample`.

    Returns:
        Prefixes and continuations of full length; the surprisal of each under the steered policy.

    Source: Turner et al. 2023, arXiv 2308.10248, at one position.
    """

    def add(act: Tensor, hook: HookPoint) -> Tensor:
        return torch.cat([act[:, :-1], act[:, -1:] + added[:, None].to(act)], 1)

    model, cache = policy.base_model, init_cache(policy, len(prefixes))
    with model.hooks(fwd_hooks=[(site, add)]):
        logits, _ = policy(prefixes, torch.ones_like(prefixes).bool(), past_kv_cache=cache)
    tokens, surprise = prefixes, torch.zeros(len(prefixes), device=prefixes.device)
    for step, drawn in enumerate(noise.to(prefixes.device)):
        if step:
            last = tokens[:, -1:]
            logits, _ = policy(last, torch.ones_like(last).bool(), past_kv_cache=cache)
        kept, ids = spec.candidates(at_least_float32(logits[:, -1]))
        logprobs = kept.log_softmax(-1)
        place = draw_token(logprobs, drawn).clamp(max=kept.shape[-1] - 1)
        surprise = surprise - logprobs.gather(-1, place[:, None])[:, 0]
        token = place if ids is None else ids.gather(-1, place[:, None])[:, 0]
        tokens = torch.cat([tokens, token[:, None]], 1)
    return tokens, surprise
