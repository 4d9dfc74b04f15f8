from dataclasses import replace

import pytest
import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.probes import Run, attach
from rlhf_lab.probes.run_health import RunHealth, _checks, effective_beta, token_intervals


@pytest.mark.parametrize(
    "whitened, normalized, expected",
    [(True, True, 0.06), (True, False, 0.15), (False, True, 0.12), (False, False, 0.3)],
)
def test_beta_eff_undoes_whitening_and_normalizing(whitened, normalized, expected):
    args = RLHFArgs(preset="reel", normalize_advantages=whitened, normalize_reward=normalized)
    # 0.3 * 0.5 (advantages) * 0.4 (rewards) = 0.06
    assert effective_beta(0.3, 0.5, 0.4, args) == pytest.approx(expected)


@pytest.mark.slow
def test_checks_and_intervals_match_the_rollout(make_trainer):
    reward = lambda texts: torch.arange(len(texts)).sub(7).clamp(min=0).float()  # 0 in one group
    fields = {"total_phases": 1, "warmup_steps": 0, "batch_size": 16, "samples_per_prompt": 4}
    trainer, seen = make_trainer({"reward_fn": reward}, advantages="grpo", **fields), []
    attach(trainer, RunHealth())
    trainer.on("after_phase")(lambda ctx: seen.append((ctx.rollout, ctx.report)))
    trainer.train()
    ((rollout, report),) = seen
    assert [check.ok for check in _checks(report, "fp32")] == [True, True]
    learning = replace(report.learning, ratio_first_minibatch=1.01, objective=9.0)
    spoilt = _checks(replace(report, learning=learning), "fp32")
    assert [check.ok for check in spoilt] == [False, False]
    mask = rollout.samples.mask
    advantage_std = rollout.advantages[mask & rollout.teaching[:, None]].std().item()
    (record,) = Run(trainer.run.path).records("run_health")
    assert record["advantage_std"] == pytest.approx(advantage_std, rel=1e-5)
    returns, values = rollout.returns[mask].double(), rollout.samples.values[mask].double()
    explained = 1 - (returns - values).var() / returns.var()
    found = token_intervals(rollout)
    assert found["explained_variance"].value.item() == pytest.approx(explained.item(), rel=1e-6)
    entropy = rollout.entropy[mask].mean().item()
    assert found["entropy_per_token"].value.item() == pytest.approx(entropy, rel=1e-5)
    for interval in found.values():
        assert interval.low < interval.value < interval.high and interval.n == len(mask)
