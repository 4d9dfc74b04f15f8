from dataclasses import replace

import pytest
import torch
from torch.optim import AdamW

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import forward, has_hooks, token_stats
from rlhf_lab.probes import StepInfluence, attach
from rlhf_lab.probes.step_influence import (
    AdamSettings,
    adam_step,
    inner,
    left_out_direction,
    row_direction,
    trained_groups,
)
from rlhf_lab.probes.step_ledger import make_shares
from rlhf_lab.training import RLHFTrainer
from tests.probes.looking import train_soundly

SETTINGS = AdamSettings(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.5)


def test_a_first_step_by_hand():
    """At step 1 without moments: the step is lr * sign(g), less lr * wd * theta."""
    one = {"w": torch.tensor([2.0, -4.0])}
    grads = {"w": torch.tensor([0.3, -0.4])}
    zero = {"w": torch.zeros(2)}
    step = adam_step(one, grads, zero, zero, 1, {"w": SETTINGS}, None)
    assert step.kappa == 1 and step.norm == pytest.approx(0.5)
    assert step.delta["w"].tolist() == pytest.approx([0.1 - 0.1, -0.1 + 0.2], abs=1e-6)
    assert step.decay["w"].tolist() == pytest.approx([-0.1, 0.2])
    assert step.momentum["w"].tolist() == [0, 0]
    # no sample decides the size of a first step
    assert step.slope["w"].abs().max() < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("max_norm", [None, 0.05, 100.0])
