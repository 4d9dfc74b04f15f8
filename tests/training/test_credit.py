"""Advantages and returns in the trainer: every estimator by name, groups, and greedy baselines."""

import inspect
from typing import get_args

import pytest
import torch

from rlhf_lab import functional as F
from rlhf_lab.config import Advantages
from rlhf_lab.config.conflicts import NEED_GROUPS
from rlhf_lab.errors import ConfigError
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.ppo import assign_credit

GROUPS_OF_TWO = {"samples_per_prompt": 2, "normalize_reward": False}


def paid(*rewards: float):
    """A reward function that pays these, whatever is written, and 0 for any other batch size."""

    def reward_fn(texts: list[str]) -> torch.Tensor:
        return torch.tensor(rewards if len(texts) == len(rewards) else [0.0] * len(texts))

    return reward_fn


def test_the_names_are_those_of_the_registry_and_know_what_needs_groups():
    assert set(get_args(Advantages)) == set(F.ADVANTAGES)
    takes = {name: inspect.signature(f).parameters for name, f in F.ADVANTAGES.items()}
    assert set(NEED_GROUPS) == {name for name in takes if "group" in takes[name]}
    assert {name for name in takes if "values" in takes[name]} == {"one_step", "gae"}
    assert {name for name in takes if "greedy_rewards" in takes[name]} == {"remax"}


@pytest.mark.slow
@pytest.mark.parametrize("name", get_args(Advantages))
def test_every_estimator_trains_and_repeats_itself(make_trainer, name, metrics_of):
    """Two runs of one seed agree, and no weight becomes nan."""
    runs = []
    for _ in range(2):
        trainer = make_trainer(advantages=name, **GROUPS_OF_TWO)
        trainer.train()
        assert all(p.isfinite().all() for p in trainer.policy.parameters())
        runs.append(metrics_of(trainer.run.path))
    assert runs[0] == runs[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rloo", [-2.0, 2.0, -4.0, 4.0]),
        ("dr_grpo", [-1.0, 1.0, -2.0, 2.0]),
        ("grpo", [-0.70711, 0.70711, -0.70711, 0.70711]),
        ("opo", [-1.0, 1.0, -2.0, 2.0]),
        ("reinforce", [1.0, 3.0, 2.0, 6.0]),
    ],
)
def test_answers_to_one_prompt_are_compared_with_each_other(make_trainer, name, expected):
    """Rewards 1, 3 and 2, 6.

    RLOO: 1 - 3, 3 - 1, 2 - 6, 6 - 2; Dr. GRPO: minus the means 2 and 4; GRPO divides by the
    deviations sqrt(2) and sqrt(8). All responses are equally long, so OPO's mean is the plain one.
    """
    fields = {"batch_size": 4, "gen_len": 3, "stop_at_eos": False} | GROUPS_OF_TWO
    trainer = make_trainer({"reward_fn": paid(1.0, 3.0, 2.0, 6.0)}, advantages=name, **fields)
    advantages = trainer.rollout_phase().advantages
    assert advantages.shape == (4, 3)
    for row, value in zip(advantages, expected, strict=True):
        assert row.tolist() == pytest.approx([value] * 3, abs=1e-3)


