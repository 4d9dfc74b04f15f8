"""Training that does nothing is reported: rates of adapters, rounding, unreached weights."""

import warnings

import pytest
import torch
from torch.optim import AdamW

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.rewards import load_policy_and_critic


@pytest.mark.parametrize(("preset", "rate"), [("reel", 1e-3), ("smol", 3e-4), ("gpt2-small", 3e-4)])
def test_adapters_get_a_higher_learning_rate(preset, rate):
    assert RLHFArgs(preset=preset, lora_rank=4).base_lr == rate
    assert RLHFArgs(preset=preset, adapter_path="some/adapter").base_lr == rate
    assert RLHFArgs(preset=preset, lora_rank=4, base_lr=2e-5).base_lr == 2e-5
    assert RLHFArgs(preset=preset).base_lr < rate


@pytest.mark.slow
def test_policy_that_hardly_moves_is_reported(make_trainer):
    """As SmolLM2's adapters at the rate of all weights: a KL of 0.001 after 6 phases."""
    settings = {"total_phases": 6, "num_minibatches": 1}
    trainer = make_trainer(base_lr=1e-7, **settings)
    trainer.train()
    found = trainer.run.read_info()["diagnostics"]["unmoved"]
    assert found["phase"] == 4 and "the policy has hardly moved; raise base_lr" in found["text"]
    moving = make_trainer(base_lr=1e-3, **settings)
    moving.train()
    assert "unmoved" not in moving.run.read_info()["diagnostics"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_with_plain_steps_warn(make_trainer, reel_args, dtype):
    policy = load_policy_and_critic(reel_args(), torch.device("cpu")).to(dtype)
    with pytest.warns(UserWarning, match=f"weights are in {dtype}.*too small to change them"):
        make_trainer({"policy": policy})


def test_optimizer_without_the_value_head_warns(make_trainer, reel_args):
    policy = load_policy_and_critic(reel_args(), torch.device("cpu"))
    parts = {"policy": policy, "optimizer": AdamW(policy.base_model.parameters(), lr=1e-4)}
    with pytest.warns(UserWarning, match="no parameter of policy.value_head"):
        make_trainer(parts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_trainer(parts, vf_coef=0.0)
        make_trainer({"policy": policy, "optimizer": AdamW(policy.parameters(), lr=1e-4)})


def test_prompt_with_tokens_beyond_the_model_raises(make_trainer, reel_args):
    policy = load_policy_and_critic(reel_args(), torch.device("cpu"))
    policy.base_model.tokenizer.add_tokens(["popcornish"])
    with pytest.raises(ConfigError, match="unknown token .*Use the model's tokenizer"):
        make_trainer({"policy": policy, "prompts": ["this movie popcornish"]})


@pytest.mark.slow
def test_autocast_around_training_raises(make_trainer):
    """Its precision would be in no setting, and the weights would differ."""
    trainer = make_trainer()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(ConfigError, match="Train outside of it, with precision='bf16'"):
            trainer.train()
    trainer.train()


def test_prefix_next_to_prompts_warns(make_trainer):
    with pytest.warns(UserWarning, match="prefix='the film' is ignored, since prompts are set"):
        make_trainer({"prompts": ["this movie"]}, prefix="the film")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_trainer({"prompts": ["this movie was"]})


@pytest.mark.slow
def test_detaching_intervention_is_reported_once(make_trainer):
    trainer = make_trainer()
    trainer.intervene("blocks.1.hook_resid_pre", lambda x, where: x.detach())
    with pytest.warns(UserWarning, match="trained weights get no gradient, such as base_model"):
        trainer.run_phase()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.run_phase()
