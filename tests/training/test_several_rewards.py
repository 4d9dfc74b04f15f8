"""Rewards in a run: penalties, scaling, moments; several rewards, weighted and logged by name."""

import dataclasses
import json

import pytest
import torch

from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import RunningMoments
from rlhf_lab.organism import REWARDS
from rlhf_lab.rewards import ResponseReward, RewardPipeline, TokenReward
from rlhf_lab.samples import Samples
from rlhf_lab.training.sinks import to_values
from rlhf_lab.views.report import write_report

NAMES = ["reward/smoothed", "reward/length"]


def test_weighted_sum_is_learned_and_each_is_logged(runs):
    run = runs("several rewards")
    lines, final = run.trainer.run.read("metrics.jsonl"), run.trainer.run.read_info()["final"]
    samples = run.trainer.run.read("samples.jsonl")
    for sample in samples:
        assert sample["reward/smoothed"] == REWARDS["smoothed"]([sample["text"]]).item()
        total = sample["reward/smoothed"] + 0.5 * sample["reward/length"]
        assert sample["reward"] == pytest.approx(total)
    rows = [sample for sample in samples if sample["phase"] == 0]
    for name in NAMES:
        mean = sum(row[name] for row in rows) / len(rows)
        assert lines[0][name] == pytest.approx(mean)
        assert run.reports[0].reward_means[name.removeprefix("reward/")] == lines[0][name]
    assert lines[0]["reward/smoothed"] != lines[0]["reward/length"]
    for line in (*lines, final):
        assert line["mean_reward"] == pytest.approx(line[NAMES[0]] + 0.5 * line[NAMES[1]])
        assert "reward_means" not in line
    values = to_values(final, samples, "final/")
    regex = "reward/regex:.{1,999}"
    assert all(list(row)[-3:] == [*NAMES, regex] for row in values["final_samples"])
    assert lines[0][regex] == 1.0 and "several rewards" in write_report(run.path).read_text()
    assert values["final/reward/smoothed"] == final["reward/smoothed"]
    assert not [name for name in runs("plain").reports[0].to_dict() if "/" in name]