def test_whitened_rewards_by_hand(make_trainer):
    """Rewards 1, 3, 2, 6 at the last of 3 tokens each: 12 numbers of mean 1, and 8 of them are 0.

    The sum of their squares is 50, so that the unbiased variance is (50 - 12) / 11 = 38 / 11, and
    x becomes (x - 1) / sqrt(38 / 11) + 1: 0 becomes 0.462, and 6 becomes 3.690.
    """
    fields = {"batch_size": 4, "gen_len": 3, "stop_at_eos": False, "normalize_reward": False}
    fields |= {"advantages": "reinforce", "whiten_rewards": True}
    rollout = make_trainer({"reward_fn": paid(1.0, 3.0, 2.0, 6.0)}, **fields).rollout_phase()
    scaled = {x: (x - 1) / (38 / 11) ** 0.5 + 1 for x in (0, 1, 3, 2, 6)}
    assert scaled[0] == pytest.approx(0.462, abs=5e-4)
    assert scaled[6] == pytest.approx(3.690, abs=5e-4)
    for row, x in zip(rollout.advantages, (1, 3, 2, 6), strict=True):
        to_go = [scaled[x] + left * scaled[0] for left in (2, 1, 0)]
        assert row.tolist() == pytest.approx(to_go, abs=1e-5)
    assert rollout.rewards.tolist() == [1.0, 3.0, 2.0, 6.0], "what was paid is noted as it was"


def test_whitened_rewards_include_the_kl_and_leave_the_padding_out(make_trainer):
    """As one function would make them of the same samples; a row that ends early is no zero."""
    fields = {"temperature": 20.0, "gen_len": 28, "batch_size": 16, "stop_at_eos": True}
    fields |= {"kl_in": "reward", "kl_coef": 0.7, "advantages": "reinforce"}
    trainer = make_trainer(whiten_rewards=True, **fields)
    samples = trainer.rollout_phase().samples
    mask = samples.mask
    assert not mask.all()
    rewards, kl = torch.arange(16.0), torch.full(mask.shape, 0.1)
    last = mask.sum(1) - 1
    paid_each = -0.07 * mask.float()
    paid_each[torch.arange(16), last] += rewards
    real = paid_each[mask]
    scaled = (real - real.mean()) / real.std() + real.mean()
    expected = torch.zeros_like(paid_each).masked_scatter(mask, scaled)
    to_go = expected.flip(1).cumsum(1).flip(1) * mask
    advantages, _ = assign_credit(trainer, samples, rewards, kl)
    torch.testing.assert_close(advantages, to_go, atol=1e-4, rtol=1e-5)


def test_reinforce_plus_plus_whitens_the_rewards_over_the_batch(make_trainer):
    """Rewards 1, 3, 2, 6 on 3 tokens each: mean 3, 12 numbers, sum of squares 3 * 14 = 42.

    The unbiased variance is 42 / 11, the deviation 1.954.
    """
    fields = {"batch_size": 4, "gen_len": 3, "stop_at_eos": False, "normalize_reward": False}
    parts = {"reward_fn": paid(1.0, 3.0, 2.0, 6.0)}
    rollout = make_trainer(parts, advantages="reinforce++", **fields).rollout_phase()
    expected = [(r - 3) / (42 / 11) ** 0.5 for r in (1, 3, 2, 6)]
    assert rollout.advantages[:, 0].tolist() == pytest.approx(expected, rel=1e-5)


def greedy_text(trainer: RLHFTrainer) -> str:
    """The likeliest token each time, by whole forwards of the policy."""
    tokens = torch.tensor([trainer.prompt])
    for _ in range(trainer.args.gen_len):
        with torch.no_grad():
            logits, _ = trainer.policy(tokens)
        tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return trainer.tokenizer.decode(tokens[0], skip_special_tokens=True)


@pytest.mark.slow
def test_remax_subtracts_what_the_greedy_answer_earns(make_trainer):
    """The reward is the number of letters."""
    parts = {"reward_fn": lambda texts: torch.tensor([float(len(text)) for text in texts])}
    trainer = make_trainer(
        parts, advantages="remax", normalize_reward=False, stop_at_eos=False, temperature=1.3
    )
    rollout, baseline = trainer.rollout_phase(), len(greedy_text(trainer))
    expected = torch.tensor([float(len(text)) - baseline for text in rollout.texts])
    assert len(set(expected.tolist())) > 1
    assert torch.equal(rollout.advantages, expected[:, None].expand_as(rollout.advantages))