def test_it_is_torchs_adamw_over_several_steps_clipping_included(max_norm):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    weights = {"a": torch.nn.Parameter(draw(3, 2)), "b": torch.nn.Parameter(draw(4))}
    rates = {"a": 1e-2, "b": 3e-2}
    groups = [{"params": [weights[name]], "lr": lr} for name, lr in rates.items()]
    optimizer = AdamW(groups, maximize=True, weight_decay=0.1, fused=True)
    m0, v0 = ({n: torch.zeros_like(w) for n, w in weights.items()} for _ in range(2))
    settings = {n: AdamSettings(lr, 0.9, 0.999, 1e-8, 0.1) for n, lr in rates.items()}
    for number in range(1, 5):
        grads = {n: draw(*w.shape) for n, w in weights.items()}
        before = {n: w.detach().clone() for n, w in weights.items()}
        step = adam_step(before, grads, m0, v0, number, settings, max_norm)
        for name, weight in weights.items():
            weight.grad = grads[name].clone()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(weights.values(), max_norm)
        optimizer.step()
        for name, weight in weights.items():
            moved = (weight.detach() - before[name]).double()
            assert torch.allclose(step.delta[name], moved, atol=1e-6)
            parts = step.momentum[name] + step.decay[name]
            clipped = step.kappa * grads[name].double()
            parts = parts + (1 - settings[name].beta1) * step.D[name] * clipped
            assert torch.allclose(parts, step.delta[name], atol=1e-12)
        m0 = {n: -optimizer.state[w]["exp_avg"].clone() for n, w in weights.items()}
        v0 = {n: optimizer.state[w]["exp_avg_sq"].clone() for n, w in weights.items()}


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_leaving_out_is_the_derivative_of_the_whole_step(max_norm):
    """<q, g_i> against the step redone with a little less of g_i, clipping included."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda: {n: torch.randn(5, generator=generator).double() for n in "ab"}
    params, grads, m0, own, slope = (draw() for _ in range(5))
    v0 = {n: x.square() for n, x in draw().items()}
    settings = {n: SETTINGS for n in "ab"}
    redo = lambda g: adam_step(params, g, m0, v0, 7, settings, max_norm)
    step = redo(grads)
    assert (step.kappa < 1) == (max_norm is not None)
    q = left_out_direction(step, slope, grads)
    ahead, behind = (redo({n: grads[n] + h * own[n] for n in grads}).delta for h in (1e-6, -1e-6))
    found = sum((slope[n] * (ahead[n] - behind[n])).sum() for n in grads) / 2e-6
    assert inner(q, own) == pytest.approx(found.item(), rel=1e-5)
    p = row_direction(step, slope, settings)
    linear = inner(p, grads) + inner(slope, step.momentum) + inner(slope, step.decay)
    assert linear == pytest.approx(inner(slope, step.delta), rel=1e-12)


def test_groups_of_a_policy_are_a_partition_of_what_is_trained(reel_policy):
    fine, coarse = trained_groups(reel_policy), trained_groups(reel_policy, fine=False)
    weights = dict(reel_policy.named_parameters())
    for groups in (fine, coarse):
        places = [place for parts in groups.parts for place in parts]
        taken = sum(weights[n][... if head is None else head].numel() for n, head in places)
        assert taken == sum(p.numel() for p in reel_policy.base_model.parameters())
    assert "L1H3" in fine.names and "L1 attn" in coarse.names
    assert StepInfluence(fine=False).fine is False


class Truth(StepInfluence):
    """Also redoes the whole step without each sample in turn."""

    def settings(self):
        return super().settings() | {"kind": "StepInfluence"}

    def observe(self, seen):
        record = super().observe(seen)
        before, target = seen.prepared, self.target_of(seen)
        models = seen.ctx.policy, seen.ctx.reference
        shares = make_shares(*models, seen.ctx.minibatch, seen.args, seen.ctx.kl_coef)
        redo = lambda grads: adam_step(*before._replace(grads=grads), seen.args.max_grad_norm)
        at = lambda step: target(
            {n: x.double() + step.delta[n] for n, x in before.params.items()}
        ).item()
        whole, without = at(redo(before.grads)), []
        for row in range(len(seen.ctx.minibatch.mask)):
            of_row = lambda weights, row=row: shares(weights)[:, row].sum()
            own = slope_of_float(of_row, before.params)
            less = {n: g - own.get(n, 0.0) for n, g in before.grads.items()}
            without.append(whole - at(redo(less)))
        tensors = record.tensors | {"without": torch.tensor(without)}
        return replace(record, tensors=tensors)


def slope_of_float(function, params):
    leaves = {n: x.clone().requires_grad_() for n, x in params.items()}
    with torch.enable_grad():
        slopes = torch.autograd.grad(function(leaves), list(leaves.values()), allow_unused=True)
    return {n: slope for n, slope in zip(leaves, slopes, strict=True) if slope is not None}


@pytest.fixture(scope="module")
def trained(truth, tmp_path_factory):
    """Three phases of Reel, whose last steps are taken apart."""
    args = RLHFArgs(preset="reel", reward_fn="true_reward", total_phases=3, batch_size=64, seed=1)
    trainer = RLHFTrainer(args, out=tmp_path_factory.mktemp("influence") / "run")
    probe = Truth(pos=truth.grammar.slot("VERB") - 1, fine=False, every=2)
    attach(trainer, probe, eval_tokens=truth.reviews(32, seed=5)[0])
    return train_soundly(trainer)


@pytest.mark.slow
def test_rows_of_samples_agree_with_the_step_redone_without_each(trained):
    found = trained.tensors("step_influence", 2)
    rows, without = found["rows"].sum((0, 2)), found["without"]
    for column in (rows, found["counterfactual"]):
        assert torch.corrcoef(torch.stack([column, without]))[0, 1] >= 0.95


@pytest.mark.slow
def test_step_influence_raises_on_unsupported_steps(make_trainer, truth):
    in_backward = make_trainer(optimizer_in_backward=True, max_grad_norm=None)
    half, eight_bit, sgd = make_trainer(weight_precision="bf16"), make_trainer(), make_trainer()
    vars(eight_bit)["args"] = replace(eight_bit.args, optimizer="adamw_8bit")
    vars(sgd)["optimizer"] = torch.optim.SGD(sgd.policy.parameters(), lr=0.1)
    for trainer, message in (
        (in_backward, "optimizer_in_backward=True"),
        (half, "weight_precision='bf16'"),
        (eight_bit, "optimizer='adamw_8bit'"),
        (sgd, "optimizer SGD"),
        (make_trainer({"kl_penalty": lambda kl, kl_coef, mask: kl.sum()}), "custom kl_penalty"),
    ):
        with pytest.raises(ConfigError, match=message):
            attach(trainer, StepInfluence(), eval_tokens=truth.reviews(4, 5)[0])


GROUPS = {"advantages": "grpo", "samples_per_prompt": 4, "batch_size": 16, "seed": 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "fields"),
    [("last", {}), ("last", {"precision": "bf16"}), ("first", GROUPS | {"reward_fn": "sentiment"})],
)
def test_checks_hold_without_shortcuts(make_trainer, truth, monkeypatch, step, fields):
    """More logits than are computed at once; weights cast together, as on CUDA in bf16; and
    weights whose gradient is next to 0, which turn about when much of a sample is left out.
    """
    monkeypatch.setattr(token_stats, "MAX_LOGITS", 1)
    is_cast = lambda model, dtype: dtype is not None and not has_hooks(model)
    monkeypatch.setattr(forward, "casts_at_once", is_cast)
    trainer = make_trainer(total_phases=1, warmup_steps=0, **fields)
    probe = StepInfluence(pos=8, step=step, fine=False, n=4)
    attach(trainer, probe, eval_tokens=truth.reviews(4, 5)[0])
    train_soundly(trainer)
