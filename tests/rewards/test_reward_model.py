"""Reward model: where it reads, what padding does, normalization, and storage."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.models import load_model
from rlhf_lab.rewards import LearnedReward, RewardModel, load_reward, reel_pairs, score_texts
from rlhf_lab.training import RLHFTrainer
from tests.tiny_models import randomize

TOKENS = torch.tensor([[4, 9, 13, 7, 20, 5], [12, 4, 19, 6, 8, 10]])


@pytest.fixture
def model(model_dir):
    model = RewardModel(load_model(str(model_dir)))
    randomize(model.head, seed=3)
    return model


@pytest.fixture(scope="module")
def nano():
    """A reward model with scores of mean 4 and variance 5."""
    model = RewardModel(load_model("reel-nano"), seed=3)
    model.set_normalization(torch.tensor([1.0, 3.0, 5.0, 7.0]))
    return model.requires_grad_(False)


def test_score_is_dot_product_with_final_normalized_residual(model):
    _, cache = model.base_model.run_with_cache(TOKENS)
    each = (cache["ln_final.hook_normalized"] * model.head.weight[0]).sum(-1)
    torch.testing.assert_close(model.token_scores(TOKENS), each, atol=1e-5, rtol=0)
    torch.testing.assert_close(model(TOKENS), each[:, -1], atol=1e-5, rtol=0)
    model(TOKENS).sum().backward()
    assert model.head.weight.grad.abs().max() > 0
    assert model.base_model.embed.W_E.grad.abs().max() > 0
    assert model.base_model.unembed.W_U.grad is None


@pytest.mark.slow
@pytest.mark.parametrize("filler", [0, 17])
def test_padded_rows_score_as_alone_on_either_side(model, filler):
    f = filler
    tokens = torch.tensor([[f, f, 4, 9], [4, 9, f, f], [f, 4, 9, f], [4, 9, 13, 7]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 1, 1]]).bool()
    alone = torch.cat([model(torch.tensor([[4, 9]])).expand(3), model(tokens[3:])])
    torch.testing.assert_close(model(tokens, mask), alone, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="attention_mask has a row without a real token"):
        model(tokens, mask & torch.tensor([[True], [False], [True], [True]]))


def test_texts_get_bos_and_eos_and_are_cut_to_the_context(nano):
    """BOS is 0 and EOS is 1 in Reel, whose context is 32."""
    tokens, mask = nano.encode(["this movie", "this", "the " * 40])
    assert tokens.shape == (3, 32) and mask.sum(1).tolist() == [4, 3, 32]
    assert tokens[0, :4].tolist() == [0, 2, 8, 1] and tokens[1, :3].tolist() == [0, 2, 1]
    assert tokens[2, -1] == 1
    with pytest.raises(ConfigError, match="zebra"):
        nano.encode(["this zebra"])


def test_normalization_matches_hand_computed(model):
    """Scores 1, 3, 5, 7: mean 4, variance (9 + 1 + 1 + 9) / 4 = 5. Equal scores: no nan."""
    model.set_normalization(torch.tensor([1.0, 3.0, 5.0, 7.0]))
    normalized = model.normalize(torch.tensor([4.0, 9.0]))
    torch.testing.assert_close(normalized, torch.tensor([0.0, 5 / 5**0.5]))
    model.set_normalization(torch.full((4,), 2.5))
    assert model.normalize(torch.tensor([2.5])).tolist() == [0.0]


def test_reward_is_normalized_score_in_any_batch(nano):
    texts = reel_pairs(6, 0).chosen
    alone = [(nano(*nano.encode([text])).item() - 4) / 5**0.5 for text in texts]
    for batch_size in (1, 4, 128):
        rewards = LearnedReward(nano, batch_size=batch_size)(texts)
        assert rewards.tolist() == pytest.approx(alone, abs=1e-5)
    assert LearnedReward(nano)([]).shape == (0,)


@pytest.mark.slow
def test_saved_model_is_restored_bitwise_and_rewards_a_run(nano, tmp_path):
    texts = reel_pairs(8, 5).chosen
    nano.save(tmp_path / "rm", "reel-nano", {"accuracy": 0.5})
    fields = dict(reward_fn="learned", reward_model=str(tmp_path / "rm"), batch_size=8)
    args = RLHFArgs(preset="reel", device="cpu", **fields)  # where `nano` is: bitwise
    reward = load_reward(args)
    assert torch.equal(score_texts(reward, texts), LearnedReward(nano)(texts))
    assert reward.model.std != 1 and not reward.model.head.weight.requires_grad
    assert json.loads((tmp_path / "rm" / "reward_model.json").read_text()) == {"accuracy": 0.5}
    rollout = RLHFTrainer(args, out=tmp_path / "run").rollout_phase()
    assert torch.equal(rollout.raw_rewards, score_texts(reward, rollout.texts))


def test_unfit_directories_raise(nano, gpt2_dir, tmp_path):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(LoadError, match="already exists"):
        nano.save(tmp_path, "reel-nano", {})
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    for place in (gpt2_dir, tmp_path / "nowhere"):
        with pytest.raises(LoadError, match=f"is not a reward.*{place}/.*train-reward"):
            LearnedReward(str(place))
    nano.save(tmp_path / "rm", "reel-nano", {})
    (tmp_path / "rm" / "reward_model.json").unlink()
    path = tmp_path / "rm" / "reward_head.safetensors"
    head = {name: x.clone() for name, x in load_file(path).items()}
    save_file(head, path)
    assert torch.equal(LearnedReward(tmp_path / "rm").model.mean, nano.mean)
    for changed in ({"mean": None}, {"std": torch.tensor(0.0)}):
        save_file({name: x for name, x in (head | changed).items() if x is not None}, path)
        with pytest.raises(LoadError, match="reward_head.safetensors"):
            LearnedReward(tmp_path / "rm")
    path.write_bytes(b"nothing")
    with pytest.raises(LoadError, match="is corrupt"):
        LearnedReward(tmp_path / "rm")