@pytest.mark.slow
def test_greedy_answers_cost_the_samples_nothing(make_trainer):
    """The same seed gives the same samples with and without them."""
    plain = make_trainer(normalize_reward=False).rollout_phase()
    compared = make_trainer(advantages="remax", normalize_reward=False).rollout_phase()
    assert plain.texts == compared.texts


def test_own_estimators_are_called_by_the_names_of_their_parameters(make_trainer):
    """Order and choice are the caller's; one number per sequence reaches each of its tokens."""

    def mine(group, greedy_rewards, rewards):
        return rewards + 10.0 * group + 100.0 * greedy_rewards

    reward_fn = lambda texts: torch.ones(len(texts))
    parts = {"advantages": mine, "reward_fn": reward_fn}
    fields = {"batch_size": 4, "stop_at_eos": False} | GROUPS_OF_TWO
    advantages = make_trainer(parts, **fields).rollout_phase().advantages
    assert advantages[:, 0].tolist() == advantages[:, -1].tolist() == [101.0, 101.0, 111.0, 111.0]


@pytest.mark.slow
def test_a_registered_estimator_handed_in_is_the_same_as_its_name(make_trainer):
    by_name = make_trainer(advantages="rloo", **GROUPS_OF_TWO).rollout_phase()
    by_hand = make_trainer({"advantages": F.rloo_advantages}, **GROUPS_OF_TWO).rollout_phase()
    assert torch.equal(by_name.advantages, by_hand.advantages)
    assert torch.equal(by_name.returns, by_hand.returns)


@pytest.mark.slow
@pytest.mark.parametrize("name", get_args(Advantages))
def test_returns_are_rewards_to_go_where_the_estimator_knows_no_values(make_trainer, name):
    """At gamma 1 and a reward at the end, that is the reward at every real token."""
    rollout = make_trainer(
        advantages=name, gen_len=26, temperature=20.0, stop_tokens="and", **GROUPS_OF_TWO
    ).rollout_phase()
    mask = rollout.samples.mask
    if "values" in inspect.signature(F.ADVANTAGES[name]).parameters:
        expected = rollout.advantages + rollout.samples.values
    else:
        expected = rollout.rewards[:, None].expand(mask.shape)
    assert not mask.all()
    torch.testing.assert_close(rollout.returns[mask], expected[mask])
    assert (rollout.returns[~mask] == 0).all()


@pytest.mark.parametrize("name", NEED_GROUPS)
def test_group_estimators_ask_for_several_samples_per_prompt(reel_args, name):
    with pytest.raises(ConfigError, match=r"samples_per_prompt=1.* Set at least 2"):
        reel_args(advantages=name)


def test_groups_that_do_not_fill_the_batch_are_refused(reel_args):
    with pytest.raises(ConfigError, match="batch_size=8 is not divisible by samples_per_prompt=3"):
        reel_args(samples_per_prompt=3)


def test_remax_refuses_rewards_on_another_scale(reel_args):
    with pytest.raises(ConfigError, match="normalize_reward=True"):
        reel_args(advantages="remax", normalize_reward=True)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo"])
@pytest.mark.parametrize("normalize_advantages", [True, False])
def test_groups_whose_answers_all_earn_the_same_move_nothing(
    make_trainer, name, normalize_advantages
):
    """Groups of four, all right or all wrong: what rounding left of them was a gradient of 0.18."""
    trainer = make_trainer(
        {"reward_fn": paid(0.7, 0.7, 0.7, 0.7, 1000.1, 1000.1, 1000.1, 1000.1)},
        advantages=name,
        samples_per_prompt=4,
        normalize_reward=False,
        normalize_advantages=normalize_advantages,
        kl_coef=0.0,
        ent_coef=0.0,
        vf_coef=0.0,
    )
    assert (trainer.rollout_phase().advantages == 0).all()
    assert trainer.run_phase().grad_norm == 0


