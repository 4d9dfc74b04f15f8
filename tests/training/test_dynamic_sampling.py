"""Batches: prompts in a seeded order, dynamic sampling, and minibatches."""

import dataclasses
from itertools import islice

import pytest
import torch

from rlhf_lab.training import ReplayMemory, ReplayMinibatch
from rlhf_lab.training.prompts import deal, load_prompts
from tests.training.recorded_runs import EQUAL, PAIRS, PROMPTS, reward_by_prompt

WITHOUT = PAIRS | {"dynamic_sampling": None}
BY_PROMPT = {"prompts": PROMPTS, "reward_fn": reward_by_prompt}


def pairs_differ(rewards: torch.Tensor) -> torch.Tensor:
    return rewards[::2] != rewards[1::2]


@pytest.mark.filterwarnings("error:phase")
def test_prompts_are_replaced_until_all_are_informative(make_trainer, runs):
    """The others keep their row and every bit; the ratio is 1 on the joined batch."""
    plain = make_trainer(BY_PROMPT, **WITHOUT).rollout_phase()
    several = {"by_prompt": reward_by_prompt, "zero": lambda texts: [0.0] * len(texts)}
    trainer = make_trainer(BY_PROMPT | {"reward_fn": several}, reward_scaling="scale", **PAIRS)
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
    for rewards in (rollout.raw_rewards, rollout.rewards_by_name["by_prompt"]):
        assert torch.equal(rewards, reward_by_prompt(rollout.texts))
    assert rollout.resampled_prompts >= 1 and plain.resampled_prompts is None
    assert rollout.reward_moments.count == 8  # of the rows that were kept
    run = runs("dynamic sampling")
    assert max(report.resampled_prompts for report in run.reports) > 0
    for report in run.reports:
        assert report.uninformative_group_fraction == 0
        assert report.ratio_first_minibatch == pytest.approx(1, abs=1e-4)


@pytest.mark.slow
def test_prompts_are_resampled_up_to_the_bound(make_trainer):
    """One pair of four is informative from the start; the others never are."""
    drawn = []

    def reward_fn(texts: list[str]) -> torch.Tensor:
        drawn.append(list(texts))
        return torch.tensor([0.0 if len(texts) == 8 else 0.5] + [0.5] * (len(texts) - 1))

    parts = {"prompts": PROMPTS[:1], "reward_fn": reward_fn}
    trainer = make_trainer(parts, **PAIRS | {"dynamic_sampling": 3})
    drawn.clear()
    report = trainer.run_phase()
    assert list(map(len, drawn)) == [8, 6, 6, 6] and report.resampled_prompts == 3
    assert drawn[1] != drawn[2] != drawn[3]  # with other noise
    assert report.uninformative_group_fraction == 0.75


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


def test_files_and_columns_have_their_prompts(tmp_path):
    """With `words`, spaces between words become single, and shorter texts stay."""
    for name, content, options, expected in (
        ("p.txt", "the film\n\nthe script was\n", {}, ["the film", "the script was"]),
        ("p.csv", 'prompt,id\n"the film",1\n', {}, ["the film"]),
        ("t.jsonl", '{"title": "the film", "prompt": "no"}\n', {"column": "title"}, ["the film"]),
        ("l.txt", "the  film was long\nthis\n", {"words": 2}, ["the film", "this"]),
    ):
        (tmp_path / name).write_text(content)
        assert load_prompts(tmp_path / name, **options) == expected


def test_every_round_has_each_prompt_once_in_a_new_order():
    """The order has no state and depends on the seed."""
    order = deal(5, 0, 40, seed=3)
    rounds = [tuple(order[i : i + 5]) for i in range(0, 40, 5)]
    assert all(sorted(r) == [0, 1, 2, 3, 4] for r in rounds) and len(set(rounds)) > 4
    assert sum((deal(5, start, 8, seed=3) for start in range(0, 40, 8)), []) == order
    assert deal(5, 0, 40, seed=4) != order


@pytest.mark.slow
def test_minibatches_have_the_rows_of_a_new_order_per_pass(make_trainer):
    """Three passes over 8 rows in halves, with prompts and supports of unequal length."""
    fields = {"top_p": 0.9, "kl_estimator": "k1", "advantages": "rloo"}
    rollout = make_trainer(BY_PROMPT, **PAIRS | fields).rollout_phase()
    samples, generator = rollout.samples, torch.Generator().manual_seed(7)
    expected = torch.stack([torch.randperm(8, generator=generator) for _ in range(3)])
    minibatches = ReplayMemory(rollout, 2, 3).get_minibatches(torch.Generator().manual_seed(7))
    assert not samples.prompt_mask.all() and not samples.support.kept.all()
    for rows, minibatch in zip(expected.reshape(6, 4), minibatches, strict=True):
        assert minibatch.padded and minibatch.prefix_len == samples.prefix_len
        for field in dataclasses.fields(ReplayMinibatch):
            source = samples if hasattr(samples, field.name) else rollout
            found, whole = getattr(minibatch, field.name), getattr(source, field.name, None)
            if field.name == "support":
                found, whole = found.tokens, whole.tokens
                assert torch.equal(minibatch.support.kept, samples.support.kept[rows])
            if field.name not in ("padded", "engine_logprobs"):
                assert torch.equal(found, whole[rows]), field.name
