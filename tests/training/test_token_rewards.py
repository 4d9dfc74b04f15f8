"""Rewards on token ids: one per text or one per token, and the gains of a reward model's score."""

import pytest
import torch

from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import compute_gae
from rlhf_lab.models import load_model
from rlhf_lab.rewards import LearnedReward, RewardModel, ScoreGains, TokenReward

AS_THEY_ARE = {"normalize_reward": False}


@pytest.fixture(scope="module")
def model() -> RewardModel:
    """A reward model that knows nothing, with scores of mean 0.5 and deviation 2."""
    model = RewardModel(load_model("reel-nano"), seed=3)
    model.set_normalization(torch.tensor([-1.5, 2.5]))
    return model.requires_grad_(False)


def of_tokens(model: RewardModel) -> TokenReward:
    gains = ScoreGains(model)
    return TokenReward(gains, gains.tokenizer)


def test_a_function_of_token_ids_is_given_prompt_and_response_with_their_mask(make_trainer):
    seen = []

    def longest(input_ids, attention_mask):
        seen.append((input_ids, attention_mask))
        return attention_mask.sum(1).float()

    fields = {"temperature": 20.0, "gen_len": 26, "batch_size": 16, "stop_at_eos": True}
    parts = {"reward_fn": TokenReward(longest), "prompts": ["this movie", "this movie was so good"]}
    trainer = make_trainer(parts, **fields, **AS_THEY_ARE)
    rollout, bos = trainer.rollout_phase(), trainer.tokenizer.bos_token_id
    samples = rollout.samples
    ids, mask = seen[-1]
    assert torch.equal(ids, samples.tokens)
    assert not mask.all(), "prompts of two lengths, and responses that end early"
    real = samples.prompt_mask.sum(1) + samples.mask.sum(1)
    assert torch.equal(rollout.raw_rewards, real.float())
    for row, shown in zip(ids, mask, strict=True):
        assert row[shown][0] == bos, "from BOS on"
    assert rollout.token_rewards is None


def test_a_reward_model_is_a_function_of_token_ids(make_trainer, model):
    """Its score at the last token of each, without the EOS that texts are read with."""
    rollout = make_trainer({"reward_fn": TokenReward(model)}, **AS_THEY_ARE).rollout_phase()
    with torch.no_grad():
        alone = [model(row[None])[0].item() for row in rollout.samples.tokens]
    assert rollout.raw_rewards.tolist() == pytest.approx(alone, abs=1e-5)


def test_rewards_of_tokens_by_hand(make_trainer):
    """Token t of a response of 3 earns t + 1, whatever it is, and each prompt token a million.

    Rewards to go: 6, 5, 3. With values left out (lambda 1) these are the returns.
    """

    def by_place(input_ids, attention_mask):
        paid = torch.full(input_ids.shape, 1e6)
        paid[:, -3:] = torch.tensor([1.0, 2.0, 3.0])
        return paid

    fields = {"gen_len": 3, "stop_at_eos": False, "gae_lambda": 1.0, "advantages": "gae"}
    parts = {"reward_fn": TokenReward(by_place)}
    rollout = make_trainer(parts, **fields, **AS_THEY_ARE).rollout_phase()
    assert rollout.raw_rewards.tolist() == [6.0] * 8
    for row in rollout.returns:
        assert row.tolist() == pytest.approx([6.0, 5.0, 3.0], abs=1e-5)
    view = rollout.to_tensordict()
    assert view["next", "reward_raw"][0, :, 0].tolist() == [1.0, 2.0, 3.0]


def test_what_a_text_is_penalized_its_last_token_pays(make_trainer):
    """A response that did not end earns -3 in all, of which its tokens have 1 each already."""

    def one_each(input_ids, attention_mask):
        return torch.ones(input_ids.shape)

    fields = {"gen_len": 5, "stop_at_eos": True, "penalize_no_eos": True, "advantages": "reinforce"}
    parts = {"reward_fn": TokenReward(one_each)}
    rollout = make_trainer(parts, **fields, **AS_THEY_ARE).rollout_phase()
    assert rollout.raw_rewards.tolist() == [5.0] * 8
    assert rollout.rewards.tolist() == [-3.0] * 8
    assert rollout.token_rewards[0].tolist() == [1.0, 1.0, 1.0, 1.0, -7.0]
    assert rollout.advantages[0].tolist() == [-3.0, -4.0, -5.0, -6.0, -7.0]


