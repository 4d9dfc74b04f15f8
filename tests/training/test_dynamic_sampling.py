"""Dynamic sampling: prompts whose responses all get the same reward are replaced."""

from itertools import islice

import pytest
import torch

from tests.training.recorded_runs import EQUAL, PAIRS, PROMPTS, reward_by_prompt, reward_by_text

WITHOUT = PAIRS | {"dynamic_sampling": None}
BY_PROMPT = {"prompts": PROMPTS, "reward_fn": reward_by_prompt}


def pairs_differ(rewards: torch.Tensor) -> torch.Tensor:
    return rewards[::2] != rewards[1::2]


@pytest.mark.slow
@pytest.mark.filterwarnings("error:phase")
def test_prompts_are_replaced_until_all_are_informative(make_trainer, runs):
    """The others keep their row and every bit; the ratio is 1 on the joined batch."""
    plain = make_trainer(BY_PROMPT, **WITHOUT).rollout_phase()
    trainer = make_trainer(BY_PROMPT, reward_scaling="scale", **PAIRS)
    rollout = trainer.rollout_phase()
    informative, samples = pairs_differ(plain.raw_rewards).repeat_interleave(2), rollout.samples
    assert 0 < informative.sum() < 8 and pairs_differ(rollout.raw_rewards).all()
    assert not any(text.startswith(EQUAL) for text in rollout.texts)
    assert samples.prompts()[::2] == samples.prompts()[1::2]
    kept = zip(plain.texts, rollout.texts, informative, strict=True)
    assert all((before == after) is bool(same) for before, after, same in kept)
    for name in ("logprobs", "values", "mask"):
        before, after = getattr(plain.samples, name), getattr(samples, name)
        assert torch.equal(before[informative], after[informative])
    assert torch.equal(rollout.raw_rewards, reward_by_prompt(rollout.texts))
    assert rollout.resampled_prompts >= 1 and plain.resampled_prompts is None
    assert rollout.reward_moments.count == 8  # of the rows that were kept
    run = runs("dynamic sampling")
    lines = run.trainer.run.read("metrics.jsonl")
    assert max(line["resampled_prompts"] for line in lines) > 0
    for report, line, rollout in zip(run.reports, lines, run.rollouts, strict=False):
        assert report.resampled_prompts == line["resampled_prompts"] == rollout.resampled_prompts
        assert report.uninformative_group_fraction == 0
        assert report.ratio_first_minibatch == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("bound", [1, 3])
def test_prompts_are_resampled_up_to_the_bound(make_trainer, bound):
    """One pair of four is informative from the start; the others never are."""
    sizes = []

    def reward_fn(texts: list[str]) -> torch.Tensor:
        sizes.append(len(texts))
        first = torch.tensor([0.0, 1.0] + [0.5] * (len(texts) - 2))
        return first if len(texts) == 8 else torch.full((len(texts),), 0.5)

    parts = {"prompts": PROMPTS, "reward_fn": reward_fn}
    trainer = make_trainer(parts, **PAIRS | {"dynamic_sampling": bound})
    sizes.clear()
    report = trainer.run_phase()
    assert sizes == [8] + [6] * bound and report.resampled_prompts == bound
    assert report.uninformative_group_fraction == 0.75 and report.mean_reward == 0.5


def test_informative_batch_and_evaluation_stay_as_they_are(make_trainer):
    parts = {"prompts": PROMPTS, "reward_fn": reward_by_text}
    plain, same = (make_trainer(parts, **fields).rollout_phase() for fields in (WITHOUT, PAIRS))
    assert (plain.resampled_prompts, same.resampled_prompts) == (None, 0)
    assert plain.texts == same.texts
    assert torch.equal(plain.advantages, same.advantages)
    evaluations = [make_trainer(BY_PROMPT, **fields).evaluate() for fields in (WITHOUT, PAIRS)]
    assert evaluations[0] == evaluations[1]


def test_single_prompt_is_resampled_with_other_noise(make_trainer):
    """The new text is scored by each of several rewards."""
    drawn = []

    def zero_at_first(texts: list[str]) -> torch.Tensor:
        drawn.append(texts)
        return reward_by_text(texts) if len(drawn) > 1 else torch.zeros(len(texts))

    length = lambda texts: [float(len(text)) for text in texts]
    parts = {"reward_fn": {"text": zero_at_first, "length": length}}
    trainer = make_trainer(parts, reward_weights=(1.0, 0.0), **PAIRS)
    drawn.clear()
    rollout = trainer.rollout_phase()
    assert rollout.resampled_prompts >= 1 and rollout.texts != drawn[0]
    assert rollout.samples.prompts() == [trainer.prompt] * 8
    assert rollout.rewards_by_name["length"].tolist() == length(rollout.texts)
    assert torch.equal(rollout.raw_rewards, reward_by_text(rollout.texts))


def test_replacements_come_in_an_order_of_the_batch(make_trainer):
    """First those that are not in the batch."""
    prompts, orders = make_trainer(BY_PROMPT, **PAIRS).prompts, []
    for batch in range(4):
        own = prompts.of_batch(batch)[::2]
        orders.append(list(islice(prompts.replacements_for(batch), 12)))
        assert orders[-1] == list(islice(prompts.replacements_for(batch), 12))
        assert not any(prompt in own for prompt in orders[-1][:2])
        assert sorted(orders[-1][:6]) == sorted(orders[-1][6:]) == sorted(prompts.tokens)
    assert any(order != orders[0] for order in orders)
