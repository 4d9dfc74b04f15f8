"""Runs with adapters or with a critic: what they keep equal, what they save, how they resume."""

import pytest
import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.models import adapters_off, load_model, lora_layers
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.checkpoint import load_checkpoint
from rlhf_lab.training.restore import load_policy

TOKENS = torch.randint(72, (4, 20), generator=torch.Generator().manual_seed(0))
KINDS = {
    "adapters": {"lora_rank": 2, "lora_targets": "W_Q,W_V,W_O,W_in"},
    "detached": {"value_head": "detached"},
    "critic": {"value_head": "separate"},
    "adapters and critic": {"lora_rank": 2, "value_head": "separate"},
}


def trainer(out, **changes):
    small = {"total_phases": 3, "warmup_steps": 0, "batch_size": 4, "num_minibatches": 2}
    small |= {"gen_len": 6, "device": "cpu", "base_lr": 1e-2}
    return RLHFTrainer(RLHFArgs(preset="reel", **(small | changes)), out=out)


@pytest.fixture(scope="module", params=KINDS)
def run(request, tmp_path_factory):
    """Three phases of each kind: the trainer and its reports."""
    trained = trainer(tmp_path_factory.mktemp("run") / "run", **KINDS[request.param])
    return trained, trained.train()


@pytest.mark.slow
def test_a_run_starts_on_policy_at_no_distance_from_the_reference(run):
    _, reports = run
    assert reports[0].kl_per_sequence == 0
    for report in reports:
        assert report.ratio_first_minibatch == pytest.approx(1, abs=1e-4)
    assert reports[-1].kl_per_sequence > 0


@pytest.mark.slow
def test_what_was_frozen_is_as_it_was_loaded(run):
    trained, _ = run
    if not trained.args.lora_rank:
        pytest.skip("everything is trained in this kind")
    base = load_model("reel-nano")
    model = trained.policy.base_model
    assert torch.equal(trained.reference(TOKENS), base(TOKENS))
    with adapters_off(model):
        assert torch.equal(model(TOKENS), base(TOKENS))
    assert (model(TOKENS) - base(TOKENS)).abs().max() > 1e-3
    own = {p.data_ptr() for p in trained.policy.parameters()}
    assert all(p.data_ptr() in own for p in trained.reference.parameters())


@pytest.mark.slow
def test_a_checkpoint_holds_what_was_trained_and_nothing_else(run):
    trained, _ = run
    saved, _ = load_checkpoint(trained.run.checkpoints / "phase_000002.safetensors")
    trainable = {n for n, p in trained.policy.named_parameters() if p.requires_grad}
    assert saved.keys() == trainable
    if trained.args.lora_rank:
        assert all(name.endswith((".A", ".B")) or "value_head" in name for name in saved)


@pytest.mark.slow
def test_a_saved_policy_comes_back_bit_for_bit(run):
    trained, _ = run
    policy, _ = load_policy(trained.run.path)
    for found, expected in zip(policy(TOKENS), trained.policy(TOKENS), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.slow
def test_every_part_that_should_learn_has_learned(run):
    trained, _ = run
    start, _ = load_policy(trained.run.path, 0)
    before = dict(start.named_parameters())
    moved = {
        name
        for name, weight in trained.policy.named_parameters()
        if not torch.equal(weight, before[name])
    }
    assert any(name.startswith("base_model") for name in moved)
    assert any(name.startswith("value_head") for name in moved)
    separate = trained.args.value_head == "separate"
    assert any(name.startswith("critic") for name in moved) == separate
    assert all(layer.merged is None for layer in lora_layers(trained.policy).values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adapters", "critic"])
def test_a_run_that_was_broken_off_ends_as_if_it_had_not_been(kind, tmp_path):
    whole, broken = (trainer(tmp_path / name, **KINDS[kind]) for name in ("whole", "broken"))
    whole.train()
    broken.run_phase()
    resumed = RLHFTrainer.resume(tmp_path / "broken")
    resumed.train()
    for (name, one), (_, other) in zip(
        whole.policy.named_parameters(), resumed.policy.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name


@pytest.mark.slow
def test_the_value_loss_of_a_detached_head_leaves_the_transformer_alone(tmp_path):
    """Two runs that differ in nothing but the weight of the value loss."""
    one_step = {"total_phases": 1, "batches_per_learning_phase": 1, "num_minibatches": 1}
    one_step |= {"max_grad_norm": 1e9, "value_head": "detached"}
    light, heavy = (trainer(tmp_path / str(vf), vf_coef=vf, **one_step) for vf in (0.1, 10.0))
    for one in (light, heavy):
        one.run_phase()
    for (name, a), (_, b) in zip(
        light.policy.base_model.named_parameters(),
        heavy.policy.base_model.named_parameters(),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-7, rtol=0, msg=name)
    assert not torch.equal(light.policy.value_head[0].weight, heavy.policy.value_head[0].weight)
