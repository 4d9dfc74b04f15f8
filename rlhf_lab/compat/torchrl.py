"""A rollout as torchrl shows one: a TensorDict with a step per generated token."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.extras import import_extra
from rlhf_lab.samples import Samples
from rlhf_lab.training.rollout import Rollout


def to_tensordict(
    rollout: Rollout, kl_coef: float = 0.0, stop_tokens: Sequence[int] = (), pad_token: int = 0
) -> Any:
    """A TensorDict `[batch gen]` with the keys of torchrl's `RolloutFromModel`, and two more.

    1. At step t, the observation is the prompt and the t tokens written so far, on the left of a
       row of `seq`; the action is the next token.
    2. A row is done once, at its last real token: terminated if it ended itself, by a stop token in
       the last place or before it; truncated if it used up the places.
    3. There the reward is paid, once; or each token its own, if the reward function pays tokens.
       Every real token pays kl_coef times its log-ratio (times its exact KL, if the rollout has no
       log-probs of the reference).

    Beside torchrl's keys, `mask` is True on the steps that were taken, and `next, truncated` stands
    beside terminated. Steps that were not taken have log-prob and rewards 0. The two observations
    are `[batch gen seq]`, so memory grows with the square of the length.

    Args:
        kl_coef: the weight of the KL in the rewards; 0 where it is in the loss.
        stop_tokens: what ends a response of full length.
        pad_token: what fills a row after its last token; `attention_mask` is False there.

    Raises:
        ConfigError: the package tensordict is not installed.
    """
    samples = rollout.samples
    mask = samples.mask
    reward_raw = F.token_rewards(rollout.credit_rewards, mask)
    kl = rollout.kl if rollout.ref_logprobs is None else samples.logprobs - rollout.ref_logprobs
    reward_kl = -kl_coef * F.zero_masked(kl, mask)
    tokens, seen = _observations(samples, pad_token)
    done = F.last_token_mask(mask)
    written = samples.tokens[:, samples.prefix_len :]
    stops = torch.tensor(stop_tokens, dtype=written.dtype, device=written.device)
    # by a stop token, rather than the number of tokens to generate
    ended_itself = torch.isin(written[:, -1], stops) | ~mask[:, -1]
    terminated = done & ended_itself[:, None]
    after = {
        "input_ids": tokens[:, 1:],
        "attention_mask": seen[:, 1:],
        "done": done[..., None],
        "terminated": terminated[..., None],
        "truncated": (done & ~terminated)[..., None],
        "reward": (reward_raw + reward_kl)[..., None],
        "reward_raw": reward_raw[..., None],
        "reward_kl": reward_kl[..., None],
    }
    fields = {
        "action": written.masked_fill(~mask, pad_token),
        "input_ids": tokens[:, :-1],
        "attention_mask": seen[:, :-1],
        "sample_log_prob": F.zero_masked(samples.logprobs, mask)[..., None],
        "mask": mask,
        "next": after,
    }
    TensorDict = import_extra("tensordict", "to_tensordict()", "tensordict").TensorDict
    return TensorDict(fields, batch_size=mask.shape, names=[None, "time"]).clone()


def _observations(
    samples: Samples, pad_token: int
) -> tuple[Int[Tensor, "batch states seq"], Bool[Tensor, "batch states seq"]]:
    """What stands in each row before the first token, and after each: gen + 1 states.

    After the last real token nothing changes any more.
    """
    real = torch.cat([samples.prompt_mask, samples.mask], dim=1)
    whole, there = F.pad_right(samples.tokens, real, pad_token)
    written = torch.arange(samples.mask.shape[1] + 1, device=whole.device)
    lengths = samples.prompt_mask.sum(1)[:, None] + written
    places = torch.arange(whole.shape[1], device=whole.device)
    seen = there[:, None] & (places < lengths[..., None])
    return torch.where(seen, whole[:, None], pad_token), seen
