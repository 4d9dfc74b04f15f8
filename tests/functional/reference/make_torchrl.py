"""Writes torchrl.json: seeded inputs, and what torchrl makes of them.

`make reference` builds its environment: torchrl==0.14.1 and requirements/torchrl.txt.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from store import draw, write
from tensordict import TensorDict
from torchrl.data.llm.utils import RolloutFromModel
from torchrl.modules.models.llm import GPT2RewardModel
from torchrl.objectives.llm.grpo import CISPOLoss, GRPOLoss
from torchrl.objectives.value.functional import (
    generalized_advantage_estimate,
    td0_advantage_estimate,
)

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0]]).bool()
EOS = RolloutFromModel.EOS_TOKEN_ID


def padding() -> dict[str, Any]:
    """Rows moved from the right to the left and back."""
    right = torch.tensor([[4, 7, EOS, EOS], [1, EOS, EOS, EOS], [1, 2, 3, 4]])
    left = RolloutFromModel._padded_right_to_left(right)
    back = RolloutFromModel._padded_left_to_right(left)
    return {"right": right, "left": left, "back": back, "pad_token": EOS}


def logprobs_and_kl() -> dict[str, Any]:
    """Log-probabilities of tokens, and the mean of k3."""
    logits, ids, new, ref = draw(2, 4, 6), torch.randint(0, 6, (2, 4)), draw(3, 4), draw(3, 4)
    stored = TensorDict({"_cur_log_prob": new}, batch_size=[3])
    self = SimpleNamespace(kl_to_ref_coeff=0.3)
    penalty, kl = GRPOLoss._kl_to_ref(self, stored, ref_log_prob=ref)
    return {
        "logits": logits,
        "ids": ids,
        "logprobs_of_ids": RolloutFromModel.logprobs_of_labels(logits, ids),
        "logprobs": new,
        "ref_logprobs": ref,
        "kl_coef": 0.3,
        "kl_penalty": penalty,
        "kl": kl,
    }


def advantages() -> dict[str, Any]:
    """GAE and one-step advantages of whole rows, which end with the last token."""
    values, rewards = draw(3, 4, 1), draw(3, 4, 1)
    next_values = torch.cat([values[:, 1:], torch.zeros(3, 1, 1)], dim=1)
    done = torch.zeros(3, 4, 1).bool()
    done[:, -1] = True
    gae, _ = generalized_advantage_estimate(0.9, 0.8, values, next_values, rewards, done, done)
    one_step = td0_advantage_estimate(0.9, values, next_values, rewards, done)
    return {
        "values": values[..., 0],
        "token_rewards": rewards[..., 0],
        "gamma": 0.9,
        "lam": 0.8,
        "gae": gae[..., 0],
        "one_step": one_step[..., 0],
    }


def objectives() -> dict[str, Any]:
    """GRPO's and CISPO's losses per token, their aggregations, and how many ratios are clipped."""
    log_weight, adv = draw(3, 4, 1) / 2, draw(3, 4, 1)
    low, high = torch.tensor(0.2, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
    self = SimpleNamespace(_clip_bounds=((-low).log1p(), high.log1p()), reduction="mean")
    grpo, clip_fraction = GRPOLoss._compute_policy_objective(self, log_weight, adv)
    cispo, _ = CISPOLoss._compute_policy_objective(self, log_weight, adv)
    self.aggregation = "prompt_mean"
    prompt_mean = GRPOLoss._aggregate_loss_value(self, grpo, MASK)
    return {
        "log_ratio": log_weight[..., 0],
        "advantages": adv[..., 0],
        "mask": MASK,
        "clip_coef": 0.2,
        "clip_coef_high": 0.3,
        "grpo_loss": grpo[..., 0],
        "cispo_loss": cispo[..., 0],
        "clip_fraction_without_mask": clip_fraction,
        "grpo_loss_prompt_mean": prompt_mean.squeeze(),
    }


def reward_model_loss() -> dict[str, Any]:
    """The loss on every token after two responses part, over pairs padded on the right."""
    chosen = torch.tensor([[5, 6, 7, 8], [5, 6, 1, EOS], [5, 6, 7, EOS], [5, 1, EOS, EOS]])
    rejected = torch.tensor([[5, 6, 2, 8], [5, 6, EOS, EOS], [5, 6, 7, EOS], [5, 2, 3, 4]])
    chosen_rewards, rejected_rewards = draw(4, 4), draw(4, 4)
    loss = GPT2RewardModel.compute_reward_loss(
        SimpleNamespace(input_ids=chosen, rewards=chosen_rewards),
        SimpleNamespace(input_ids=rejected, rewards=rejected_rewards),
    )
    return {
        "chosen": chosen,
        "rejected": rejected,
        "pad_token": EOS,
        "chosen_rewards": chosen_rewards,
        "rejected_rewards": rejected_rewards,
        "loss": loss,
    }


def rollout_rewards() -> dict[str, Any]:
    """Rewards of a rollout: score over the label's, clipped, and KL; the first row stops early."""
    generated = torch.tensor([[1, 2, 5, EOS, EOS, EOS], [1, 2, 5, 6, 7, 8]])
    batch = SimpleNamespace(
        input_ids=torch.full((2, 6), 3),
        attention_mask=torch.ones(2, 6).bool(),
        prompt_rindex=torch.tensor([2, 2]),
    )
    scores, labels = torch.tensor([4.0, 15.0]), torch.tensor([1.0, 2.0])
    answers = iter([(None, scores), (None, labels)])
    rollout = RolloutFromModel(
        model=None,
        ref_model=None,
        reward_model=lambda **_: next(answers),
        kl_coef=0.1,
        max_new_tokens=4,
        score_clip=10.0,
    )
    log_ratio = draw(2, 4)
    made = rollout.create_rollout_td(batch, generated, torch.zeros(2, 4, 1), log_ratio)
    return {
        "generated": generated[:, 2:],
        "stop_token": EOS,
        "scores": scores,
        "label_scores": labels,
        "score_clip": 10.0,
        "kl_coef": 0.1,
        "log_ratio": log_ratio,
        "reward_raw": made["next", "reward_raw"][..., 0],
        "reward_kl": made["next", "reward_kl"][..., 0],
    }


