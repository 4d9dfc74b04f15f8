"""Writes torchtune.json: seeded inputs, and what torchtune makes of them.

`make reference` builds its environment: torchtune==0.6.1 and requirements/torchtune.txt.
"""

from pathlib import Path
from typing import Any

import torch
from store import draw, write
from torchtune import rlhf
from torchtune.rlhf.loss import DPOLoss, PPOLoss
from torchtune.rlhf.rewards import get_reward_penalty_mask, get_rewards_ppo, whiten

MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]).bool()


def statistics() -> dict[str, Any]:
    """Masked mean, variance and whitening, whose flag means its opposite."""
    x = draw(3, 5) + 2
    mean = rlhf.masked_mean(x, MASK)
    return {
        "x": x,
        "mask": MASK,
        "mean": mean,
        "row_means": rlhf.masked_mean(x, MASK, dim=-1),
        "var": rlhf.masked_var(x - mean, MASK),
        "whiten_with_shift_mean_true": whiten(x, MASK, shift_mean=True),
        "whiten_with_shift_mean_false": whiten(x, MASK, shift_mean=False),
        "whiten_without_mask": whiten(x, shift_mean=False),
    }


def sequences() -> dict[str, Any]:
    """Truncation at the first stop token, and log-probabilities of tokens."""
    tokens = torch.tensor([[4, 7, 5, 9, 4], [9, 4, 4, 7, 1], [1, 2, 3, 4, 5], [1, 2, 3, 4, 7]])
    padding, cut = rlhf.truncate_sequence_at_first_stop_token(
        tokens.clone(), torch.tensor([7, 9]), fill_value=0
    )
    logits, ids = draw(2, 5, 6), torch.randint(0, 6, (2, 5))
    cut_logits = rlhf.truncate_sequence_for_logprobs(logits, context_length=2)
    lengths = (~padding).sum(-1)
    return {
        "tokens": tokens,
        "stop_tokens": [7, 9],
        "padding": padding,
        "truncated": cut,
        "logits": logits,
        "ids": ids,
        "prefix_len": 2,
        "temperature": 0.7,
        "logprobs": rlhf.logits_to_logprobs(cut_logits, ids[:, 2:], temperature=0.7),
        "no_eos": get_reward_penalty_mask(padding, lengths, penalise_no_eos=True),
        "too_short": get_reward_penalty_mask(padding, lengths, False, min_response_length=3),
    }


def rewards_and_advantages() -> dict[str, Any]:
    """KL in the rewards, and GAE with its returns."""
    scores, logprobs, ref = draw(3), draw(3, 5), draw(3, 5)
    last = MASK.sum(-1) - 1
    total, kl, kl_reward = get_rewards_ppo(scores, logprobs, ref, 0.2, last)
    values, rewards = draw(3, 5) * MASK, draw(3, 5) * MASK
    advantages, returns = rlhf.estimate_advantages(values, rewards, 0.9, 0.8, MASK)
    return {
        "scores": scores,
        "logprobs": logprobs,
        "ref_logprobs": ref,
        "kl_coef": 0.2,
        "mask": MASK,
        "token_rewards": total,
        "kl": kl,
        "kl_reward": kl_reward,
        "values": values,
        "rewards": rewards,
        "gamma": 0.9,
        "lam": 0.8,
        "advantages": advantages,
        "returns": returns,
    }


def losses() -> dict[str, Any]:
    """PPO's two losses and DPO's."""
    old, new, advantages = draw(3, 5) / 4, draw(3, 5) / 4, draw(3, 5)
    old_values, values, returns = draw(3, 5), draw(3, 5), draw(3, 5)
    ppo = PPOLoss(epsilon=0.1, value_clip_range=0.2, value_coeff=0.3)
    loss, policy, value, ratio, clipfrac = ppo(
        old, new, advantages, old_values, values, returns, MASK, MASK
    )
    pairs = draw(4, 6)
    smooth, chosen, rejected = DPOLoss(beta=0.3, label_smoothing=0.1)(*pairs)
    return {
        "old_logprobs": old,
        "logprobs": new,
        "advantages": advantages,
        "old_values": old_values,
        "values": values,
        "returns": returns,
        "mask": MASK,
        "clip_coef": 0.1,
        "value_clip": 0.2,
        "vf_coef": 0.3,
        "loss": loss,
        "policy_loss": policy,
        "value_loss": value,
        "mean_ratio_without_mask": ratio.mean(),
        "clip_fraction": clipfrac,
        "pairs": pairs,
        "beta": 0.3,
        "label_smoothing": 0.1,
        "dpo": DPOLoss(beta=0.3)(*pairs)[0],
        "conservative_dpo": smooth,
        "chosen_rewards": chosen,
        "rejected_rewards": rejected,
    }


def main() -> None:
    """Write the file beside this one."""
    torch.manual_seed(1)
    made = {
        "versions": {"torchtune": "0.6.1", "torch": "2.13.0"},
        "statistics": statistics(),
        "sequences": sequences(),
        "rewards_and_advantages": rewards_and_advantages(),
        "losses": losses(),
    }
    write(Path(__file__).with_name("torchtune.json"), made)


if __name__ == "__main__":
    main()
