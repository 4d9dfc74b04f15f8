from dataclasses import replace

import pytest
import torch

from rlhf_lab.probes import RunHealth, StepLedger, attach
from rlhf_lab.probes.probe import Observation
from rlhf_lab.training import Context
from tests.probes.looking import train_soundly

ADAPTIVE = {"kl_controller": "adaptive", "kl_target": 0.01, "kl_horizon": 10}
TERMS = ("objective", "clipped_surrogate", "value_loss", "entropy_bonus", "kl_penalty")


def run_with_ledger(trainer, **options):
    """The run read back, and what the trainer computed at each step: `[phase][step] -> terms`."""
    attach(trainer, StepLedger(**options))
    seen = {}
    trainer.on("after_loss")(
        lambda ctx: seen.setdefault(ctx.phase, []).append((ctx.terms, ctx.kl_coef))
    )
    return train_soundly(trainer), seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "step, number, fields",
    [
        ("first", 0, {}),
        ("last", 3, {}),
        ("last", 3, {"policy_loss": "gspo", "loss_aggregation": "sequence_mean"}),
        ("last", 3, {"kl_in": "reward", "dual_clip": 3.0, "loss_aggregation": "constant"}),
        ("last", 3, {"max_log_ratio": 0.01, "clip_coef_high": 0.3, "vf_clip": 0.01} | ADAPTIVE),
    ],
)
def test_the_terms_and_the_shares_are_those_of_the_step(make_trainer, step, number, fields):
    """Two minibatches, two passes: steps 0 to 3."""
    trainer = make_trainer(total_phases=3, ent_coef=0.02, base_lr=3e-3, **fields)
    attach(trainer, RunHealth())
    run, seen = run_with_ledger(trainer, step=step, every=2)
    for health, line in zip(run.records("run_health"), run.metrics(), strict=True):
        expected = line["kl_coef"] * health["advantage_std"] * health["reward_std"]
        assert health["beta_eff"] == pytest.approx(expected)
    records = run.records("step_ledger")
    found = [(r["phase"], r["step"], r["steps"]) for r in records]
    assert found == [(0, number, 4), (2, number, 4)]
    for record in records:
        terms, kl_coef = seen[record["phase"]][number]
        assert record["kl_coef"] == kl_coef
        for name in TERMS:
            assert record[name] == pytest.approx(getattr(terms, name).item(), abs=1e-6), name
        tensors = run.tensors("step_ledger", record["phase"])
        shares = tensors["share"][tensors["mask"]].sum().item()
        assert shares == pytest.approx(terms.objective.item(), abs=1e-5)
        assert record["real_tokens"] == int(tensors["mask"].sum()) == 4 * 6
    assert [check.phase for check in run.checks() if "sum to the objective" in check.name] == [0, 2]


@pytest.mark.slow
def test_ledger_with_custom_penalty_has_the_packages_terms(make_trainer):
    def no_penalty(kl, kl_coef, mask):
        return (kl * 0).sum()

    trainer = make_trainer({"kl_penalty": no_penalty}, base_lr=3e-3, warmup_steps=0)
    run, seen = run_with_ledger(trainer)
    record = run.records("step_ledger")[-1]
    own = seen[1][-1][0]
    assert own.kl_penalty.item() == 0 and record["kl_penalty"] > 1e-4
    expected = own.objective.item() - record["kl_penalty"]
    assert record["objective"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
def test_the_check_fails_when_the_shares_miss_the_objective(make_trainer):
    trainer, found = make_trainer(total_phases=1, warmup_steps=0), []

    @trainer.on("after_loss")
    def look(ctx):
        for miss in (0.0, 0.01):
            terms = replace(ctx.terms, objective=ctx.terms.objective + miss)
            spoilt = Context(**ctx.__dict__ | {"terms": terms})
            seen = Observation(spoilt, ctx.args, 1, [], {}, {}, None, None)
            found.append(StepLedger().observe(seen).checks[0])

    trainer.train()
    assert [check.ok for check in found] == [True, False] * 4
    assert found[1].value == pytest.approx(0.01, abs=1e-4)


@pytest.mark.slow
def test_share_and_clip_of_a_token_match_hand_computed(make_trainer):
    trainer = make_trainer(ent_coef=0.01, clip_coef=0.02, base_lr=3e-3, warmup_steps=0)
    run, seen = run_with_ledger(trainer)
    record, e = run.records("step_ledger")[-1], run.tensors("step_ledger", 1)
    ratio, whitened, mask = e["ratio"], e["whitened"], e["mask"]
    real = e["advantage"][mask].double()
    expected = (e["advantage"].double() - real.mean()) / real.std()
    torch.testing.assert_close(whitened[mask].double(), expected[mask], rtol=1e-4, atol=1e-5)
    outside = ((ratio > 1.02) & (whitened > 0)) | ((ratio < 0.98) & (whitened < 0))
    assert outside.any() and torch.equal(e["clipped"].bool(), outside & mask)
    torch.testing.assert_close(ratio, (e["logprob"] - e["old_logprob"]).exp() * mask)
    surrogate = torch.minimum(ratio * whitened, ratio.clip(0.98, 1.02) * whitened)
    value_loss = trainer.args.vf_coef / 2 * (e["value"] - e["return"]) ** 2
    share = surrogate - value_loss + 0.01 * e["entropy"] - record["kl_coef"] * e["kl"]
    n = record["real_tokens"]
    torch.testing.assert_close(e["share"], share * mask / n, rtol=1e-3, atol=1e-6)