MIXED = {
    "samples_per_prompt": 4,
    "normalize_reward": False,
    "gen_len": 3,
    "stop_at_eos": False,
    "batches_per_learning_phase": 1,
}
"""With rewards for eight texts: two groups, one of which may say nothing."""


def advantages_used(make_trainer, rewards, estimator="dr_grpo", **fields):
    """The minibatches of a phase, and the advantages that the policy loss was given of each."""
    used, seen = [], []

    def policy_loss(logprobs, old_logprobs, advantages, mask):
        used.append(advantages.clone())
        return logprobs * advantages

    parts = {"reward_fn": paid(*rewards), "policy_loss": policy_loss}
    trainer = make_trainer(parts, advantages=estimator, **MIXED | fields)
    trainer.on("before_minibatch")(lambda ctx: seen.append(ctx.minibatch))
    trainer.run_phase()
    return seen, used


@pytest.mark.parametrize("micro_batch_size", [None, 4])
def test_a_group_of_equal_rewards_stays_at_zero_beside_one_that_teaches(
    make_trainer, micro_batch_size
):
    """Rewards 0, 0, 0, 1 less their mean 1/4, on three tokens each.

    The sum of squares is 3 * (3/16 + 9/16) = 9/4, the variance of twelve numbers 9/44. With the
    zeros of the other group among them it would be 9/92.
    """
    rewards = (0.7, 0.7, 0.7, 0.7, 0.0, 0.0, 0.0, 1.0)
    fields = {"num_minibatches": 1, "micro_batch_size": micro_batch_size}
    _, used = advantages_used(make_trainer, rewards, **fields)
    found = sorted(torch.cat(used).flatten().tolist())
    deviation = (9 / 44) ** 0.5
    assert found[9:21] == [0.0] * 12
    assert found[:9] + found[21:] == pytest.approx([-0.25 / deviation] * 9 + [0.75 / deviation] * 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", NEED_GROUPS)
def test_zeros_of_such_groups_stay_zeros_in_minibatches_that_mix_them(make_trainer, name):
    """A minibatch has part of a group, whose mean is not 0 and would move the others."""
    rewards = (0.7, 0.7, 0.7, 0.7, 0.0, 1.0, 2.0, 5.0)
    seen, used = advantages_used(make_trainer, rewards, name, num_minibatches=2)
    assert sum(int((~minibatch.teaching).sum()) for minibatch in seen) == 4
    mixed = [m.teaching.any() and not m.teaching.all() and m.teaching.sum() > 1 for m in seen]
    assert any(mixed), "the order that the seed draws mixes groups"
    for minibatch, advantages in zip(seen, used, strict=True):
        teaching = minibatch.teaching
        assert (advantages[~teaching] == 0).all()
        alone = F.whiten(minibatch.advantages[teaching], minibatch.mask[teaching])
        assert torch.equal(advantages[teaching], alone)


def test_estimators_that_compare_no_answers_are_whitened_over_all(make_trainer):
    """REINFORCE's whitening is its baseline: a group that is paid 0 throughout did badly."""
    rewards = (0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0)
    seen, used = advantages_used(make_trainer, rewards, "reinforce", num_minibatches=1)
    assert seen[0].teaching is None
    assert torch.equal(used[0], F.whiten(seen[0].advantages, seen[0].mask))
    assert (used[0] < 0).any(1).sum() == 4


@pytest.mark.slow
def test_equal_rewards_teach_where_they_pay_for_unequal_kl(make_trainer):
    """In the second phase the policy has left the reference, and answers differ in their KL."""
    parts, fields = {"reward_fn": paid(*[0.7] * 8)}, {"kl_estimator": "k1", "base_lr": 1e-2}
    fields |= {"advantages": "dr_grpo", "warmup_steps": 0, "ent_coef": 1.0}
    trainer = make_trainer(parts, kl_in="reward", kl_coef=1.0, **MIXED | fields)
    trainer.run_phase()
    assert trainer.rollout_phase().teaching.all()
