"""Tests the reward model: where it reads, what padding does, how it learns, how it is kept."""

import json

import numpy as np
import pytest
import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.fitting import FitConfig, RewardLoss
from rlhf_lab.models import load_model
from rlhf_lab.rewards import (
    LearnedReward,
    Pairs,
    RewardModel,
    load_reward,
    reel_pairs,
    score_texts,
    train_reward_model,
)
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.capture import capture_activations

TOKENS = torch.tensor([[4, 9, 13, 7, 20, 5], [12, 4, 19, 6, 8, 10]])


@pytest.fixture
def model(model_dir, randomize_weights):
    model = RewardModel(load_model(str(model_dir)))
    randomize_weights(model.head, seed=3)
    return model


@pytest.fixture(scope="module")
def reel_model():
    return RewardModel(load_model("reel-nano"))


def test_the_score_is_a_dot_product_with_the_final_normalized_residual(model):
    _, cache = model.base_model.run_with_cache(TOKENS)
    normalized = cache["ln_final.hook_normalized"]
    expected = torch.stack([(row[-1] * model.head.weight[0]).sum() for row in normalized])
    torch.testing.assert_close(model(TOKENS), expected, atol=1e-5, rtol=0)
    every = (normalized * model.head.weight[0]).sum(-1)
    torch.testing.assert_close(model.token_scores(TOKENS), every, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_scores_as_it_does_alone_whatever_pads_it(model, side):
    short = TOKENS[1, :3]
    for filler in (0, 17):
        padding = torch.full((3,), filler)
        parts, real = [short, padding], [True] * 3 + [False] * 3
        if side == "left":
            parts, real = parts[::-1], real[::-1]
        tokens = torch.stack([TOKENS[0], torch.cat(parts)])
        mask = torch.tensor([[True] * 6, real])
        alone = torch.stack([model(TOKENS[:1])[0], model(short[None])[0]])
        torch.testing.assert_close(model(tokens, mask), alone, atol=1e-5, rtol=0)


def test_rows_padded_on_different_sides_go_together(model):
    tokens = torch.tensor([[0, 0, 4, 9], [4, 9, 0, 0], [0, 4, 9, 0], [4, 9, 13, 7]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 1, 1]]).bool()
    scores = model(tokens, mask)
    alone = torch.cat([model(tokens[:1, 2:]).expand(3), model(tokens[3:])])
    torch.testing.assert_close(scores, alone, atol=1e-5, rtol=0)


def test_a_row_without_a_real_token_is_refused(model):
    mask = torch.tensor([[True] * 6, [False] * 6])
    with pytest.raises(ValueError, match="without a real token"):
        model(TOKENS, mask)


def test_the_gradient_reaches_head_and_trunk_and_never_the_unembedding(model):
    model(TOKENS).sum().backward()
    assert model.head.weight.grad.abs().max() > 0
    assert model.base_model.embed.W_E.grad.abs().max() > 0
    assert model.base_model.unembed.W_U.grad is None


def test_it_is_probed_like_a_policy(model):
    """Its activations are captured by name, and a hook that changes one changes the score."""
    acts = capture_activations(model.base_model, TOKENS, ["blocks.*.hook_resid_post"], pos=-1)
    assert {name: act.shape for name, act in acts.items()} == {
        f"blocks.{layer}.hook_resid_post": (2, 16) for layer in range(2)
    }
    heard = []
    hooks = [("blocks.1.hook_resid_post", lambda x, hook: heard.append(x.detach()))]
    with model.base_model.hooks(fwd_hooks=hooks):
        plain = model(TOKENS)
    assert torch.equal(heard[0][:, -1], acts["blocks.1.hook_resid_post"])
    with model.base_model.hooks(fwd_hooks=[("blocks.0.hook_resid_post", lambda x, hook: -x)]):
        assert (model(TOKENS) - plain).abs().max() > 1e-2
    assert torch.equal(model(TOKENS), plain)


def test_texts_get_bos_and_eos_and_are_cut_to_the_context(reel_model):
    """BOS is 0 and EOS is 1 in Reel, whose context is 32."""
    tokens, mask = reel_model.encode(["this movie", "this", "the " * 40])
    assert tokens.shape == (3, 32)
    assert tokens[0, :4].tolist() == [0, 2, 8, 1] and mask[0].tolist() == [True] * 4 + [False] * 28
    assert tokens[1, :3].tolist() == [0, 2, 1] and mask[1].sum() == 3
    assert tokens[2, -1] == 1 and mask[2].all()


