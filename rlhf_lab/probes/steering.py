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
    """Let the policy continue each prefix with a vector of its own added at its last position.

    1. Read the prefixes through the modules, all rows by themselves, and add each row's vector at
       the site, at the last position; later tokens see it through the KV cache.
    2. Draw a token per step by the given noise, as `sample` does.

    Returns:
        Prefixes and continuations, nothing stopped early; how improbable each continuation is to
        the steered policy, in nats.

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
