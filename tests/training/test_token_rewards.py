"""Rewards on token ids: one per text or per token, and the gains of a reward model's score."""

from types import SimpleNamespace

import pytest
import torch

from rlhf_lab.errors import ConfigError
from rlhf_lab.rewards import RewardModel, ScoreGains, TokenReward

RAW = {"normalize_reward": False}


@pytest.fixture(scope="module")
def model(reward_dir) -> RewardModel:
    return RewardModel.load(reward_dir).requires_grad_(False)


def make_gains(model: RewardModel) -> TokenReward:
    gains = ScoreGains(model)
    return TokenReward(gains, gains.tokenizer)


@pytest.mark.slow
@pytest.mark.typed
def test_function_gets_prompt_and_response_with_their_mask(make_trainer):
    seen = []

    def length(input_ids, attention_mask):
        seen.append((input_ids.clone(), attention_mask.clone()))
        lengths = attention_mask.sum(1).float().requires_grad_()
        input_ids.zero_()  # which changes no sample
        attention_mask.zero_()
        return lengths

    fields = {"temperature": 20.0, "gen_len": 26, "batch_size": 16, "stop_at_eos": True} | RAW
    parts = {"reward_fn": TokenReward(length), "prompts": ["this movie", "this movie was so good"]}
    trainer = make_trainer(parts, **fields)
    rollout, bos = trainer.rollout_phase(), trainer.tokenizer.bos_token_id
    samples, (ids, mask) = rollout.samples, seen[-1]
    assert torch.equal(ids, samples.tokens) and not mask.all()
    real = samples.prompt_mask.sum(1) + samples.mask.sum(1)
    assert torch.equal(rollout.raw_rewards, real.float()) and not rollout.raw_rewards.requires_grad
    assert all(row[kept][0] == bos for row, kept in zip(ids, mask, strict=True))
    assert rollout.token_rewards is None


def test_token_rewards_match_hand_computed(make_trainer):
    """Token t of a response of 3 has the reward t + 1, and each prompt token a million.

    Rewards to go: 6, 5, 3. With lambda 1 these are the returns.
    """

    def by_place(input_ids, attention_mask):
        rewards = torch.full(input_ids.shape, 1e6)
        rewards[:, -3:] = torch.tensor([1.0, 2.0, 3.0])
        return rewards

    fields = {"gen_len": 3, "stop_at_eos": False, "gae_lambda": 1.0, "advantages": "gae"}
    rollout = make_trainer({"reward_fn": TokenReward(by_place)}, **fields, **RAW).rollout_phase()
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
    without_bos = ScoreGains(model)(torch.tensor([row[1:]]), torch.ones(1, 5).bool())
    first = scores[1]  # the model still reads BOS, whose own score nobody gets
    assert without_bos[0].tolist() == pytest.approx([first, *expected[2:]], abs=1e-5)


def test_invalid_results_raise_before_the_run(make_trainer):
    for returned, words in (
        (lambda ids: torch.zeros(len(ids), 3, 3), "shape (2, 3, 3)"),
        (lambda ids: torch.zeros(ids.shape[0], ids.shape[1] - 1), "shape (2, 3) for"),
        (lambda ids: [0.0] * len(ids), "returned list"),
        (lambda ids: torch.full(ids.shape, float("nan")), "returned nan for token ids"),
    ):
        with pytest.raises(ConfigError) as caught:
            make_trainer({"reward_fn": TokenReward(lambda ids, mask, f=returned: f(ids))}, **RAW)
        assert words in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"normalize_reward": True},
        {"reward_scaling": "scale"},
        {"reward_clip": 1.0},
        {"dynamic_sampling": 2, "samples_per_prompt": 2, "advantages": "rloo"},
    ],
    ids=str,
)
def test_settings_of_whole_texts_reject_token_rewards(make_trainer, fields):
    make_trainer({"reward_fn": TokenReward(lambda ids, mask: mask.sum(1) + 0.0)}, **RAW | fields)
    with pytest.raises(ConfigError, match=f"{next(iter(fields))}=.* is for one"):
        make_trainer({"reward_fn": TokenReward(lambda ids, mask: mask + 0.0)}, **RAW | fields)


def test_reward_model_with_other_tokens_raises(make_trainer, model, monkeypatch):
    reward = make_gains(model)
    monkeypatch.setattr(reward, "tokenizer", SimpleNamespace(get_vocab=lambda: {"this": 0}))
    with pytest.raises(ConfigError, match="reward_fn reads other tokens than the policy writes"):
        make_trainer({"reward_fn": reward}, **RAW)