def test_an_unknown_word_of_a_closed_vocabulary_is_refused(reel_model):
    with pytest.raises(ConfigError, match="zebra"):
        reel_model.encode(["this zebra"])


def test_normalization_worked_by_hand(model):
    """Scores 1, 3, 5, 7: mean 4, variance (9 + 1 + 1 + 9) / 4 = 5."""
    model.set_normalization(torch.tensor([1.0, 3.0, 5.0, 7.0]))
    found = model.normalize(torch.tensor([4.0, 9.0]))
    torch.testing.assert_close(found, torch.tensor([0.0, 5 / 5**0.5]))


def test_equal_scores_do_not_divide_by_zero(model):
    model.set_normalization(torch.full((4,), 2.5))
    assert model.normalize(torch.tensor([2.5])).tolist() == [0.0]


def test_a_text_scores_the_same_in_any_batch(reel_model):
    texts = reel_pairs(6, 0).chosen
    together = LearnedReward(reel_model)(texts)
    singly = LearnedReward(reel_model, batch_size=1)(texts)
    torch.testing.assert_close(together, singly, atol=1e-5, rtol=0)
    assert LearnedReward(reel_model)([]).shape == (0,)


@pytest.fixture(scope="module")
def fitted():
    """120 steps on Reel: enough to beat a judge that goes by single words."""
    model = RewardModel(load_model("reel-nano"))
    fitting = FitConfig(steps=120, batch_size=48, show_progress=False)
    return model, train_reward_model(model, reel_pairs(3000, 0), fitting)


@pytest.mark.slow
def test_training_on_reel_comes_near_the_best_possible_judge(fitted):
    """600 held-out pairs: a standard error of .013."""
    _, fit = fitted
    assert (fit.train_pairs, fit.held_out_pairs) == (2400, 600)
    assert fit.last_loss < fit.first_loss
    assert fit.accuracy > fit.bayes_accuracy - 0.04
    assert abs(fit.true_reward_accuracy - fit.bayes_accuracy) < 0.06


@pytest.mark.slow
def test_a_trained_model_sees_through_negation(fitted):
    """It prefers "wasn't bad" to "wasn't good", which a bag of words would not."""
    score = LearnedReward(fitted[0])
    review = "this movie wow , " + " and ".join(["the plot wasn't so {}"] * 3) + " . i {} it . bye"
    praise, blame = score(
        [
            review.format("bad", "bad", "bad", "liked"),
            review.format("good", "good", "good", "disliked"),
        ]
    )
    assert praise > blame + 0.5


@pytest.mark.slow
def test_rewards_have_mean_0_and_variance_1_over_the_training_texts(fitted):
    """Held-out texts here, 1,000 of them, so not exactly."""
    pairs = reel_pairs(500, 9)
    rewards = LearnedReward(fitted[0])(pairs.chosen + pairs.rejected)
    assert abs(rewards.mean().item()) < 0.15
    assert rewards.std().item() == pytest.approx(1, abs=0.15)


@pytest.mark.slow
def test_training_is_repeatable_and_leaves_the_random_state_alone():
    def run(seed):
        base_model = load_model("reel-nano")
        before = torch.get_rng_state()
        model = RewardModel(base_model, seed)
        train_reward_model(
            model, reel_pairs(40, 0), FitConfig(3, 8, seed=seed, show_progress=False)
        )
        assert torch.equal(torch.get_rng_state(), before)
        return model.head.weight

    assert torch.equal(run(4), run(4)) and not torch.equal(run(4), run(5))


@pytest.mark.slow
def test_a_saved_model_comes_back_bit_for_bit_and_pays_a_run(fitted, tmp_path):
    model, fit = fitted
    texts = reel_pairs(8, 5).chosen
    model.save(tmp_path / "rm", "reel-nano", fit.to_dict())
    args = RLHFArgs(
        preset="reel",
        reward_fn="learned",
        reward_model=str(tmp_path / "rm"),
        batch_size=8,
        device="cpu",
    )
    reward = load_reward(args)
    assert torch.equal(score_texts(reward, texts), LearnedReward(model)(texts).detach())
    assert reward.model.std != 1 and not reward.model.head.weight.requires_grad
    notes = json.loads((tmp_path / "rm" / "reward_model.json").read_text())
    assert notes["accuracy"] == fit.accuracy and notes["bayes_accuracy"] == fit.bayes_accuracy
    rollout = RLHFTrainer(args, out=tmp_path / "run").rollout_phase()
    assert torch.equal(rollout.raw_rewards, score_texts(reward, rollout.texts))


