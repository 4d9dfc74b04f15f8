"""Models of a run: a reference that is reset, adapters, and critics."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2LMHeadModel

from rlhf_lab.errors import ConfigError
from rlhf_lab.models import (
    TransformerWithValueHead,
    compare_with_reference,
    load_model,
    lora_layers,
)
from rlhf_lab.models.load import load_pretrained_model, load_pretrained_tokenizer
from rlhf_lab.rewards import RewardModel, add_critic_from_reward_model
from rlhf_lab.sampling import SamplingSpec, sample
from rlhf_lab.training.checkpoint import load_checkpoint, load_weights
from rlhf_lab.training.resume import load_policy
from tests.small_runs import DEVICE
from tests.training.recorded_runs import copy_weights, is_equal

pytestmark = pytest.mark.slow


def kl_from(policy, reference, samples):
    kl = compare_with_reference(policy, reference, samples, 1.0, 8).kl
    return (kl * samples.mask).sum(1).mean().item()


def test_kls_are_from_the_newest_and_the_first_reference(runs):
    run = runs("resets")
    trainer, policy = run.trainer, TransformerWithValueHead(load_model("reel-nano"))
    newest, first, file = load_model("reel-nano"), load_model("reel-nano"), Path()
    for report, reset in zip(run.reports, (0, 0, 2, 2, 4), strict=True):
        assert report.reference_phase == reset
        load_weights(policy, run.weights[report.phase], file)
        load_weights(newest, run.weights[reset], file, "base_model.")
        samples = run.rollouts[report.phase].samples
        for reference, kl in (
            (newest, report.kl_per_sequence),
            (first, report.kl_to_initial_per_sequence),
        ):
            assert kl == pytest.approx(kl_from(policy, reference, samples), abs=1e-5)
    assert is_equal(copy_weights(trainer.first_reference), copy_weights(first))
    assert is_equal(copy_weights(trainer.reference), copy_weights(newest))
    assert not any(weight.requires_grad for weight in trainer.reference.parameters())
    assert run.reports[2].kl_per_sequence == pytest.approx(0.0, abs=1e-5)
    assert run.reports[2].kl_to_initial_per_sequence > 0.001
    final = trainer.run.read_info()["final"]
    kls = [kl_from(trainer.policy, first, each.samples) for each in trainer.fresh_rollouts()]
    assert final["kl_to_initial_per_sequence"] == pytest.approx(sum(kls) / len(kls), abs=1e-5)
    assert trainer.evaluate() == final


def test_adapters_share_frozen_weights_with_the_reference(runs):
    trainer = runs("resets, adapters").trainer
    policy = dict(trainer.policy.base_model.named_parameters())
    for name, weight in trainer.reference.named_parameters():
        assert (weight.data_ptr() == policy[name].data_ptr()) != policy[name].requires_grad, name
    saved = load_file(trainer.run.checkpoints / "last.safetensors")
    assert any(name.startswith("reference.") for name in saved)


TOKENS = torch.randint(72, (4, 20), generator=torch.Generator().manual_seed(0))
KINDS = ("adapters", "unequal prompts, drawn lengths", "critic", "adapters, critic")
KINDS += ("critic from a reward model", "bf16", "bf16_stochastic")


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_learns_saves_and_loads_its_weights(runs, kind):
    run = runs(kind)
    policy, args = run.trainer.policy, run.trainer.args
    assert run.reports[0].kl_per_sequence == 0 < run.reports[-1].kl_per_sequence
    for report in run.reports:
        assert abs(report.ratio_first_minibatch - 1) <= (0.1 if "bf16" in kind else 1e-4)
    trainable = {n for n, p in policy.named_parameters() if p.requires_grad}
    saved, _ = load_checkpoint(run.trainer.run.checkpoints / "last.safetensors")
    assert {name for name in saved if not name.startswith("optimizer.")} == trainable
    of_base = [name for name in trainable if name.startswith("base_model")]
    assert not args.lora_rank or all(name.endswith((".A", ".B")) for name in of_base)
    moved = {n for n, w in run.weights[-1].items() if not torch.equal(w, run.weights[0][n])}
    assert moved <= trainable
    parts = {"base_model", "value_head"} | ({"critic"} if args.value_head == "separate" else set())
    assert {name.split(".")[0] for name in moved} == parts
    assert all(layer.merged is None for layer in lora_layers(policy).values())
    loaded = load_policy(run.path)[0].to(DEVICE)
    assert is_equal(copy_weights(loaded), run.weights[-1])
    assert all(torch.equal(a, b) for a, b in zip(loaded(TOKENS), policy(TOKENS), strict=True))


def test_first_values_of_a_critic_are_scores_of_the_text_so_far(make_trainer, reward_dir):
    """The reward model's scores have mean 0.5 and standard deviation 2 before it normalizes."""
    model = RewardModel.load(reward_dir, DEVICE)
    trainer = make_trainer(value_head="separate", critic_path=str(reward_dir))
    samples = trainer.rollout_phase().samples
    with torch.no_grad():
        scores = model.token_scores(samples.tokens)[:, samples.prefix_len - 1 : -1]
    assert scores.std() > 0.1
    torch.testing.assert_close(samples.values, (scores - 0.5) / 2, atol=1e-5, rtol=1e-5)


def test_critic_may_have_other_layers_but_not_other_tokens(reward_dir):
    """The policy has 1 layer, the reward model 2."""
    directory = str(reward_dir)
    hf_model = load_pretrained_model(GPT2LMHeadModel, "reel-nano", "language model")
    hf_model.transformer.h, hf_model.config.n_layer = hf_model.transformer.h[:1], 1
    base = load_model(hf_model, load_pretrained_tokenizer("reel-nano"))
    policy = add_critic_from_reward_model(TransformerWithValueHead(base), directory)
    samples = sample(policy, [[4, 9], [7]], SamplingSpec(5), torch.Generator().manual_seed(0))
    values = policy(samples.tokens, samples.attention_mask)[1][:, 1:-1]
    torch.testing.assert_close(samples.values, values.detach(), atol=1e-4, rtol=0)
    base.tokenizer.add_tokens(["zebra"])
    with pytest.raises(ConfigError, match="critic_path=.*has other tokens than the policy"):
        add_critic_from_reward_model(policy, directory)
