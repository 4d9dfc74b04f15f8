"""Reward processing: the order of its steps, and running moments."""

import dataclasses

import pytest
import torch

from rlhf_lab.functional import RunningMoments
from rlhf_lab.rewards import RewardPipeline
from rlhf_lab.samples import Samples

STOP = 9
RAW = {"normalize_reward": False}


def make_samples(*responses: list[int]) -> Samples:
    """Return responses of 4 slots after a prompt of one token; nothing after the stop is real."""
    tokens = torch.tensor([[5, *response] for response in responses])
    lengths = [r.index(STOP) + 1 if STOP in r else 4 for r in responses]
    mask = torch.arange(4) < torch.tensor(lengths)[:, None]
    empty = torch.zeros(mask.shape)
    prompt_mask = torch.ones(len(mask), 1, dtype=torch.bool)
    return Samples(tokens, prompt_mask, mask, logprobs=empty, values=empty, support=None)


def make_pipeline(args) -> RewardPipeline:
    return RewardPipeline(args, None, lambda texts: None, stop_tokens=(STOP,))


def test_penalties_match_hand_computed(reel_args):
    """Lengths 1 (too short), 4 (no stop), 4 (stops in the last slot), 3; buffer 2 of 4.

    Replaced: -3, -3; then -1 for length 4, -1/2 for length 3.
    """
    args = reel_args(
        gen_len=4, penalize_no_eos=True, min_response_length=2, overlong_buffer=2, stop_at_eos=True
    )
    found = make_pipeline(args).penalize(
        make_samples([STOP, STOP, STOP, STOP], [1, 2, 3, 4], [1, 2, 3, STOP], [1, 2, STOP, STOP]),
        torch.tensor([1.0, 1.0, 1.0, 1.0]),
    )
    assert found.tolist() == [-3.0, -4.0, 0.0, 0.5]


def test_padding_equal_to_a_stop_token_does_not_end_a_response(reel_args, make_trainer):
    """In `step`, the mask decides: responses of 2 tokens, padded with the stop token."""
    fields = {"penalize_no_eos": True, "stop_at_eos": True} | RAW
    batch = make_samples([1, 2, STOP, STOP], [1, STOP, STOP, STOP])
    batch = dataclasses.replace(batch, mask=torch.tensor([[True, True, False, False]] * 2))
    pipeline = make_pipeline(reel_args(gen_len=4, **fields))
    assert pipeline.penalize(batch, torch.ones(2)).tolist() == [-3.0, 1.0]
    trainer, rewards = make_trainer(**fields), []
    trainer.on("after_phase")(lambda ctx: rewards.extend(ctx.rollout.rewards.tolist()))
    assert trainer.tokenizer.pad_token_id == trainer.tokenizer.eos_token_id
    trainer.step(["this movie"] * 8, ["was", "was so good"] * 4, [1.0] * 8)
    assert rewards == [-3.0] * 8


def test_scaling_comes_before_the_clip(reel_args):
    """Moments of 0 and 4: mean 2, std sqrt(8); -1/sqrt(2) stays, 10 goes from 2.83 to 1.5.

    Without any setting, the rewards are unchanged.
    """
    scaled = reel_args(reward_clip=1.5, reward_scaling="scale_and_shift", **RAW)
    batch, rewards = make_samples([1, 2, 3, 4], [STOP, 0, 0, 0]), torch.tensor([0.0, 10.0])
    seen = RunningMoments.of(torch.tensor([0.0, 4.0]))
    moments, found = make_pipeline(scaled).shape(batch, rewards, seen)
    assert moments is seen and found.tolist() == pytest.approx([-(0.5**0.5), 1.5])
    moments, found = make_pipeline(reel_args()).shape(batch, rewards)
    assert found is rewards and moments is None


@pytest.mark.parametrize("scaling", ["scale", "scale_and_shift"])
def test_remax_scales_greedy_rewards_by_moments_of_samples(make_trainer, scaling):
    """With the moments of the samples, shift and all, only the difference is divided."""
    length = lambda texts: torch.tensor([float(len(text)) for text in texts])
    fields = {"reward_scaling": scaling, "stop_at_eos": False} | RAW
    trainer = make_trainer({"reward_fn": length}, advantages="remax", **fields)
    rollout = trainer.rollout_phase()
    greedy = length(trainer.sample_greedily([trainer.prompt]).texts(trainer.tokenizer))
    expected = (rollout.raw_rewards - greedy) / rollout.reward_moments.std
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(rollout.advantages[:, 0], expected, atol=1e-5, rtol=0)


def test_remax_clips_greedy_rewards(make_trainer):
    """Every text gets 8, clipped to 2: no sample is better than the greedy one."""
    parts = {"reward_fn": lambda texts: [8.0] * len(texts)}
    rollout = make_trainer(parts, advantages="remax", reward_clip=2.0, **RAW).rollout_phase()
    assert (rollout.rewards == 2.0).all() and (rollout.advantages == 0.0).all()


def test_moments_include_each_learned_batch_once(make_trainer, runs):
    """Not a rollout or an evaluation from which nothing is learned."""
    trainer = make_trainer(reward_scaling="scale_and_shift", **RAW)
    trainer.rollout_phase()
    trainer.evaluate()
    assert trainer.rewards.moments == RunningMoments()
    run = runs("state")
    moments, batches = run.trainer.rewards.moments, run.rollouts[:2]
    expected = RunningMoments.of(torch.cat([rollout.raw_rewards for rollout in batches]))
    assert moments.count == 16
    assert (moments.mean, moments.std) == pytest.approx((expected.mean, expected.std))