def test_an_occupied_directory_is_left_alone(fitted, tmp_path):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(LoadError, match="already exists"):
        fitted[0].save(tmp_path, "reel-nano", {})
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_directory_without_a_reward_model_is_refused(gpt2_dir, tmp_path):
    for place in (gpt2_dir, tmp_path / "nowhere"):
        with pytest.raises(LoadError, match="is not a reward model.*train-reward"):
            LearnedReward(str(place))


def test_a_corrupt_head_is_refused(reel_model, tmp_path):
    reel_model.save(tmp_path / "rm", "reel-nano", {})
    (tmp_path / "rm" / "reward_head.safetensors").write_bytes(b"nothing")
    with pytest.raises(LoadError, match="is corrupt"):
        LearnedReward(tmp_path / "rm")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"steps": 0}, "steps=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"held_out": 1.0}, "held_out=1.0"),
        ({"margin": -1.0}, "margin=-1.0"),
        ({"centering": -0.1}, "centering=-0.1"),
        ({"centering": float("inf")}, "centering=inf"),
        ({"margin": 1.0}, "margin=1.0 requires the lead"),
    ],
)
def test_settings_out_of_range_are_refused(reel_model, change, word):
    pairs = Pairs(["this", "the"], ["it", "i"])
    with pytest.raises(ConfigError, match=word):
        if change.keys() & {"margin", "centering"}:
            train_reward_model(reel_model, pairs, loss=RewardLoss(**change))
        else:
            train_reward_model(reel_model, pairs, FitConfig(**change))


def test_two_pairs_are_enough_to_train_and_measure():
    model = RewardModel(load_model("reel-nano"))
    pairs = Pairs(["this movie", "the plot"], ["it", "i"])
    fit = train_reward_model(model, pairs, FitConfig(1, 64, held_out=0.9, show_progress=False))
    assert (fit.train_pairs, fit.held_out_pairs) == (1, 1)
    assert fit.accuracy in (0.0, 0.5, 1.0) and fit.bayes_accuracy is None
    assert np.isfinite(fit.last_loss)


def first_loss(margin, centering):
    """The loss of one step on a model whose scores are 0 wherever it looks."""
    model = RewardModel(load_model("reel-nano"))
    model.head.weight.data.zero_()
    margins = np.full(4, 2.0)
    pairs = Pairs(["this movie"] * 4, ["it"] * 4, margins=margins)
    fitting = FitConfig(1, 2, show_progress=False)
    return train_reward_model(model, pairs, fitting, RewardLoss(margin, centering)).first_loss


def test_the_lead_that_is_asked_for_worked_by_hand():
    """Scores 0 and 0, margins 2: -log sigmoid(0) = .6931; with half of the margin
    -log sigmoid(-1) = log(1 + e) = 1.3133.
    """
    assert first_loss(0.0, 0.0) == pytest.approx(0.6931, abs=1e-4)
    assert first_loss(0.5, 0.0) == pytest.approx(1.3133, abs=1e-4)


def test_centering_costs_the_square_of_the_sum_of_the_scores():
    """Twice the same text, of score s: -log sigmoid(0) + c (s + s)^2 = log 2 + 4 c s^2."""
    model = RewardModel(load_model("reel-nano"), seed=3)
    score = model.score(["this movie"]).item()
    assert abs(score) > 0.05
    pairs = Pairs(["this movie"] * 4, ["this movie"] * 4)
    fitting = FitConfig(1, 2, 1e-9, show_progress=False)
    fit = train_reward_model(model, pairs, fitting, RewardLoss(centering=2.5))
    assert fit.first_loss == pytest.approx(np.log(2) + 4 * 2.5 * score**2, rel=1e-4)
    assert fit.mean_score == pytest.approx(score, abs=1e-4) and fit.to_dict()["centering"] == 2.5