def test_weighted_sum_is_clipped(make_trainer):
    """Twice 3 or 0 plus thrice 1 are 9 and 3, clipped to 4; a single reward also has a weight."""
    ones = lambda texts: [1.0] * len(texts)
    parts = {"reward_fn": {"a": lambda texts: [3.0, 0.0] * (len(texts) // 2), "b": ones}}
    fields = {"reward_weights": (2.0, 3.0), "reward_clip": 4.0, "normalize_reward": False}
    rollout = make_trainer(parts, **fields).rollout_phase()
    assert rollout.raw_rewards.tolist() == [9.0, 3.0] * 4
    assert rollout.rewards.tolist() == [4.0, 3.0] * 4
    single = make_trainer({"reward_fn": ones}, reward_weights=(3.0,))
    assert single.rollout_phase().raw_rewards.tolist() == [3.0] * 8


@pytest.mark.slow
def test_reward_of_the_whole_batch_never_gets_a_part(make_trainer):
    sizes = set()
    spread = lambda prompts, responses: sizes.add(len(responses)) or [0.0] * len(responses)
    parts = {"reward_fn": {"spread": ResponseReward(spread, whole_batch=True)}}
    trainer = make_trainer(parts, generation_batch_size=2, micro_batch_size=2)
    trainer.rollout_phase()
    trainer.evaluate()
    assert sizes == {8}


def test_rewards_of_a_batch_or_of_tokens_reject_settings(make_trainer, questions):
    batch = ResponseReward(lambda prompts, responses: [0.0] * len(prompts), whole_batch=True)
    tokens, labels = TokenReward(lambda ids, mask: torch.zeros(len(ids))), "labels_column='answer'"
    of_file = {"labels_column": "answer", "prompts": str(questions)}
    for reward, fields, words in [
        (batch, {"dynamic_sampling": 2, "samples_per_prompt": 2}, "dynamic_sampling=2 scores"),
        (batch, {"advantages": "remax", "normalize_reward": False}, "advantages='remax' scores"),
        (batch, of_file, f"{labels} scores"),
        (tokens, of_file, f"{labels} requires a reward of texts"),
    ]:
        with pytest.raises(ConfigError, match=words):
            make_trainer({"reward_fn": reward}, **fields)


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    rows = [{"prompt": "this movie", "answer": "great"}, {"prompt": "the film", "answer": "bad"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_answers_come_with_their_prompts(make_trainer, questions):
    seen = []

    def note(prompts, responses, answers):
        seen.append(list(zip(prompts, answers, strict=True)))
        return [float(answer == "bad") for answer in answers]

    fields = {"prompts": str(questions), "answers_column": "answer", "samples_per_prompt": 4}
    parts = {"reward_fn": ResponseReward(note, answers=True)}
    rollout = make_trainer(parts, normalize_reward=False, **fields).rollout_phase()
    pairs = {("this movie", "great"), ("the film", "bad")}
    assert set(seen[-1]) == pairs and len(seen[-1]) == 8
    expected = [float(text.startswith("the film")) for text in rollout.texts]
    assert rollout.raw_rewards.tolist() == expected


def test_answers_that_are_not_usable_raise(make_trainer, questions, tmp_path):
    column = {"answers_column": "answer"}
    asks = ResponseReward(lambda p, r, a: [0.0] * len(p), answers=True)
    twice = tmp_path / "twice.csv"
    twice.write_text("prompt,answer\nthis movie,a\nthis movie,b\n")
    exact = {"reward_fn": "exact_match", "prompts": str(questions)} | column
    cases = [
        ({}, exact | {"reward_fn": "true_reward"}, "read by no reward"),
        ({"prompts": ["this movie"]}, exact, "but prompts were passed"),
        ({"reward_fn": asks}, {}, "set answers_column"),
        ({}, exact | {"prompts": str(twice)}, "has two answers, 'a' and 'b'"),
        ({"reward_fn": {"bad": lambda t: None}}, {}, "returned NoneType"),
    ]
    for parts, fields, words in cases:
        with pytest.raises(ConfigError, match=words):
            make_trainer(parts, **fields)


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


@pytest.mark.parametrize("scaling", ["scale", "scale_and_shift", None])
def test_remax_shapes_greedy_rewards_as_those_of_samples(make_trainer, scaling):
    """With their moments, shift and all, only the difference is divided; or clipped to 2."""
    length = lambda texts: torch.tensor([float(len(text)) for text in texts])
    fields = {"reward_scaling": scaling} if scaling else {"reward_clip": 2.0}
    fields |= {"advantages": "remax", "stop_at_eos": False} | RAW
    trainer = make_trainer({"reward_fn": length}, **fields)
    rollout = trainer.rollout_phase()
    greedy = length(trainer.sample_greedily([trainer.prompt]).texts(trainer.tokenizer))
    difference = rollout.raw_rewards - greedy
    assert difference.abs().max() > 0.1
    expected = difference / rollout.reward_moments.std if scaling else 0 * difference
    torch.testing.assert_close(rollout.advantages[:, 0], expected, atol=1e-5, rtol=0)


def test_moments_include_each_learned_batch_once(make_trainer, runs):
    """Not a rollout or an evaluation from which nothing is learned."""
    trainer = make_trainer(reward_scaling="scale_and_shift", **RAW)
    trainer.rollout_phase()
    trainer.evaluate()
    assert trainer.rewards.moments == RunningMoments()
    run = runs("state")
    moments, batches = run.trainer.rewards.moments, run.rollouts
    expected = RunningMoments.of(torch.cat([rollout.raw_rewards for rollout in batches]))
    assert moments.count == 24
    assert (moments.mean, moments.std) == pytest.approx((expected.mean, expected.std))
