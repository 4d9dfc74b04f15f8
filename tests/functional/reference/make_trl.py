"""Writes trl.json: seeded inputs, and what TRL makes of them.

`make reference` builds its environment: trl==0.11.4 and requirements/trl.txt.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from store import draw, write
from trl import DPOTrainer, PPOTrainer, RewardTrainer
from trl.core import (
    entropy_from_logits,
    logprobs_from_logits,
    masked_mean,
    masked_var,
    masked_whiten,
    whiten,
)
from trl.trainer.utils import RunningMoments, truncate_response

MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
SETTINGS = {
    "gamma": 0.9,
    "lam": 0.8,
    "cliprange": 0.1,
    "cliprange_value": 0.2,
    "vf_coef": 0.3,
    "ratio_threshold": 10.0,
    "whiten_rewards": False,
}


def trainer(**settings: Any) -> SimpleNamespace:
    """As much of a PPOTrainer as its functions read."""
    config = SimpleNamespace(**(SETTINGS | {"kl_penalty": "kl"} | settings))
    self = SimpleNamespace(config=config, kl_ctl=SimpleNamespace(value=0.2))
    self._kl_penalty = lambda new, ref: PPOTrainer._kl_penalty(self, new, ref)
    return self


def statistics() -> dict[str, Any]:
    """Masked mean, variance and whitening; entropy and log-probabilities."""
    x, logits, ids = draw(3, 5) + 2, draw(2, 4, 6), torch.randint(0, 6, (2, 4))
    return {
        "x": x,
        "mask": MASK,
        "mean": masked_mean(x, MASK),
        "var": masked_var(x, MASK),
        "whitened": masked_whiten(x, MASK),
        "scaled": masked_whiten(x, MASK, shift_mean=False),
        "whitened_without_mask": whiten(x),
        "logits": logits,
        "ids": ids,
        "entropy": entropy_from_logits(logits),
        "logprobs": logprobs_from_logits(logits, ids),
    }


def kl_and_rewards() -> dict[str, Any]:
    """The four KL penalties, and the rewards with the default one in them."""
    scores, logprobs, ref = draw(3), draw(3, 5), draw(3, 5)
    logits, ref_logits = draw(3, 5, 6), draw(3, 5, 6)
    total, _, _ = PPOTrainer.compute_rewards(trainer(), scores, logprobs, ref, MASK)
    kinds = {
        kind: trainer(kl_penalty=kind)._kl_penalty(logprobs, ref) for kind in ("kl", "abs", "mse")
    }
    of_all = (logits.log_softmax(-1), ref_logits.log_softmax(-1))
    return {
        "scores": scores,
        "logprobs": logprobs,
        "ref_logprobs": ref,
        "logits": logits,
        "ref_logits": ref_logits,
        "mask": MASK,
        "kl_coef": 0.2,
        "token_rewards": total,
        **kinds,
        "full": trainer(kl_penalty="full")._kl_penalty(*of_all),
    }


def advantages_and_loss() -> dict[str, Any]:
    """GAE, whitened; both losses, and what is logged beside them."""
    values, rewards = draw(3, 5), draw(3, 5)
    plain_values, advantages, returns = PPOTrainer.compute_advantages(
        trainer(), values, rewards, MASK
    )
    _, _, of_scaled = PPOTrainer.compute_advantages(
        trainer(whiten_rewards=True), values, rewards, MASK
    )
    old, new, logits, vpreds = draw(3, 5) / 4, draw(3, 5) / 4, draw(3, 5, 6), draw(3, 5)
    policy, value, stats = PPOTrainer.loss(
        trainer(), old, plain_values, logits, vpreds, new, MASK, advantages, returns
    )
    logged = ("policy/entropy", "policy/approxkl", "policy/policykl", "policy/clipfrac")
    logged += ("val/clipfrac", "val/error")
    return {
        "settings": SETTINGS,
        "values": values,
        "rewards": rewards,
        "mask": MASK,
        "advantages": advantages,
        "returns_of_scaled_rewards": of_scaled,
        "returns": returns,
        "old_logprobs": old,
        "logprobs": new,
        "logits": logits,
        "new_values": vpreds,
        "policy_loss": policy,
        "value_loss": value,
        **{name: stats[name] for name in logged},
    }


def moments() -> dict[str, Any]:
    """Running moments over three batches."""
    batches = [draw(4) * 3 + 1, draw(2) - 2, draw(5)]
    running = RunningMoments(SimpleNamespace(use_distributed=False))
    seen = []
    for batch in batches:
        running.update(batch)
        seen.append([running.mean, running.std])
    return {"batches": batches, "mean_and_std": seen}


def preferences() -> dict[str, Any]:
    """DPO, conservative DPO and IPO; the reward model's loss with margin and centring."""
    pairs, margin = draw(4, 6), draw(6).abs()
    settings = {
        "accelerator": SimpleNamespace(device="cpu"),
        "reference_free": False,
        "f_divergence_type": None,
        "beta": 0.3,
    }
    kinds = {"dpo": ("sigmoid", 0.0), "conservative_dpo": ("sigmoid", 0.1), "ipo": ("ipo", 0.0)}
    made = {}
    for name, (loss_type, smoothing) in kinds.items():
        self = SimpleNamespace(**settings, loss_type=loss_type, label_smoothing=smoothing)
        made[name], made["chosen_rewards"], made["rejected_rewards"] = DPOTrainer.dpo_loss(
            self, *pairs
        )
    args = SimpleNamespace(center_rewards_coefficient=0.05)
    model = lambda input_ids, **_: {"logits": input_ids}
    inputs = {"input_ids_chosen": pairs[0], "input_ids_rejected": pairs[1], "margin": margin}
    inputs |= {"attention_mask_chosen": None, "attention_mask_rejected": None}
    self = SimpleNamespace(args=args, use_reward_data_collator=True)
    reward_loss = RewardTrainer.compute_loss(self, model, inputs)
    return {
        "pairs": pairs,
        "beta": 0.3,
        "label_smoothing": 0.1,
        **made,
        "margin": margin,
        "center_coef": 0.05,
        "reward_loss": reward_loss,
    }


def truncation() -> dict[str, Any]:
    """Responses cut at their first stop token."""
    tokens = torch.tensor([[4, 7, 5, 9, 4], [1, 2, 3, 4, 5], [1, 2, 3, 4, 7]])
    return {"tokens": tokens, "stop_token": 7, "truncated": truncate_response(7, 0, tokens)}


def main() -> None:
    """Write the file beside this one."""
    torch.manual_seed(2)
    made = {
        "versions": {"trl": "0.11.4", "transformers": "4.46.3", "torch": "2.13.0"},
        "statistics": statistics(),
        "kl_and_rewards": kl_and_rewards(),
        "advantages_and_loss": advantages_and_loss(),
        "moments": moments(),
        "preferences": preferences(),
        "truncation": truncation(),
    }
    write(Path(__file__).with_name("trl.json"), made)


if __name__ == "__main__":
    main()
