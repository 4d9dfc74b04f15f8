import math
from html import escape

import pytest
import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.views.ledger import LEDGER_COLUMNS, step_ledger

SMALL = {
    "preset": "reel",
    "reward_fn": "true_reward",
    "total_phases": 2,
    "batch_size": 8,
    "num_minibatches": 2,
    "warmup_steps": 0,
    "base_lr": 3e-3,
    "gen_len": 7,
}


def last_step(path, **overrides):
    """The ledger of a run's last step, made at after_loss, with what the trainer computed."""
    trainer, seen = RLHFTrainer(RLHFArgs(**(SMALL | overrides)), out=path), []

    @trainer.on("after_loss")
    def look(ctx):
        ledger = step_ledger(ctx.policy, ctx.reference, ctx.minibatch, ctx.args)
        seen.append((ledger, ctx.minibatch, ctx.terms))

    trainer.train()
    return seen[-1]


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    return last_step(tmp_path_factory.mktemp("ledger") / "run", ent_coef=0.01, clip_coef=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        {"vf_clip": 0.01, "ent_coef": 0.02, "normalize_advantages": False},
        {"top_k": 5, "temperature": 0.7, "stop_at_eos": True, "gen_len": 26},
    ],
)
def test_shares_add_up_to_the_objective_under_any_settings(tmp_path, overrides):
    ledger, _, terms = last_step(tmp_path / "run", **overrides)
    assert ledger.objective == pytest.approx(terms.objective.item(), abs=1e-5)


@pytest.mark.slow
def test_one_token_s_share_by_hand(step):
    ledger, minibatch, terms = step
    e = {name: column[1, 4].item() for name, column in ledger.entries.items()}
    n = ledger.mask.sum().item()
    ratio = math.exp(terms.logprobs[1, 4].item() - minibatch.logprobs[1, 4].item())
    real = minibatch.advantages[minibatch.mask].double()
    advantage = ((minibatch.advantages[1, 4].double() - real.mean()) / real.std()).item()
    surrogate = min(ratio * advantage, min(max(ratio, 0.98), 1.02) * advantage)
    value_loss = 0.15 / 2 * (terms.values[1, 4] - minibatch.returns[1, 4]).item() ** 2
    expected = (surrogate - value_loss + 0.01 * e["entropy"] - 0.3 * e["kl"]) / n
    assert e["ratio"] == pytest.approx(ratio, rel=1e-4)
    assert e["whitened"] == pytest.approx(advantage, rel=1e-4)
    assert e["share"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
def test_the_clip_is_said_to_bind_exactly_where_it_lowers_the_surrogate(step):
    e = step[0].entries
    outside = ((e["ratio"] > 1.02) & (e["whitened"] > 0)) | (
        (e["ratio"] < 0.98) & (e["whitened"] < 0)
    )
    assert bool(outside.any()) and not bool(outside.all())
    assert torch.equal(e["clipped"].bool(), outside)


def test_table_has_every_real_token_and_the_sum(step):
    ledger = step[0]
    rows = ledger.rows(0)
    assert len(rows) == 7 and all(len(row) == 1 + len(LEDGER_COLUMNS) for row in rows)
    assert [row[0] for row in rows] == [text.strip() for text in ledger.tokens[0][-7:]]
    page = ledger.html(0).fragment
    assert all(f">{escape(row[0])}<" in page for row in rows)
    assert page.count("<tr>") == 8
    assert f"{ledger.objective:.6f}" in page


@pytest.mark.slow
def test_the_coefficient_in_force_is_the_one_that_counts(tmp_path):
    """Ten times the coefficient is ten times the penalty in the sum of the shares."""
    trainer = RLHFTrainer(RLHFArgs(**(SMALL | {"kl_controller": "adaptive"})), out=tmp_path / "run")
    minibatches = []
    trainer.on("before_minibatch")(lambda ctx: minibatches.append(ctx.minibatch))
    trainer.train()
    parts = trainer.policy, trainer.reference, minibatches[-1], trainer.args
    weak, strong = (step_ledger(*parts, kl_coef=coef) for coef in (0.1, 1.0))
    kl = weak.entries["kl"].sum().item() / weak.mask.sum().item()
    assert kl > 1e-4
    assert weak.objective - strong.objective == pytest.approx(0.9 * kl, rel=1e-2)
    with pytest.raises(ConfigError, match="kl_controller='adaptive'.*give kl_coef=ctx.kl_coef"):
        step_ledger(*parts)
