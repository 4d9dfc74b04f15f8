"""The same numbers as released packages (see reference/README.md), and intended differences."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import tensor
from torch.nn.functional import pad

from rlhf_lab import functional as F

HERE = Path(__file__).parent / "reference"


def load(package: str, section: str) -> dict[str, Any]:
    """A section of a package's file, with lists of numbers as tensors of double precision."""
    entries = json.loads((HERE / f"{package}.json").read_text())[section]
    return {key: as_tensor(value) for key, value in entries.items()}


def as_tensor(value: Any) -> Any:
    if not isinstance(value, list) or (value and isinstance(value[0], list) and ragged(value)):
        return value
    return torch.from_numpy(np.array(value))


def ragged(rows: list) -> bool:
    return len({len(row) for row in rows}) > 1


def close(got: torch.Tensor, expected: torch.Tensor | float, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(
        got.double(), torch.as_tensor(expected).double(), rtol=tolerance, atol=tolerance
    )


def test_torchtune_masked_statistics():
    case = load("torchtune", "statistics")
    x, mask = case["x"], case["mask"]
    close(F.masked_mean(x, mask), case["mean"])
    close(F.masked_mean(x, mask, dim=-1), case["row_means"])
    close(F.masked_var(x, mask), case["var"])
    close(F.whiten(x), case["whiten_without_mask"])


def test_torchtune_sequences():
    case = load("torchtune", "sequences")
    tokens, stops = case["tokens"], case["stop_tokens"].tolist()
    assert torch.equal(F.truncate_at_stop(tokens, stops, 0), case["truncated"])
    mask = F.response_mask(tokens, stops)
    assert torch.equal(~mask, case["padding"])
    logprobs = F.get_logprobs(case["logits"], case["ids"], case["prefix_len"], case["temperature"])
    close(logprobs, case["logprobs"])
    assert torch.equal(F.flawed_responses(mask, min_response_length=3), case["too_short"])


def test_torchtune_rewards_and_gae():
    case = load("torchtune", "rewards_and_advantages")
    mask = case["mask"]
    kl = F.kl_estimate(case["logprobs"], case["ref_logprobs"], "k1")
    close(kl, case["kl"])
    # torchtune also subtracts the KL on padding
    paid = F.token_rewards(case["scores"], mask, kl, case["kl_coef"])
    close(paid[mask], case["token_rewards"][mask])
    assert (paid[~mask] == 0).all() and (case["token_rewards"][~mask] != 0).all()
    advantages = F.compute_gae(case["values"], case["rewards"], case["gamma"], case["lam"], mask)
    close(F.compute_returns(advantages, case["values"], mask)[mask], case["returns"][mask])
    # its advantages are scaled but not centred, because its shift_mean means the opposite of TRL's
    close(F.whiten(advantages, mask, shift_mean=False), case["advantages"])
    assert F.masked_mean(case["advantages"], mask).abs() > 0.1


def test_torchtune_ppo_losses():
    case = load("torchtune", "losses")
    old, new, advantages, mask = (
        case[name] for name in ("old_logprobs", "logprobs", "advantages", "mask")
    )
    clip = case["clip_coef"]
    for objective in (
        F.calc_clipped_surrogate_objective(new, old, advantages, clip, mask, normalize=False),
        F.calc_policy_objective("ppo", new, old, advantages, mask, clip_coef=clip),
    ):
        close(-objective, case["policy_loss"])
    value_loss = F.calc_value_function_loss(
        case["values"], case["returns"], 1.0, mask, case["old_values"], case["value_clip"]
    )
    close(value_loss, case["value_loss"])
    close(-objective + case["vf_coef"] * value_loss, case["loss"])
    fractions = [
        f(new, old, clip, mask, advantages) for f in (F.clip_fraction_low, F.clip_fraction_high)
    ]
    close(sum(fractions), case["clip_fraction"])
    close(F.mean_ratio(new, old), case["mean_ratio_without_mask"])


def test_torchtune_and_trl_preference_losses():
    for case in (load("torchtune", "losses"), load("trl", "preferences")):
        pairs, beta, smoothing = case["pairs"], case["beta"], case["label_smoothing"]
        close(F.dpo_loss(*pairs, beta), case["dpo"].mean())
        close(F.dpo_loss(*pairs, beta, label_smoothing=smoothing), case["conservative_dpo"].mean())
        close(F.implicit_rewards(pairs[0], pairs[2], beta), case["chosen_rewards"])
        close(F.implicit_rewards(pairs[1], pairs[3], beta), case["rejected_rewards"])
    close(F.dpo_loss(*pairs, beta, kind="ipo"), case["ipo"].mean())
    reward_loss = F.bradley_terry_loss(*pairs[:2], case["margin"], case["center_coef"])
    close(reward_loss, case["reward_loss"])


def test_trl_statistics():
    case = load("trl", "statistics")
    x, mask = case["x"], case["mask"].bool()
    close(F.masked_mean(x, mask), case["mean"])
    close(F.masked_var(x, mask), case["var"])
    close(F.whiten(x, mask)[mask], case["whitened"][mask])
    close(F.whiten(x, mask, shift_mean=False)[mask], case["scaled"][mask])
    close(F.whiten(x), case["whitened_without_mask"])
    close(F.entropy_per_token(F.log_probs(case["logits"])), case["entropy"])
    # TRL's rows have no prompt: logits and ids are already in step
    shifted = torch.cat([case["ids"][:, :1], case["ids"]], dim=1)
    logits = torch.cat([case["logits"], case["logits"][:, :1]], dim=1)
    close(F.get_logprobs(logits, shifted), case["logprobs"])
    close(F.token_logprobs(F.log_probs(case["logits"]), case["ids"]), case["logprobs"])


def test_trl_kl_penalties_and_rewards():
    case = load("trl", "kl_and_rewards")
    logprobs, ref, mask = case["logprobs"], case["ref_logprobs"], case["mask"].bool()
    for ours, theirs in (("k1", "kl"), ("abs", "abs"), ("mse", "mse")):
        close(F.kl_estimate(logprobs, ref, ours), case[theirs])
    close(
        F.kl_per_token(F.log_probs(case["logits"]), F.log_probs(case["ref_logits"])), case["full"]
    )
    paid = F.token_rewards(case["scores"], mask, case["kl"], case["kl_coef"])
    close(paid[mask], case["token_rewards"][mask])


def test_trl_advantages_and_losses():
    case = load("trl", "advantages_and_loss")
    values, rewards, mask = case["values"], case["rewards"], case["mask"].bool()
    settings = case["settings"]
    gae = F.compute_gae(values, rewards, settings["gamma"], settings["lam"], mask)
    close(F.compute_returns(gae, values, mask)[mask], case["returns"][mask])
    close(F.whiten(gae, mask)[mask], case["advantages"][mask])
    new, old, clip = case["logprobs"], case["old_logprobs"], settings["cliprange"]
    close(-F.calc_clipped_surrogate_objective(new, old, gae, clip, mask), case["policy_loss"])
    zeroed = torch.where(mask, values, 0.0)
    value_inputs = (case["new_values"], case["returns"])
    value_clip = settings["cliprange_value"]
    value_loss = F.calc_value_function_loss(
        *value_inputs, settings["vf_coef"], mask, zeroed, value_clip
    )
    close(value_loss, case["value_loss"])
    entropy = F.entropy_per_token(F.log_probs(case["logits"]))
    close(F.calc_entropy_bonus(entropy, 1.0, mask), case["policy/entropy"])
    close(F.masked_mean(F.kl_estimate(old, new, "k2", mask), mask), case["policy/approxkl"])
    close(F.masked_mean(F.kl_estimate(old, new, "k1", mask), mask), case["policy/policykl"])
    whitened = F.whiten(gae, mask)
    fractions = [
        f(new, old, clip, mask, whitened) for f in (F.clip_fraction_low, F.clip_fraction_high)
    ]
    close(sum(fractions), case["policy/clipfrac"])
    close(F.value_clip_fraction(*value_inputs, zeroed, value_clip, mask), case["val/clipfrac"])
    close(F.calc_value_function_loss(*value_inputs, 2.0, mask), case["val/error"])


def test_trl_running_moments():
    case = load("trl", "moments")
    moments = F.RunningMoments()
    for batch, (mean, std) in zip(case["batches"], case["mean_and_std"].tolist(), strict=True):
        moments = moments.update(tensor(batch))
        assert moments.mean == pytest.approx(mean, rel=1e-5)
        assert moments.std == pytest.approx(std, rel=1e-5)


def test_torchrl_padding():
    case = load("torchrl", "padding")
    pad = case["pad_token"]
    left, mask = F.pad_left(case["right"], case["right"] != pad, pad)
    assert torch.equal(left, case["left"])
    assert torch.equal(F.pad_right(left, mask, pad)[0], case["back"])


def test_torchrl_logprobs_and_kl():
    case = load("torchrl", "logprobs_and_kl")
    # torchrl's rows have no prompt: logits and ids are already in step
    shifted = torch.cat([case["ids"][:, :1], case["ids"]], dim=1)
    logits = torch.cat([case["logits"], case["logits"][:, :1]], dim=1)
    close(F.get_logprobs(logits, shifted), case["logprobs_of_ids"])
    inputs = (case["logprobs"], case["ref_logprobs"])
    close(F.kl_estimate(*inputs, "k3").mean(), case["kl"])
    close(F.calc_sampled_kl_penalty(*inputs, "k3", case["kl_coef"]), case["kl_penalty"])


def test_torchrl_scores_of_generate():
    case = load("torchrl", "scores_of_generate")
    # a state more, whose logits predict nothing, and a token more, which nothing predicts
    logits = pad(case["logits"], (0, 0, 0, 1))
    close(F.get_logprobs(logits, pad(case["ids"], (1, 0)), 1), case["logprobs"])
    close(F.get_max_logprobs(logits, 1), case["max_logprobs"])
    # torchrl pads the logits of a row that stopped early with minus infinity, and normalises them
    assert case["nan_after_an_early_stop"].tolist() == [[False, False, True, True]] * 2


def test_torchrl_objectives():
    case = load("torchrl", "objectives")
    ratio, advantages, mask = case["log_ratio"], case["advantages"], case["mask"]
    old = torch.zeros_like(ratio)
    clips = {"clip_coef": case["clip_coef"], "clip_coef_high": case["clip_coef_high"]}
    close(-F.ppo_surrogate(ratio, old, advantages, **clips), case["grpo_loss"])
    objective = F.calc_policy_objective(
        "ppo", ratio, old, advantages, mask, aggregation="sequence_mean", **clips
    )
    close(-objective, case["grpo_loss_prompt_mean"])
    clipped = F.clip_fraction_low(ratio, old, 0.2) + F.clip_fraction_high(ratio, old, 0.3)
    close(clipped, case["clip_fraction_without_mask"])


def test_torchrl_reward_model_loss():
    case = load("torchrl", "reward_model_loss")
    chosen, rejected, pad = case["chosen"], case["rejected"], case["pad_token"]
    mask = F.divergence_mask(chosen, rejected, chosen != pad, rejected != pad)
    loss = F.bradley_terry_token_loss(case["chosen_rewards"], case["rejected_rewards"], mask)
    close(loss, case["loss"])


def test_torchrl_pays_rows_that_stop_early_twice():
    case = load("torchrl", "rollout_rewards")
    mask = F.response_mask(case["generated"], [case["stop_token"]])
    over = F.rewards_over_labels(case["scores"], case["label_scores"])
    scores = F.clip_rewards(over, case["score_clip"])
    raw = F.token_rewards(scores, mask)
    assert case["reward_raw"].tolist() == [[0.0, 3.0, 0.0, 3.0], [0.0, 0.0, 0.0, 10.0]]
    assert raw.tolist() == [[0.0, 3.0, 0.0, 0.0], [0.0, 0.0, 0.0, 10.0]]
    paid = F.token_rewards(scores, mask, case["log_ratio"], case["kl_coef"])
    close((paid - raw)[mask], case["reward_kl"][mask])


def test_verl_advantages_over_holes():
    case = load("verl", "advantages")
    values, rewards, mask = case["values"], case["token_rewards"], case["mask"].bool()
    gae = F.compute_gae(values, rewards, case["gamma"], case["lam"], mask)
    close(F.compute_returns(gae, values, mask)[mask], case["returns"][mask])
    close(F.whiten(gae, mask)[mask], case["whitened_gae"][mask])
    settings = {"gamma": case["gamma"], "group": case["group"]}
    settings["greedy_rewards"] = case["greedy_rewards"]
    names = ("grpo", "dr_grpo", "rloo", "opo", "reinforce++", "reinforce++_baseline", "remax")
    for name in names:
        got = F.estimate_advantages(name, None, rewards, mask, **settings)
        # verl's ReMax leaves numbers in holes
        close(got[mask], case[name][mask])
        assert (got[~mask] == 0).all()


@pytest.mark.parametrize("way", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("name", ["dual_clip", "gspo", "cispo"])
def test_verl_objectives_and_gradients(name, way):
    case = load("verl", "objectives")
    logprobs = case["logprobs"].requires_grad_()
    objective = F.calc_policy_objective(
        "ppo" if name == "dual_clip" else name,
        logprobs,
        case["old_logprobs"],
        case["advantages"],
        case["mask"].bool(),
        clip_coef=case["clip_coef"],
        clip_coef_high=case["clip_coef_high"],
        dual_clip=case["dual_clip"] if name == "dual_clip" else None,
        aggregation=way,
    )
    close(-objective, case[f"{name}/{way}"])
    objective.backward()
    close(-logprobs.grad, case[f"{name}/{way}/gradient"])


@pytest.mark.parametrize("name", sorted(F.KL_ESTIMATORS))
def test_verl_kl_estimates_and_gradients(name):
    case = load("verl", "kl")
    logprobs = case["logprobs"].requires_grad_()
    # verl holds k3 at 10 at most; none of these is that large
    assert case["k3"].max() < 10
    got = F.kl_estimate(logprobs, case["ref_logprobs"], name)
    close(got, case[name])
    got.sum().backward()
    close(logprobs.grad, case[f"{name}/gradient"])
