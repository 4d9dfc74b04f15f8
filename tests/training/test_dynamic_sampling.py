"""Dynamic sampling: prompts whose answers all earn the same are replaced, and what that leaves."""

import zlib
from itertools import islice

import pytest
import torch

from rlhf_lab.errors import ConfigError
from rlhf_lab.training import RLHFTrainer

PROMPTS = ["this movie", "honestly , the plot", "this film", "anyway , the acting was so"]
PROMPTS += ["basically , the", "folks , the script was"]
DULL = tuple(PROMPTS[::2])
PAIRS = {"samples_per_prompt": 2, "dynamic_sampling": 12, "normalize_reward": False}


def by_text(texts: list[str]) -> torch.Tensor:
    """As good as a number of each text's own."""
    return torch.tensor([zlib.crc32(text.encode()) / 2**32 for text in texts])


def by_prompt(texts: list[str]) -> torch.Tensor:
    """The same, but 0.7 for whatever answers half of the prompts."""
    return torch.where(torch.tensor([text.startswith(DULL) for text in texts]), 0.7, by_text(texts))


def pairs_differ(rewards: torch.Tensor) -> torch.Tensor:
    return rewards[::2] != rewards[1::2]


@pytest.mark.filterwarnings("error:phase")
def test_prompts_that_do_not_inform_are_replaced_until_all_do(make_trainer, metrics_of):
    """The others keep their place and every bit; the ratio is 1 on what was put together."""
    parts = {"prompts": PROMPTS, "reward_fn": by_prompt}
    plain = make_trainer(parts, **PAIRS | {"dynamic_sampling": None}).rollout_phase()
    trainer = make_trainer(parts, **PAIRS)
    seen = []
    trainer.on("after_score")(lambda ctx: seen.append((ctx.samples, ctx.rollout)))
    reports = [trainer.run_phase(), trainer.run_phase()]

    informed = pairs_differ(plain.raw_rewards).repeat_interleave(2)
    assert 0 < informed.sum() < 8
    samples, rollout = seen[0]
    assert pairs_differ(rollout.raw_rewards).all()
    assert not any(text.startswith(DULL) for text in rollout.texts)
    assert samples.prompts()[::2] == samples.prompts()[1::2]
    kept = zip(plain.texts, rollout.texts, informed, strict=True)
    assert all((before == after) is bool(same) for before, after, same in kept)
    for name in ("logprobs", "values", "mask"):
        before, after = getattr(plain.samples, name), getattr(samples, name)
        assert torch.equal(before[informed], after[informed])
    assert torch.equal(rollout.raw_rewards, by_prompt(rollout.texts))
    assert rollout.resampled_prompts >= 1 and plain.resampled_prompts is None
    for report, (_, rollout) in zip(reports, seen, strict=True):
        assert report.resampled_prompts == rollout.resampled_prompts
        assert report.uninformative_group_fraction == 0
        assert report.ratio_first_minibatch == pytest.approx(1, abs=1e-4)
    written = [line["resampled_prompts"] for line in metrics_of(trainer.run.path)]
    assert written == [report.resampled_prompts for report in reports]


@pytest.mark.parametrize("bound", [1, 3])
def test_no_more_draws_are_made_than_allowed_and_what_is_left_counts(make_trainer, bound):
    """One pair of four informs from the start; the others never do."""
    asked = []

    def reward_fn(texts: list[str]) -> torch.Tensor:
        asked.append(len(texts))
        first = torch.tensor([0.0, 1.0] + [0.5] * (len(texts) - 2))
        return first if len(texts) == 8 else torch.full((len(texts),), 0.5)

    parts = {"prompts": PROMPTS, "reward_fn": reward_fn}
    trainer = make_trainer(parts, **PAIRS | {"dynamic_sampling": bound})
    asked.clear()
    report = trainer.run_phase()
    assert asked == [8] + [6] * bound
    assert report.resampled_prompts == bound
    assert report.uninformative_group_fraction == 0.75
    assert report.mean_reward == 0.5