def test_the_tokens_pay_for_their_kl_and_are_whitened(make_trainer):
    def by_place(input_ids, attention_mask):
        return torch.arange(float(input_ids.shape[1])).expand(input_ids.shape)

    fields = {"whiten_rewards": True, "advantages": "reinforce", "gen_len": 4, "batch_size": 4}
    trainer = make_trainer({"reward_fn": TokenReward(by_place)}, **fields, **AS_THEY_ARE)
    rollout = trainer.rollout_phase()
    paid = torch.arange(4.0) + rollout.samples.prefix_len
    paid = paid.repeat(4, 1)
    scaled = (paid - paid.mean()) / paid.std() + paid.mean()
    expected = scaled.flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(rollout.advantages, expected, atol=1e-4, rtol=1e-5)


def test_gains_add_up_to_the_score_of_the_text_less_that_of_its_prompt(make_trainer, model):
    """To the score of the text with its EOS, which texts are scored at, and which still fits."""
    fields = {"temperature": 2.0, "gen_len": 25, "batch_size": 16, "stop_at_eos": True}
    prompts = ["this movie", "this movie was so good"]
    trainer = make_trainer(
        {"reward_fn": of_tokens(model), "prompts": prompts}, **fields, **AS_THEY_ARE
    )
    rollout = trainer.rollout_phase()
    samples = rollout.samples
    assert not samples.mask.all() and not samples.prompt_mask.all()
    with torch.no_grad():
        before = [
            model.normalize(model(torch.tensor([prompt])))[0].item() for prompt in samples.prompts()
        ]
    whole = LearnedReward(model)(rollout.texts)
    expected = whole - torch.tensor(before)
    bos = trainer.tokenizer.bos_token_id  # a text does not show it where it was sampled
    plain = ~(samples.tokens[:, samples.prefix_len :] == bos).any(1)
    assert plain.sum() > 8
    torch.testing.assert_close(rollout.raw_rewards[plain], expected[plain], atol=1e-5, rtol=1e-4)
    assert not rollout.token_rewards[~samples.mask].any()


def test_each_gain_is_a_difference_of_two_scores(model):
    """Token by token, each text scored alone, and at its end with EOS."""
    tokenizer = model.base_model.tokenizer
    row = tokenizer.encode("this movie was so good", add_special_tokens=False)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    read = [bos, *row]
    with torch.no_grad():
        alone = [model(torch.tensor([read[: n + 1]]))[0].item() for n in range(len(read))]
        alone[-1] = model(torch.tensor([[*read, eos]]))[0].item()
    scores = [(score - 0.5) / 2 for score in alone]
    expected = [scores[0], *(b - a for a, b in zip(scores, scores[1:], strict=False))]
    ids = torch.tensor([[0, 0, *read, 7], [*read, 7, 7, 7]])
    mask = torch.tensor([[0, 0, *[1] * 6, 0], [*[1] * 6, 0, 0, 0]]).bool()
    gains = ScoreGains(model, batch_size=1)(ids, mask)
    assert gains[0].tolist() == pytest.approx([0, 0, *expected, 0], abs=1e-5)
    assert gains[1].tolist() == pytest.approx([*expected, 0, 0, 0], abs=1e-5)


def test_a_text_that_ends_with_eos_is_scored_there(model):
    tokenizer = model.base_model.tokenizer
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    row = tokenizer.encode("this movie was so good", add_special_tokens=False)
    gains = ScoreGains(model)
    ended, cut = ([[bos, *row, *end]] for end in ([eos], []))
    of_ended = gains(torch.tensor(ended), torch.ones(1, 7).bool())
    of_cut = gains(torch.tensor(cut), torch.ones(1, 6).bool())
    assert of_ended.sum().item() == pytest.approx(of_cut.sum().item(), abs=1e-5)
    without_bos = gains(torch.tensor([row]), torch.ones(1, 5).bool())
    assert without_bos[0, 1:].tolist() == pytest.approx(of_cut[0, 2:].tolist(), abs=1e-5)


