"""Rewards on their way to advantages: the order of the steps, and moments that outlive a run."""

import dataclasses

import pytest
import torch

from rlhf_lab.functional import RunningMoments
from rlhf_lab.rewards import RewardPipeline
from rlhf_lab.samples import Samples
from rlhf_lab.training import RLHFTrainer

STOP = 9
SCALED = {"reward_scaling": "scale_and_shift", "normalize_reward": False}


def samples(*responses: list[int]) -> Samples:
    """Responses of 4 slots after a prompt of one token; after the stop token nothing is real."""
    tokens = torch.tensor([[5, *response] for response in responses])
    lengths = [r.index(STOP) + 1 if STOP in r else 4 for r in responses]
    mask = torch.arange(4) < torch.tensor(lengths)[:, None]
    empty = torch.zeros(mask.shape)
    prompt_mask = torch.ones(len(mask), 1, dtype=torch.bool)
    return Samples(tokens, prompt_mask, mask, logprobs=empty, values=empty, support=None)


def pipeline(args) -> RewardPipeline:
    """A pipeline whose reward function is never asked."""
    return RewardPipeline(args, None, lambda texts: None, stop_tokens=(STOP,))


def test_penalties_replace_first_and_are_added_to_after(reel_args):
    """Lengths 1 (too short), 4 (no stop), 4 (stops in the last slot), 3; buffer 2 of 4.

    Replaced: -3, -3; then -1 for length 4, -1/2 for length 3.
    """
    args = reel_args(
        gen_len=4, penalize_no_eos=True, min_response_length=2, overlong_buffer=2, stop_at_eos=True
    )
    found = pipeline(args).penalize(
        samples([STOP, STOP, STOP, STOP], [1, 2, 3, 4], [1, 2, 3, STOP], [1, 2, STOP, STOP]),
        torch.tensor([1.0, 1.0, 1.0, 1.0]),
    )
    assert found.tolist() == [-3.0, -4.0, 0.0, 0.5]


def test_padding_that_is_a_stop_token_does_not_end_a_response(reel_args):
    """Both responses of `step()` have 2 tokens, and the padding is the stop token."""
    args = reel_args(gen_len=4, penalize_no_eos=True, stop_at_eos=True)
    batch = samples([1, 2, STOP, STOP], [1, STOP, STOP, STOP])
    batch = dataclasses.replace(batch, mask=torch.tensor([[True, True, False, False]] * 2))
    assert pipeline(args).penalize(batch, torch.ones(2)).tolist() == [-3.0, 1.0]


def test_step_penalizes_short_responses_without_eos(make_trainer):
    fields = {"penalize_no_eos": True, "stop_at_eos": True, "normalize_reward": False}
    trainer, rewards = make_trainer(**fields), []
    trainer.on("after_phase")(lambda ctx: rewards.extend(ctx.rollout.rewards.tolist()))
    assert trainer.tokenizer.pad_token_id == trainer.tokenizer.eos_token_id
    trainer.step(["this movie"] * 8, ["was", "was so good"] * 4, [1.0] * 8)
    assert rewards == [-3.0] * 8


@pytest.mark.parametrize("scaling", ["scale", "scale_and_shift"])
def test_remax_scales_greedy_rewards_by_moments_of_samples(make_trainer, scaling):
    """With the moments of the samples, shift and all, only the difference is divided."""
    length = lambda texts: torch.tensor([float(len(text)) for text in texts])
    fields = {"reward_scaling": scaling, "normalize_reward": False, "stop_at_eos": False}
    trainer = make_trainer({"reward_fn": length}, advantages="remax", **fields)
    rollout = trainer.rollout_phase()
    greedy = length(trainer.sample_greedily([trainer.prompt]).texts(trainer.tokenizer))
    expected = (rollout.raw_rewards - greedy) / rollout.reward_moments.std
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(rollout.advantages[:, 0], expected, atol=1e-5, rtol=0)


def test_scaling_comes_before_the_clip(reel_args):
    """Moments of 0 and 4: mean 2, std sqrt(8); -1/sqrt(2) stays, 10 goes from 2.83 to 1.5."""
    args = reel_args(reward_clip=1.5, **SCALED)
    batch, seen = samples([1, 2, 3, 4], [1, 2, 3, 4]), RunningMoments.of(torch.tensor([0.0, 4.0]))
    moments, found = pipeline(args).shape(batch, torch.tensor([0.0, 10.0]), seen)
    assert moments is seen
    assert found.tolist() == pytest.approx([-(0.5**0.5), 1.5])


def test_nothing_is_done_unless_asked(reel_args):
    rewards = torch.tensor([1.0, -50.0])
    batch = samples([1, 2, 3, 4], [STOP, 0, 0, 0])
    moments, found = pipeline(reel_args()).shape(batch, rewards)
    assert found is rewards and moments is None


@pytest.mark.slow
def test_the_moments_take_in_each_learned_batch_once(make_trainer):
    """A rollout, or an evaluation, that nothing is learned from leaves them alone."""
    trainer = make_trainer(total_phases=3, **SCALED)
    seen = []
    trainer.on("after_phase")(lambda ctx: seen.extend(ctx.rollout.raw_rewards.tolist()))
    trainer.rollout_phase()
    trainer.evaluate()
    assert trainer.rewards.moments == RunningMoments()
    trainer.train()
    expected = RunningMoments.of(torch.tensor(seen))
    assert trainer.rewards.moments.count == 24
    assert trainer.rewards.moments.mean == pytest.approx(expected.mean)
    assert trainer.rewards.moments.std == pytest.approx(expected.std)


@pytest.mark.slow
def test_greedy_baselines_are_shaped_like_the_samples(make_trainer):
    """Every text earns 8 and is clipped to 2: no sample is better than greedy."""
    parts = {"reward_fn": lambda texts: torch.full((len(texts),), 8.0)}
    trainer = make_trainer(parts, advantages="remax", reward_clip=2.0, normalize_reward=False)
    rollout = trainer.rollout_phase()
    assert (rollout.rewards == 2.0).all() and (rollout.advantages == 0.0).all()


@pytest.mark.slow
def test_a_resumed_run_has_the_moments_bit_for_bit(make_trainer, parameters_of, metrics_of):
    """Everything that a run remembers beside its weights is on."""
    fields = SCALED | {
        "total_phases": 3,
        "advantages": "remax",
        "kl_in": "reward",
        "kl_estimator": "k3",
        "kl_controller": "adaptive",
    }
    whole, broken_off = make_trainer(**fields), make_trainer(**fields)
    whole.train()
    broken_off.run_phase()
    again = RLHFTrainer.resume(broken_off.run.path)
    assert again.rewards.moments == broken_off.rewards.moments
    assert dataclasses.asdict(again.rewards.moments)["count"] == 8
    again.train()
    assert metrics_of(again.run.path) == metrics_of(whole.run.path)
    ours, theirs = parameters_of(again.policy), parameters_of(whole.policy)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