def test_where_all_groups_inform_nothing_changes(make_trainer, parameters_of):
    runs = []
    for bound in (None, 2):
        parts = {"prompts": PROMPTS, "reward_fn": by_text}
        trainer = make_trainer(parts, **PAIRS | {"dynamic_sampling": bound})
        runs.append((trainer.run_phase(), parameters_of(trainer.policy)))
    (plain, before), (report, after) = runs
    assert (plain.resampled_prompts, report.resampled_prompts) == (None, 0)
    assert plain.rollout.mean_reward == report.rollout.mean_reward
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_single_prompt_is_answered_anew_with_other_noise(make_trainer):
    drawn = []

    def reward_fn(texts: list[str]) -> torch.Tensor:
        drawn.append(texts)
        return by_text(texts) if len(drawn) > 1 else torch.zeros(len(texts))

    trainer = make_trainer({"reward_fn": reward_fn}, **PAIRS)
    drawn.clear()
    rollout = trainer.rollout_phase()
    assert rollout.resampled_prompts >= 1
    assert rollout.texts != drawn[0]
    assert rollout.samples.prompts() == [trainer.prompt] * 8


def test_a_run_that_goes_on_draws_what_it_would_have_drawn(make_trainer, parameters_of, metrics_of):
    parts = {"prompts": PROMPTS, "reward_fn": by_prompt}
    fields = PAIRS | {"total_phases": 3, "normalize_reward": True, "gen_len_min": 4}
    whole, broken = (make_trainer(parts, **fields) for _ in range(2))
    whole.train()
    broken.run_phase()
    resumed = RLHFTrainer.resume(broken.run.path, **parts)
    resumed.train()
    first, second = (metrics_of(trainer.run.path) for trainer in (whole, resumed))
    assert first == second and max(line["resampled_prompts"] for line in first) > 0
    before, after = parameters_of(whole.policy), parameters_of(resumed.policy)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_moments_of_rewards_are_of_what_is_kept(make_trainer):
    fields = PAIRS | {"reward_scaling": "scale"}
    trainer = make_trainer({"prompts": PROMPTS, "reward_fn": by_prompt}, **fields)
    moments = trainer.rollout_phase().reward_moments
    assert moments.count == 8


def test_an_evaluation_measures_the_policy_on_prompts_as_they_come(make_trainer):
    parts = {"prompts": PROMPTS, "reward_fn": by_prompt}
    plain = make_trainer(parts, **PAIRS | {"dynamic_sampling": None}).evaluate()
    assert make_trainer(parts, **PAIRS).evaluate() == plain


def test_other_prompts_come_first_and_in_an_order_of_the_batch(make_trainer):
    trainer = make_trainer({"prompts": PROMPTS, "reward_fn": by_text}, **PAIRS)
    prompts, orders = trainer.prompts, []
    for batch in range(4):
        own = prompts.of_batch(batch)[::2]
        orders.append(list(islice(prompts.replacements_for(batch), 12)))
        assert orders[-1] == list(islice(prompts.replacements_for(batch), 12))
        assert not any(prompt in own for prompt in orders[-1][:2])
        assert sorted(orders[-1][:6]) == sorted(orders[-1][6:]) == sorted(prompts.tokens)
    assert any(order != orders[0] for order in orders)


def test_it_is_refused_where_it_cannot_be(reel_args, make_trainer):
    with pytest.raises(
        ConfigError, match="dynamic_sampling=3 compares responses, but samples_per_prompt=1"
    ):
        reel_args(dynamic_sampling=3)
    with pytest.raises(ConfigError, match="dynamic_sampling=0 is out of range"):
        reel_args(dynamic_sampling=0, samples_per_prompt=2)
    trainer = make_trainer(**PAIRS)
    with pytest.raises(ConfigError, match="dynamic_sampling=12 .*step\\(\\).*Set it to None"):
        trainer.step(["this movie"] * 8, [" was"] * 8, [0.0] * 8)