def rollout_view() -> dict[str, Any]:
    """A whole rollout: row 0 stops early, row 1 never, row 2 with the last token that it may."""
    generated = torch.tensor(
        [[1, 2, 5, EOS, EOS, EOS, EOS], [1, 2, 3, 6, 7, 8, 9], [1, 2, 5, 6, 7, EOS, EOS]]
    )
    scores, log_probs, log_ratio = torch.tensor([3.0, 2.0, 1.0]), draw(3, 4), draw(3, 4)
    batch = SimpleNamespace(
        input_ids=generated,
        attention_mask=generated != EOS,
        prompt_rindex=torch.tensor([2, 3, 2]),
    )
    answers = iter([(None, scores), (None, torch.zeros(3))])
    rollout = RolloutFromModel(
        model=None,
        ref_model=None,
        reward_model=lambda **_: next(answers),
        kl_coef=0.1,
        max_new_tokens=4,
    )
    made = rollout.create_rollout_td(batch, generated, log_probs[..., None], log_ratio)
    keys = made.keys(include_nested=True, leaves_only=True)
    return {
        "generated": generated,
        "prompt_lengths": batch.prompt_rindex,
        "stop_token": EOS,
        "scores": scores,
        "log_probs": log_probs,
        "log_ratio": log_ratio,
        "kl_coef": 0.1,
        "batch_size": list(made.batch_size),
        **{" ".join(k if isinstance(k, tuple) else (k,)): made[k] for k in keys},
    }


def scores_of_generate() -> dict[str, Any]:
    """Log-probs of tokens from the logits of each step, of the likeliest, and after a stop."""
    logits, ids = draw(2, 4, 6), torch.randint(0, 6, (2, 4))
    steps = tuple(logits.unbind(1))
    rollout = RolloutFromModel(None, None, None, max_new_tokens=4)
    of_short = rollout._get_scores(steps[:2], ids)[..., 0]
    return {
        "logits": logits,
        "ids": ids,
        "logprobs": rollout._get_scores(steps, ids)[..., 0],
        "max_logprobs": rollout._get_scores(steps, use_max=True),
        "nan_after_an_early_stop": of_short.isnan(),
    }


def main() -> None:
    """Write the file beside this one."""
    torch.manual_seed(3)
    made = {
        "versions": {"torchrl": "0.14.1", "tensordict": "0.14.3", "torch": "2.13.0"},
        "padding": padding(),
        "logprobs_and_kl": logprobs_and_kl(),
        "advantages": advantages(),
        "objectives": objectives(),
        "reward_model_loss": reward_model_loss(),
        "rollout_rewards": rollout_rewards(),
        "rollout_view": rollout_view(),
        "scores_of_generate": scores_of_generate(),
    }
    write(Path(__file__).with_name("torchrl.json"), made)


if __name__ == "__main__":
    main()