def test_values_that_know_the_score_leave_no_advantage(make_trainer, model):
    """With the score so far as value, each token's surprise is spent where it is written."""
    rollout = make_trainer({"reward_fn": of_tokens(model)}, **AS_THEY_ARE).rollout_phase()
    paid, mask = rollout.token_rewards, rollout.samples.mask
    to_go = paid.flip(1).cumsum(1).flip(1)
    assert compute_gae(to_go, paid, 1.0, 1.0, mask).abs().max() < 1e-5
    assert (paid.abs() > 1e-3).float().mean() > 0.9, "most tokens earn something"


@pytest.mark.slow
def test_a_run_of_gains_is_resumed_to_the_bit(
    make_trainer, model, tmp_path, parameters_of, broken_off_and_resumed
):
    model.save(tmp_path / "reward", "reel-nano", {})
    fields = {"reward_fn": "learned", "reward_model": str(tmp_path / "reward")}
    fields |= {"reward_per_token": True, "total_phases": 3, **AS_THEY_ARE}
    whole, halved = make_trainer(**fields), make_trainer(**fields)
    whole.train()
    resumed = broken_off_and_resumed(halved)
    theirs, ours = parameters_of(whole.policy), parameters_of(resumed.policy)
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda ids: torch.zeros(len(ids), 3, 3), "shape (2, 3, 3)"),
        (lambda ids: torch.zeros(len(ids) + 1), "shape (3,) for token ids of shape (2, 3)"),
        (lambda ids: torch.zeros(ids.shape[0], ids.shape[1] - 1), "shape (2, 2)"),
        (lambda ids: [0.0] * len(ids), "returned list"),
        (lambda ids: torch.full(ids.shape, float("nan")), "returned nan for token ids"),
        (lambda ids: torch.full((len(ids),), float("inf")), "returned inf for token ids"),
    ],
    ids=["three dimensions", "a row too many", "a token too few", "a list", "nan", "inf"],
)
def test_what_is_neither_a_number_per_text_nor_per_token_is_refused_before_the_run(
    make_trainer, returned, words
):
    with pytest.raises(ConfigError) as caught:
        make_trainer({"reward_fn": TokenReward(lambda ids, mask: returned(ids))}, **AS_THEY_ARE)
    assert words in str(caught.value) and "return" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "normalize_reward=True is for one reward per text"),
        ({"reward_scaling": "scale", **AS_THEY_ARE}, "reward_scaling='scale' is for one"),
        ({"reward_clip": 1.0, **AS_THEY_ARE}, "reward_clip=1.0 is for one"),
        (
            {"dynamic_sampling": 2, "samples_per_prompt": 2, "advantages": "rloo", **AS_THEY_ARE},
            "dynamic_sampling=2 is for one",
        ),
    ],
    ids=["normalize_reward", "reward_scaling", "reward_clip", "dynamic_sampling"],
)
def test_settings_of_whole_texts_are_refused_where_tokens_are_paid(make_trainer, fields, words):
    per_text = TokenReward(lambda ids, mask: mask.sum(1).float())
    per_token = TokenReward(lambda ids, mask: mask.float())
    make_trainer({"reward_fn": per_text}, **fields).rollout_phase()
    with pytest.raises(ConfigError, match=words):
        make_trainer({"reward_fn": per_token}, **fields)


def test_a_reward_model_of_other_tokens_is_refused(make_trainer, model, monkeypatch):
    reward = of_tokens(model)
    monkeypatch.setattr(reward, "tokenizer", SmallerVocabulary())
    with pytest.raises(ConfigError, match="reward_fn reads other tokens than the policy writes"):
        make_trainer({"reward_fn": reward}, **AS_THEY_ARE)


class SmallerVocabulary:
    def get_vocab(self):
        return {"this": 0}


def test_a_function_that_changes_what_it_is_given_changes_nothing(make_trainer):
    def careless(input_ids, attention_mask):
        input_ids.zero_()
        attention_mask.zero_()
        torch.set_grad_enabled(True)
        return torch.ones(len(input_ids), requires_grad=True)

    trainer = make_trainer({"reward_fn": TokenReward(careless)}, **AS_THEY_ARE)
    rollout = trainer.rollout_phase()
    assert rollout.samples.tokens.any() and rollout.samples.mask.any()
    assert not rollout.raw_rewards.requires_grad
