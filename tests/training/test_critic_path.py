"""A critic that begins as a reward model: its first values, its learning, and what does not fit."""

import copy

import pytest
import torch

from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.models import TransformerWithValueHead, export_policy, load_model
from rlhf_lab.models.export import load_value_head
from rlhf_lab.models.hooked_model import make_model
from rlhf_lab.rewards import RewardModel, add_critic_from_reward_model
from rlhf_lab.training.restore import load_policy


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory) -> tuple[RewardModel, str]:
    """A reward model with scores of mean 0.5 and standard deviation 2 before it normalises them."""
    model = RewardModel(load_model("reel-nano"), seed=3)
    model.set_normalization(torch.tensor([-1.5, 2.5]))
    directory = tmp_path_factory.mktemp("reward") / "model"
    model.save(directory, "reel-nano", {})
    return model, str(directory)


@pytest.mark.slow
def test_the_first_values_are_what_the_reward_model_gives_the_text_so_far(
    make_trainer, reward_model
):
    model, directory = reward_model
    trainer = make_trainer(value_head="separate", critic_path=directory)
    samples = trainer.rollout_phase().samples
    with torch.no_grad():
        scores = model.token_scores(samples.tokens)[:, samples.prefix_len - 1 : -1]
    assert scores.std() > 0.1
    torch.testing.assert_close(samples.values, (scores - 0.5) / 2, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_critic_and_head_learn_and_a_resumed_run_goes_on_with_them(
    make_trainer, reward_model, parameters_of, broken_off_and_resumed
):
    _, directory = reward_model
    fields = {"value_head": "separate", "critic_path": directory, "total_phases": 3}
    whole, halved = make_trainer(**fields), make_trainer(**fields)
    before = parameters_of(whole.policy)
    whole.train()
    resumed = broken_off_and_resumed(halved)
    theirs, ours = parameters_of(whole.policy), parameters_of(resumed.policy)
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert not torch.equal(theirs["critic.blocks.0.mlp.W_in"], before["critic.blocks.0.mlp.W_in"])
    assert not torch.equal(theirs["value_head.weight"], before["value_head.weight"])
    loaded = parameters_of(load_policy(halved.run.path)[0])
    assert all(torch.equal(loaded[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_an_exported_head_of_one_layer_comes_back(make_trainer, reward_model, tmp_path):
    policy = make_trainer(value_head="separate", critic_path=reward_model[1]).policy
    export_policy(policy, "reel-nano", tmp_path / "exported")
    head = load_value_head(tmp_path / "exported")
    assert torch.equal(head.weight, policy.value_head.weight)
    assert torch.equal(head.bias, policy.value_head.bias)


def test_a_critic_needs_to_be_separate(reel_args, reward_model):
    with pytest.raises(ConfigError, match="critic_path=.*value_head='shared'. Set value_head="):
        reel_args(critic_path=reward_model[1])


def test_a_directory_without_a_reward_model_is_refused(make_trainer, tmp_path):
    with pytest.raises(LoadError, match="is not a reward model.*train-reward"):
        make_trainer(value_head="separate", critic_path=str(tmp_path))


def policy_of(n_layers: int, more_tokens: tuple[str, ...] = ()) -> TransformerWithValueHead:
    tokenizer = copy.deepcopy(load_model("reel-nano").tokenizer)
    tokenizer.add_tokens(list(more_tokens))
    sizes = {"d_model": 8, "d_head": 4, "n_ctx": 32, "d_vocab": 80, "act_fn": "gelu", "seed": 0}
    return TransformerWithValueHead(make_model(tokenizer, n_layers=n_layers, **sizes))


@pytest.mark.slow
def test_a_reward_model_that_does_not_fit_the_policy_is_refused(reward_model):
    """Reel's has 2 layers and 72 tokens; its width may differ from the policy's."""
    _, directory = reward_model
    assert add_critic_from_reward_model(policy_of(2), directory).critic.cfg.d_model == 64
    with pytest.raises(ConfigError, match="critic_path=.*has 2 layers and the policy 3.* train"):
        add_critic_from_reward_model(policy_of(3), directory)
    with pytest.raises(ConfigError, match="critic_path=.*reads other tokens than the policy"):
        add_critic_from_reward_model(policy_of(2, ("zebra",)), directory)
