"""Batches: prompts in a seeded order, dynamic sampling, and minibatches."""

import json
from itertools import islice

import pytest
import torch

from rlhf_lab.sampling import Samples, Support
from rlhf_lab.training import ReplayMemory, ReplayMinibatch, Rollout
from rlhf_lab.training.prompts import deal, load_prompts
from tests.training.recorded_runs import (
    EQUAL,
    PAIRS,
    PROMPTS,
    make_rollout,
    reward_by_prompt,
    reward_by_text,
)

WITHOUT = PAIRS | {"dynamic_sampling": None}
BY_PROMPT = {"prompts": PROMPTS, "reward_fn": reward_by_prompt}


def pairs_differ(rewards: torch.Tensor) -> torch.Tensor:
    return rewards[::2] != rewards[1::2]


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


TEXTS = ["the film", "the script was", "this movie", "the acting was"]


@pytest.fixture
def files(tmp_path):
    """The same prompts as text, JSONL and CSV."""
    (tmp_path / "p.txt").write_text("\n".join(TEXTS[:2]) + "\n\n" + "\n".join(TEXTS[2:]))
    rows = [json.dumps({"id": i, "prompt": text}) for i, text in enumerate(TEXTS)]
    (tmp_path / "p.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "p.csv").write_text("prompt,id\n" + "".join(f'"{t}",1\n' for t in TEXTS))
    return tmp_path


@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv"])
def test_text_jsonl_and_csv_have_the_same_prompts(files, kind):
    assert load_prompts(files / f"p.{kind}") == TEXTS


def test_column_and_number_of_words_select_prompts(files, movie_reviews):
    """Spaces between words become single; shorter texts stay."""
    (files / "titles.jsonl").write_text('{"title": "the film", "prompt": "no"}\n')
    assert load_prompts(files / "titles.jsonl", "title") == ["the film"]
    (files / "long.txt").write_text("the  film was long\nthis\n")
    assert load_prompts(files / "long.txt", words=2) == ["the film", "this"]
    assert load_prompts("movie-reviews:imdb", words=2) == ["a bad", "a fine", "a very"]


def test_every_round_has_each_prompt_once_in_a_new_order():
    """The order has no state and depends on the seed."""
    order = deal(5, 0, 40, seed=3)
    rounds = [tuple(order[i : i + 5]) for i in range(0, 40, 5)]
    assert all(sorted(r) == [0, 1, 2, 3, 4] for r in rounds) and len(set(rounds)) > 4
    assert sum((deal(5, start, 8, seed=3) for start in range(0, 40, 8)), []) == order
    assert deal(5, 0, 40, seed=4) != order


def test_list_of_one_prompt_equals_a_prefix(make_trainer):
    by_prefix, by_list = make_trainer(prefix="the film"), make_trainer({"prompts": ["the film"]})
    assert by_prefix.rollout_phase().texts == by_list.rollout_phase().texts


BATCH, PREFIX, GEN, D_MODEL, WIDTH = 12, 2, 3, 4, 2


def tagged(*shape: int) -> torch.Tensor:
    """Entry [i, ...] is i, the number of its sequence."""
    return torch.arange(BATCH).reshape(-1, *(1 for _ in shape)).expand(BATCH, *shape).clone()


def rollout_of_rows(with_support: bool = True) -> Rollout:
    """Return a rollout: row i of a tensor is i plus an offset; masks differ in odd rows."""
    odd = torch.arange(BATCH) % 2 == 1
    mask = torch.ones(BATCH, GEN, dtype=torch.bool)
    mask[odd, -1] = False
    prompt_mask = torch.ones(BATCH, PREFIX, dtype=torch.bool)
    prompt_mask[odd, 0] = False
    kept = torch.ones(BATCH, GEN, WIDTH, dtype=torch.bool)
    kept[odd, :, 1] = False
    samples = Samples(
        tokens=tagged(PREFIX + GEN),
        prompt_mask=prompt_mask,
        mask=mask,
        logprobs=tagged(GEN) + 100.0,
        values=tagged(GEN) + 200.0,
        support=Support(tagged(GEN, WIDTH) + 1000, kept) if with_support else None,
    )
    return make_rollout(
        samples,
        ref_residuals=tagged(GEN, D_MODEL) + 500.0,
        advantages=tagged(GEN) + 300.0,
        returns=tagged(GEN) + 400.0,
    )


def split(seed: int, num_minibatches: int = 3, passes: int = 4) -> list[ReplayMinibatch]:
    memory = ReplayMemory(rollout_of_rows(), num_minibatches, passes)
    return list(memory.get_minibatches(torch.Generator().manual_seed(seed)))


def orders(minibatches: list[ReplayMinibatch], per_pass: int = 3) -> list[tuple[int, ...]]:
    """Return the order of the sequences in each pass."""
    flat = [minibatch.tokens[:, 0].tolist() for minibatch in minibatches]
    return [tuple(sum(flat[i : i + per_pass], [])) for i in range(0, len(flat), per_pass)]


@pytest.mark.parametrize(("num_minibatches", "passes"), [(1, 1), (3, 2), (12, 3)])
def test_every_pass_has_every_sequence_once(num_minibatches, passes):
    minibatches = split(0, num_minibatches, passes)
    sizes = [len(minibatch.tokens) for minibatch in minibatches]
    assert sizes == [BATCH // num_minibatches] * (num_minibatches * passes)
    for order in orders(minibatches, num_minibatches):
        assert sorted(order) == list(range(BATCH))


def test_order_depends_on_generator_and_pass_only():
    torch.manual_seed(0)
    first = orders(split(7))
    torch.manual_seed(1)
    assert orders(split(7)) == first != orders(split(8))
    assert len({*first, tuple(range(BATCH))}) == 5


def test_every_tensor_of_a_minibatch_has_the_same_rows():
    offsets = {"tokens": 0, "logprobs": 100, "values": 200, "advantages": 300, "returns": 400}
    for minibatch in split(3):
        rows = minibatch.tokens[:, 0]
        odd = rows % 2 == 1
        for name, offset in (offsets | {"ref_residuals": 500}).items():
            found = getattr(minibatch, name).flatten(1)
            assert torch.equal(found, (rows + offset)[:, None].expand_as(found)), name
        assert torch.equal(~minibatch.mask[:, -1], odd)
        assert torch.equal(~minibatch.attention_mask[:, 0], odd)
        assert minibatch.attention_mask[:, 1:].all() and minibatch.prefix_len == PREFIX
        assert torch.equal(minibatch.support.tokens[:, 0, 0], rows + 1000)
        assert torch.equal(~minibatch.support.kept[:, 0, 1], odd)
    memory = ReplayMemory(rollout_of_rows(with_support=False), 3, 1)
    assert all(m.support is None for m in memory.get_minibatches(torch.Generator()))
