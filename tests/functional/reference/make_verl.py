"""Writes verl.json: seeded inputs, and what verl makes of them, with gradients.

`make reference` builds its environment: verl==0.9.1 and requirements/verl.txt.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from store import draw, write
from verl.trainer.ppo import core_algos as verl
from verl.workers.config import ActorConfig

MASK = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 0, 0], [0, 1, 0, 0, 1], [1, 1, 1, 1, 0]])
GROUP = np.array([3, 3, 8, 8])


def advantages() -> dict[str, Any]:
    """Every estimator, on rows with holes in them."""
    values, rewards, greedy = draw(4, 5), draw(4, 5) * MASK, draw(4)
    gae, returns = verl.compute_gae_advantage_return(rewards, values, MASK, 0.9, 0.8)
    common = {"token_level_rewards": rewards, "response_mask": MASK}
    grouped = common | {"index": GROUP}
    config = OmegaConf.create({"gamma": 0.9})
    estimates = {
        "grpo": verl.compute_grpo_outcome_advantage(**grouped, epsilon=1e-4),
        "dr_grpo": verl.compute_grpo_outcome_advantage(**grouped, norm_adv_by_std_in_grpo=False),
        "rloo": verl.compute_rloo_outcome_advantage(**grouped),
        "opo": verl.compute_opo_outcome_advantage(**grouped),
        "reinforce++_baseline": verl.compute_reinforce_plus_plus_baseline_outcome_advantage(
            **grouped
        ),
        "reinforce++": verl.compute_reinforce_plus_plus_outcome_advantage(**common, config=config),
        "remax": verl.compute_remax_outcome_advantage(
            token_level_rewards=rewards, reward_baselines=greedy, response_mask=MASK
        ),
    }
    return {
        "values": values,
        "token_rewards": rewards,
        "greedy_rewards": greedy,
        "mask": MASK,
        "group": GROUP.tolist(),
        "gamma": 0.9,
        "lam": 0.8,
        "grpo_eps": 1e-4,
        "whitened_gae": gae,
        "returns": returns,
        **{name: made[0] for name, made in estimates.items()},
    }


def objectives() -> dict[str, Any]:
    """Losses with two clips, and their gradients, in three aggregations."""
    new, old, adv = draw(4, 5) / 2, draw(4, 5) / 2, draw(4, 5) * 2
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.3,
        clip_ratio_c=1.5,
    )
    modes = {
        "token_mean": "token-mean",
        "sequence_mean": "seq-mean-token-mean",
        "constant": "seq-mean-token-sum-norm",
    }
    made = {}
    for name, key in (("dual_clip", "vanilla"), ("gspo", "gspo"), ("cispo", "cispo")):
        for ours, theirs in modes.items():
            leaf = new.clone().requires_grad_()
            loss, _ = verl.get_policy_loss_fn(key)(old, leaf, adv, MASK, theirs, config)
            loss.backward()
            made[f"{name}/{ours}"], made[f"{name}/{ours}/gradient"] = loss.detach(), leaf.grad
    return {
        "logprobs": new,
        "old_logprobs": old,
        "advantages": adv,
        "mask": MASK,
        "clip_coef": 0.2,
        "clip_coef_high": 0.3,
        "dual_clip": 1.5,
        **made,
    }


def kl() -> dict[str, Any]:
    """Every estimate, with its gradient."""
    new, ref, made = draw(4, 5) / 2, draw(4, 5) / 2, {}
    for ours, theirs in (
        ("k1", "kl"),
        ("k2", "k2"),
        ("k3", "low_var_kl"),
        ("abs", "abs"),
        ("mse", "mse"),
        ("k3_straight_through", "k3+"),
    ):
        leaf = new.clone().requires_grad_()
        value = verl.kl_penalty(leaf, ref, theirs)
        value.sum().backward()
        made[ours], made[f"{ours}/gradient"] = value.detach(), leaf.grad
    return {"logprobs": new, "ref_logprobs": ref, **made}


def main() -> None:
    """Write the file beside this one."""
    torch.manual_seed(4)
    made = {
        "versions": {"verl": "0.9.1", "torch": "2.13.0"},
        "advantages": advantages(),
        "objectives": objectives(),
        "kl": kl(),
    }
    write(Path(__file__).with_name("verl.json"), made)


if __name__ == "__main__":
    main()
