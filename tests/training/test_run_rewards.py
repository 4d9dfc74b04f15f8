"""Rewards in a run: penalties, scaling, several rewards, answers, and rewards on token ids."""

import dataclasses
import json
import math
from types import SimpleNamespace

import pytest
import torch

from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import RunningMoments
from rlhf_lab.organism import REWARDS
from rlhf_lab.rewards import ResponseReward, RewardModel, RewardPipeline, ScoreGains, TokenReward
from rlhf_lab.samples import Samples
from rlhf_lab.training.sinks import to_values
from tests.small_runs import DEVICE

RAW = {"normalize_reward": False}
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
    for line in (*lines, final):
        assert line["mean_reward"] == pytest.approx(line[NAMES[0]] + 0.5 * line[NAMES[1]])
    values, regex = to_values(final, samples, "final/"), "reward/regex:.{1,999}"
    assert [x for x in values["final_samples"][0] if "/" in x] == [*NAMES, regex]
    assert values["final/reward/smoothed"] == final["reward/smoothed"]
    assert lines[0][regex] == 1.0
    assert not [name for name in runs("plain").reports[0].to_dict() if "/" in name]


def test_reward_may_be_any_module(make_trainer):
    unknown = torch.nn.LazyLinear(2), torch.nn.Linear(2, 2, device="meta")
    module = torch.nn.Sequential(torch.nn.Linear(1, 1), *unknown)
    module.get_extra_state = lambda: {"version": 1}
    module.forward = lambda texts: torch.tensor([float(len(text)) for text in texts])
    checksum = lambda: make_trainer({"reward_fn": module}).sources["the model of Sequential"]
    before = checksum()
    module[0].weight.data += 1
    assert before != checksum()


@pytest.mark.slow
def test_reward_of_the_whole_batch_never_gets_a_part(make_trainer):
    sizes = set()
    spread = lambda prompts, responses: sizes.add(len(responses)) or [0.0] * len(responses)
    parts = {"reward_fn": {"spread": ResponseReward(spread, whole_batch=True)}}
    trainer = make_trainer(parts, generation_batch_size=2, micro_batch_size=2)
    trainer.rollout_phase()
    trainer.evaluate()
    assert sizes == {8}


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


