"""Reference reset: when it happens, what the KLs are from, what is stored, and what probes see."""

import json

import pytest
import torch
from safetensors.torch import load_file

from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.models import compare_with_reference
from rlhf_lab.training import RLHFTrainer

EVERY_2 = {"reset_reference_every": 2, "total_phases": 5, "base_lr": 3e-3}
KINDS = {
    "all weights": {},
    "adapters": {"lora_rank": 2, "base_lr": 1e-2},
    "bf16 weights": {"weight_precision": "bf16"},
    "a separate critic": {"value_head": "separate"},
}


def weights_of(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def kl_from(trainer, reference, samples):
    """The KL per sequence, from the definition: the sum of both models' log-softmaxes."""
    kl = compare_with_reference(trainer.policy, reference, samples, 1.0, 8).kl
    return (kl * samples.mask).sum(1).mean().item()


def test_the_reference_becomes_the_policy_after_every_so_many_phases(make_trainer):
    trainer = make_trainer(**EVERY_2)
    first, seen = trainer.reference, []

    @trainer.on("after_rollout")
    def note(ctx):
        policy, reference = (weights_of(m) for m in (ctx.policy.base_model, ctx.reference))
        same = all(torch.equal(policy[name], reference[name]) for name in reference)
        seen.append((ctx.phase, ctx.reference is first, same))

    reports = trainer.train()
    starts = [(0, True, True), (1, True, False), (2, False, True), (3, False, False)]
    assert seen[:5] == [*starts, (4, False, True)]
    assert [report.reference_phase for report in reports] == [0, 0, 2, 2, 4]
    assert trainer.first_reference is first and trainer.reference is not first
    assert not any(weight.requires_grad for weight in trainer.reference.parameters())


def test_the_kl_is_from_the_newest_reference_and_that_to_the_start_from_the_first(make_trainer):
    trainer = make_trainer(**EVERY_2)
    found = []

    @trainer.on("after_score")
    def note(ctx):
        samples = ctx.rollout.samples
        found.append([kl_from(trainer, r, samples) for r in (ctx.reference, first)])

    first = trainer.first_reference
    reports = trainer.train()
    for report, (newest, start) in zip(reports, found, strict=False):
        assert report.kl_per_sequence == pytest.approx(newest, abs=1e-5)
        assert report.kl_to_initial_per_sequence == pytest.approx(start, abs=1e-5)
    at_reset, before = reports[2], reports[1]
    assert at_reset.kl_per_sequence == pytest.approx(0.0, abs=1e-5)
    assert at_reset.kl_to_initial_per_sequence > 0.001
    assert before.kl_to_initial_per_sequence == before.kl_per_sequence
    final = trainer.run.read_info()["final"]
    assert final["kl_to_initial_per_sequence"] > final["kl_per_sequence"] > 0
    assert trainer.evaluate() == final


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_a_resumed_run_ends_with_the_same_numbers_and_weights(
    make_trainer, metrics_of, parameters_of, kind
):
    """Stopped between two resets, where the reference is neither the first nor the policy."""
    fields = EVERY_2 | KINDS[kind]
    whole, halved = make_trainer(**fields), make_trainer(**fields)
    whole.train()
    for report in halved:
        if report.phase == 2:
            halved.request_stop()
    saved = load_file(halved.run.checkpoints / "last.safetensors")
    assert any(name.startswith("reference.") for name in saved)
    resumed = RLHFTrainer.resume(halved.run.path)
    assert resumed.reference_phase == 2
    kept, new = (weights_of(trainer.reference) for trainer in (halved, resumed))
    assert kept.keys() == new.keys() and all(torch.equal(kept[k], new[k]) for k in kept)
    resumed.train()
    assert metrics_of(whole.run.path) == metrics_of(resumed.run.path)
    a, b = parameters_of(whole.policy), parameters_of(resumed.policy)
    assert all(torch.equal(a[name], b[name]) for name in a)
    finals = [t.run.read_info()["final"] for t in (whole, resumed)]
    assert finals[0] == finals[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("error:.*has changed since the run started")
def test_a_run_that_was_stopped_before_or_at_a_reset_is_resumed_to_the_same_end(
    make_trainer, metrics_of
):
    whole = make_trainer(**EVERY_2)
    whole.train()
    for stop in (0, 1, 3):
        halved = make_trainer(**EVERY_2)
        for report in halved:
            if report.phase == stop:
                halved.request_stop()
        resumed = RLHFTrainer.resume(halved.run.path)
        resumed.train()
        assert metrics_of(whole.run.path) == metrics_of(resumed.run.path), stop
        assert resumed.run.read_info()["reference_phase"] == 4


def test_a_checkpoint_without_its_reference_is_refused(make_trainer, monkeypatch):
    trainer = make_trainer(**EVERY_2)
    monkeypatch.setattr("rlhf_lab.training.recorder.reference_tensors", lambda trainer: {})
    for report in trainer:
        if report.phase == 2:
            trainer.request_stop()
    with pytest.raises(RunError, match="another model: 'reference.* is missing"):
        RLHFTrainer.resume(trainer.run.path)


def test_without_resets_nothing_is_kept_or_logged(make_trainer):
    trainer = make_trainer()
    trainer.train()
    names = load_file(trainer.run.checkpoints / "last.safetensors")
    assert not any(name.startswith("reference.") for name in names)
    assert trainer.reference is trainer.first_reference
    line = trainer.run.read("metrics.jsonl")[-1]
    assert line["reference_phase"] is None and line["kl_to_initial_per_sequence"] is None
    assert "kl_to_initial_per_sequence" not in trainer.run.read_info()["final"]


def test_adapters_share_the_frozen_weights_with_every_reference(make_trainer):
    trainer = make_trainer(**(EVERY_2 | KINDS["adapters"]))
    for report in trainer:
        if report.phase == 2:
            break
    policy = dict(trainer.policy.base_model.named_parameters())
    for name, weight in trainer.reference.named_parameters():
        assert (weight.data_ptr() == policy[name].data_ptr()) != policy[name].requires_grad, name


def test_probes_read_the_new_reference(make_trainer):
    """The reference's activations on the eval text are captured anew after a reset."""
    from rlhf_lab.probes import Check, Probe, Record, attach

    gaps = {}

    class Gap(Probe):
        name = "gap"
        text = "eval"
        sites = ("blocks.0.hook_resid_post",)
        events = ("after_rollout",)

        def observe(self, seen):
            (site,) = self.sites
            gap = (seen.acts[site] - seen.reference_acts[site]).abs().max().item()
            gaps[seen.ctx.phase] = gap
            return Record({"gap": gap}, {}, [Check.at_most("none", 0, 0)])

    trainer = make_trainer(**EVERY_2)
    attach(trainer, Gap(), eval_text=["this movie", "the film"])
    trainer.train()
    assert [gap == 0 for gap in gaps.values()] == [True, False, True, False, True]


@pytest.mark.parametrize("every", [5, 9])
def test_a_reset_that_no_phase_would_see_is_refused(make_trainer, every):
    with pytest.raises(ConfigError, match=f"reset_reference_every={every} must be smaller"):
        make_trainer(total_phases=5, reset_reference_every=every)


@pytest.mark.process
def test_through_the_door_of_the_command_line(warm_python, tmp_path):
    """A killed run that a process goes on with has the metrics of one that was not stopped."""
    small = "--batch-size 8 --gen-len 6 --warmup-steps 1 --num-minibatches 2 --total-phases 4"
    few = [*small.split(), "--reset-reference-every", "2"]
    done = warm_python.run(["-m", "rlhf_lab", "train", *few, "--out", str(tmp_path / "run")])
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["reference_phase"] for line in lines] == [0, 0, 2, 2]
    more = ["resume", str(tmp_path / "run"), "--total-phases", "5"]
    done = warm_python.run(["-m", "rlhf_lab", *more])
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["reference_phase"] == 4
    assert "warning" not in done.stderr, done.stderr
