"""Reference reset: when it happens, what the KLs are from, what is stored, and what probes see."""

import pytest
from safetensors.torch import load_file

from rlhf_lab.models import compare_with_reference
from rlhf_lab.probes import Check, Probe, Record, attach
from rlhf_lab.training import RLHFTrainer
from tests.training.recorded_runs import (
    RESETS,
    assert_same_run,
    copy_weights,
    is_equal,
    train_partly,
)

pytestmark = pytest.mark.slow
SITE = "blocks.0.hook_resid_post"


def kl_from(policy, reference, samples):
    kl = compare_with_reference(policy, reference, samples, 1.0, 8).kl
    return (kl * samples.mask).sum(1).mean().item()


def test_reference_is_reset_and_kls_are_from_both(make_trainer):
    """Every 2 of 5 phases. The KL to the start is from the first reference."""
    trainer, seen, gaps = make_trainer(**RESETS), [], []
    first = trainer.reference

    class Gap(Probe):
        name, text, events, sites = "gap", "eval", ("after_rollout",), (SITE,)

        def observe(self, obs):
            gaps.append((obs.acts[SITE] - obs.reference_acts[SITE]).abs().max().item())
            return Record({"gap": gaps[-1]}, {}, [Check.at_most("none", 0, 0)])

    attach(trainer, Gap(), eval_text=["this movie", "the film"])

    @trainer.on("after_score")
    def note(ctx):
        same = is_equal(copy_weights(ctx.policy.base_model), copy_weights(ctx.reference))
        kls = [kl_from(ctx.policy, r, ctx.rollout.samples) for r in (ctx.reference, first)]
        seen.append((ctx.reference is first, same, *kls))

    reports = trainer.train()
    starts = [(True, True), (True, False), (False, True), (False, False), (False, True)]
    assert [row[:2] for row in seen[:5]] == starts
    assert [gap == 0 for gap in gaps] == [same for _, same in starts]
    assert [report.reference_phase for report in reports] == [0, 0, 2, 2, 4]
    assert trainer.first_reference is first and trainer.reference is not first
    assert not any(weight.requires_grad for weight in trainer.reference.parameters())
    for report, (_, _, newest, start) in zip(reports, seen, strict=True):
        assert report.kl_per_sequence == pytest.approx(newest, abs=1e-5)
        assert report.kl_to_initial_per_sequence == pytest.approx(start, abs=1e-5)
    assert reports[2].kl_per_sequence == pytest.approx(0.0, abs=1e-5)
    assert reports[2].kl_to_initial_per_sequence > 0.001
    assert reports[1].kl_to_initial_per_sequence == reports[1].kl_per_sequence
    final = trainer.run.read_info()["final"]
    assert final["kl_to_initial_per_sequence"] > final["kl_per_sequence"] > 0
    assert trainer.evaluate() == final


@pytest.mark.filterwarnings("error:.*has changed since the run started")
@pytest.mark.parametrize("stop", [1, 2])
def test_run_stopped_at_a_reset_resumes_bitwise(make_trainer, runs, stop):
    """test_resume.py stops between two resets."""
    resumed = RLHFTrainer.resume(train_partly(make_trainer(**RESETS), stop))
    resumed.train()
    assert_same_run(resumed.run.path, runs("resets").path)
    assert resumed.run.read_info()["reference_phase"] == 4


def test_run_without_resets_stores_and_logs_none(runs):
    trainer = runs("plain").trainer
    names = load_file(trainer.run.checkpoints / "last.safetensors")
    assert not any(name.startswith("reference.") for name in names)
    assert trainer.reference is trainer.first_reference
    line = trainer.run.read("metrics.jsonl")[-1]
    assert line["reference_phase"] is None and line["kl_to_initial_per_sequence"] is None


def test_adapters_share_frozen_weights_with_the_reference(runs):
    trainer = runs("resets, adapters").trainer
    policy = dict(trainer.policy.base_model.named_parameters())
    for name, weight in trainer.reference.named_parameters():
        assert (weight.data_ptr() == policy[name].data_ptr()) != policy[name].requires_grad, name
    saved = load_file(trainer.run.checkpoints / "last.safetensors")
    assert any(name.startswith("reference.") for name in saved)