@pytest.mark.slow
def test_rewards_that_do_not_fit_the_settings_raise(make_trainer, questions, tmp_path):
    """A reward of texts as token ids has no such limits."""
    batch = ResponseReward(lambda prompts, responses: [0.0] * len(prompts), whole_batch=True)
    answered = ResponseReward(lambda prompts, responses, answers: [0.0], answers=True)
    texts, tokens = (TokenReward(x) for x in (lambda i, m: m.sum(1) + 0.0, lambda i, m: m + 0.0))
    file = RAW | {"prompts": str(questions)}
    labels, exact = file | {"labels_column": "answer"}, file | {"answers_column": "answer"}
    (tmp_path / "twice.csv").write_text("prompt,answer\nthis movie,a\nthis movie,b\n")
    twice = exact | {"prompts": str(tmp_path / "twice.csv"), "reward_fn": "exact_match"}
    for reward, fields, words in (
        (batch, labels, "labels_column='answer' scores"),
        (texts, labels, "labels_column='answer' requires a reward of texts"),
        (tokens, RAW | {"reward_clip": 1.0}, "reward_clip=.* is for one"),
        (answered, {}, "set answers_column"),
        (None, exact | {"reward_fn": "true_reward"}, "read by no reward"),
        (None, twice, "has two answers, 'a' and 'b'"),
        (TokenReward(lambda ids, mask: mask[:, 1:] + 0.0), RAW, r"shape \(2, 3\) for"),
        (TokenReward(lambda ids, mask: mask * math.nan), RAW, "returned nan for token ids"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_trainer({"reward_fn": reward}, **fields)
    make_trainer({"reward_fn": texts}, reward_clip=1.0, **RAW)
    with pytest.raises(ConfigError, match="reward_model='m' has no effect with reward_fn='zero'"):
        make_trainer(reward_fn="zero", reward_model="m")
    with pytest.raises(ConfigError, match="not passed prompts"):
        make_trainer({"prompts": ["this movie"]}, **exact, reward_fn="exact_match")


STOP = 9


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


def test_padding_equal_to_a_stop_token_does_not_end_a_response(reel_args):
    """As in `step`, the mask decides: responses of 2 tokens, padded with the stop token."""
    batch = make_samples([1, 2, STOP, STOP], [1, STOP, STOP, STOP])
    batch = dataclasses.replace(batch, mask=torch.tensor([[True, True, False, False]] * 2))
    pipeline = make_pipeline(reel_args(gen_len=4, penalize_no_eos=True, stop_at_eos=True))
    assert pipeline.penalize(batch, torch.ones(2)).tolist() == [-3.0, 1.0]


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
    """With their moments, shift and all, only the difference is divided; or clipped to 2.

    Each row gets the greedy reward of its prompt.
    """
    length = lambda texts: torch.tensor([float(len(text)) for text in texts])
    fields = {"reward_scaling": scaling} if scaling else {"reward_clip": 2.0}
    fields |= {"advantages": "remax", "stop_at_eos": False, "samples_per_prompt": 2} | RAW
    parts = {"reward_fn": length, "prompts": ["this movie", "this movie honestly ,"]}
    trainer = make_trainer(parts, **fields)
    rollout = trainer.rollout_phase()
    prompts = rollout.samples.prompts()
    greedy = length(trainer.sample_greedily(prompts).texts(trainer.tokenizer))
    assert len(greedy.unique()) == 2
    difference = rollout.raw_rewards - greedy.to(DEVICE)
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


@pytest.fixture(scope="module")
def model(reward_dir) -> RewardModel:
    return RewardModel.load(reward_dir).requires_grad_(False)


def test_token_rewards_match_hand_computed(make_trainer):
    """Token t of a response of 3 has the reward t + 1, and each prompt token a million.

    Rewards to go: 6, 5, 3. With lambda 1 these are the returns. Other changes have no effect.
    """
    seen = []

    def count_up(input_ids, attention_mask):
        seen.append((input_ids.clone(), attention_mask.clone()))
        input_ids.zero_()
        attention_mask.zero_()
        rewards = torch.full(input_ids.shape, 1e6, requires_grad=True)
        return torch.cat([rewards[:, :-3], torch.tensor([[1.0, 2.0, 3.0]] * len(rewards))], 1)

    fields = {"gen_len": 3, "stop_at_eos": False, "gae_lambda": 1.0, "advantages": "gae"} | RAW
    parts = {"reward_fn": TokenReward(count_up), "prompts": ["this movie", "this movie was"]}
    rollout = make_trainer(parts, **fields).rollout_phase()
    samples, (ids, mask) = rollout.samples, seen[-1]
    assert torch.equal(ids, samples.tokens) and torch.equal(mask, samples.attention_mask)
    assert not mask.all() and not rollout.raw_rewards.requires_grad
    assert rollout.raw_rewards.tolist() == [6.0] * 8
    for row in rollout.returns:
        assert row.tolist() == pytest.approx([6.0, 5.0, 3.0], abs=1e-5)
    view = rollout.to_tensordict()
    assert view["next", "reward_raw"][0, :, 0].tolist() == [1.0, 2.0, 3.0]


def test_penalty_is_added_to_the_last_token(make_trainer):
    """A response without an end gets -3 in all, of which its tokens have 1 each already."""
    fields = {"gen_len": 5, "stop_at_eos": True, "penalize_no_eos": True, "advantages": "reinforce"}
    parts = {"reward_fn": TokenReward(lambda ids, mask: torch.ones(ids.shape))}
    rollout = make_trainer(parts, **fields, **RAW).rollout_phase()
    assert rollout.raw_rewards.tolist() == [5.0] * 8 and rollout.rewards.tolist() == [-3.0] * 8
    assert rollout.token_rewards[0].tolist() == [1.0, 1.0, 1.0, 1.0, -7.0]
    assert rollout.advantages[0].tolist() == [-3.0, -4.0, -5.0, -6.0, -7.0]


def test_each_gain_is_a_difference_of_two_scores(model):
    """Token by token, each text scored alone, and at its end with EOS."""
    tokenizer = model.base_model.tokenizer
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    row = [bos, *tokenizer.encode("this movie was so good", add_special_tokens=False)]
    with torch.no_grad():
        alone = [model(torch.tensor([row[: n + 1]]))[0].item() for n in range(len(row))]
        alone[-1] = model(torch.tensor([[*row, eos]]))[0].item()
    scores = [(score - 0.5) / 2 for score in alone]
    expected = [scores[0], *(b - a for a, b in zip(scores, scores[1:], strict=False))]
    ids = torch.tensor([[0, 0, *row, 7], [*row, 7, 7, 7]])
    mask = torch.tensor([[0, 0, *[1] * 6, 0], [*[1] * 6, 0, 0, 0]]).bool()
    gains = ScoreGains(model, batch_size=1)(ids, mask)
    assert gains[0].tolist() == pytest.approx([0, 0, *expected, 0], abs=1e-5)
    assert gains[1].tolist() == pytest.approx([*expected, 0, 0, 0], abs=1e-5)
    ended = ScoreGains(model)(torch.tensor([[*row, eos]]), torch.ones(1, 7).bool())
    assert ended.sum().item() == pytest.approx(sum(expected), abs=1e-5)
    full = torch.full((1, model.base_model.cfg.n_ctx), row[1])  # no room for a BOS
    gains = ScoreGains(model)(full, full >= 0)
    assert gains.sum().item() == pytest.approx((model(full).item() - 0.5) / 2, abs=1e-5)
    without_bos = ScoreGains(model)(torch.tensor([row[1:]]), torch.ones(1, 5).bool())
    first = scores[1]  # the model still reads BOS, whose own score nobody gets
    assert without_bos[0].tolist() == pytest.approx([first, *expected[2:]], abs=1e-5)


def test_reward_model_with_other_tokens_raises(make_trainer, model, monkeypatch):
    reward = TokenReward(ScoreGains(model), model.base_model.tokenizer)
    monkeypatch.setattr(reward, "tokenizer", SimpleNamespace(get_vocab=lambda: {"this": 0}))
    with pytest.raises(ConfigError, match="reward_fn reads other tokens than the policy writes"):
        make_trainer({"reward_fn": reward}, **RAW)
