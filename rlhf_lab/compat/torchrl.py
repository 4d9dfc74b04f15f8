"""TensorDict view of a rollout, as in torchrl: a step per generated token."""

from collections.abc import Sequence
from typing import Any

import torch

from rlhf_lab import functional as F
from rlhf_lab.errors import import_extra
from rlhf_lab.training.rollout import Rollout


def to_tensordict(
    rollout: Rollout, kl_coef: float = 0.0, stop_tokens: Sequence[int] = (), pad_token: int = 0
) -> Any:
    """Convert a rollout to a TensorDict `[batch gen]` with keys of torchrl's `RolloutFromModel`.

    At step t, the observation is the prompt and the first t generated tokens, at the left of a row
    of `seq`; the action is the next token. A row is done at its last real token: terminated by a
    stop token, else truncated. Every real token's reward has -kl_coef times its log-ratio (its
    exact KL without log-probs of the reference). `mask` is True on steps that were taken.

    Args:
        kl_coef: weight of the KL in the rewards; 0 if it is in the loss.
        stop_tokens: tokens that end a response of full length.
        pad_token: token after the last one; `attention_mask` is False there.

    Raises:
        ConfigError: If the package tensordict is not installed.
    """
    samples, mask = rollout.samples, rollout.samples.mask
    reward_raw = F.token_rewards(rollout.credit_rewards, mask)
    kl = rollout.kl if rollout.ref_logprobs is None else samples.logprobs - rollout.ref_logprobs
    reward_kl = -kl_coef * F.zero_masked(kl, mask)
    # states before the first token and after each: gen + 1 of them, constant after the last token
    real = torch.cat([samples.prompt_mask, mask], dim=1)
    whole, is_real = F.pad_right(samples.tokens, real, pad_token)
    steps = torch.arange(mask.shape[1] + 1, device=mask.device)
    lengths = samples.prompt_mask.sum(1)[:, None] + steps
    positions = torch.arange(whole.shape[1], device=mask.device)
    visible = is_real[:, None] & (positions < lengths[..., None])
    tokens = torch.where(visible, whole[:, None], pad_token)
    done = F.last_token_mask(mask)
    generated = samples.tokens[:, samples.prefix_len :]
    has_ended = F.has_stop(generated[:, -1:], stop_tokens) | ~mask[:, -1]
    terminated = done & has_ended[:, None]
    after = {
        "input_ids": tokens[:, 1:],
        "attention_mask": visible[:, 1:],
        "done": done[..., None],
        "terminated": terminated[..., None],
        "truncated": (done & ~terminated)[..., None],
        "reward": (reward_raw + reward_kl)[..., None],
        "reward_raw": reward_raw[..., None],
        "reward_kl": reward_kl[..., None],
    }
    fields = {
        "action": generated.masked_fill(~mask, pad_token),
        "input_ids": tokens[:, :-1],
        "attention_mask": visible[:, :-1],
        "sample_log_prob": F.zero_masked(samples.logprobs, mask)[..., None],
        "mask": mask,
        "next": after,
    }
    TensorDict = import_extra("tensordict", "to_tensordict()", "tensordict").TensorDict
    return TensorDict(fields, batch_size=mask.shape, names=[None, "time"]).clone()
