"""Every probe at once: a run is left as it is, bit for bit, in each kind of run."""

import pytest
import torch

import rlhf_lab.probes
from rlhf_lab.probes import (
    AttentionDrift,
    ComponentTransplant,
    Direction,
    Fisher,
    FrozenProbe,
    GradTerms,
    KLAttribution,
    KLByPosition,
    LogitShift,
    Probe,
    Run,
    RunHealth,
    StepInfluence,
    StepLedger,
    Suite,
    TextHeatmap,
    ValueAttribution,
    ValueLens,
    WeightDelta,
    attach,
)
from rlhf_lab.probes.text_heatmap import FIELDS
from tests.probes.test_eval_text import cut_reviews

MAKERS = {
    AttentionDrift: lambda: AttentionDrift(every=2, pos=-1),
    ComponentTransplant: lambda: ComponentTransplant(n=4),
    Direction: lambda: Direction(every=2),
    Fisher: lambda: Fisher(every=2, n=4),
    FrozenProbe: lambda: FrozenProbe(every=2, pos=8, steered=4, randoms=2),
    GradTerms: lambda: GradTerms(every=2),
    KLAttribution: lambda: KLAttribution(every=2, n=4),
    KLByPosition: lambda: KLByPosition(every=2, n=6),
    LogitShift: lambda: LogitShift(every=2, n=6),
    RunHealth: RunHealth,
    StepInfluence: lambda: StepInfluence(every=2),
    StepLedger: lambda: StepLedger(every=2),
    TextHeatmap: lambda: TextHeatmap(fields=FIELDS, every=2),
    ValueAttribution: lambda: ValueAttribution(every=2, slots=(8,), n=8),
    ValueLens: lambda: ValueLens(every=2),
    WeightDelta: lambda: WeightDelta(words=("loved", "hated"), every=2),
}
REFUSED = {"separate critic": {ValueAttribution}}
"""Probes that refuse a kind of run when they are attached."""
RUNS = {
    "answers that stop": {"stop_tokens": ".", "gen_len": 20, "temperature": 0.8},
    "lora": {"lora_rank": 2},
    "separate critic": {"value_head": "separate"},
    "grpo": {"advantages": "grpo", "samples_per_prompt": 4, "reward_fn": "sentiment"},
}


def test_there_is_no_other_probe():
    exported = (getattr(rlhf_lab.probes, name) for name in rlhf_lab.probes.__all__)
    kinds = {x for x in exported if isinstance(x, type) and issubclass(x, Probe)}
    assert kinds - {Probe} == set(MAKERS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the hooked modules run")
@pytest.mark.parametrize("kind", RUNS)
def test_the_weights_are_the_same_bit_for_bit(make_trainer, weights_of, reviews, unlimited, kind):
    """With eval texts of unequal length; every check holds, and no probe is refused."""
    plain, probed = (make_trainer(base_lr=1e-3, **RUNS[kind]) for _ in range(2))
    tokens, mask = cut_reviews(reviews, "left")
    wanted = MAKERS.keys() - REFUSED.get(kind, set())
    probes = [make() for probe, make in MAKERS.items() if probe in wanted]
    suite = Suite(*probes, eval_tokens=tokens, eval_mask=mask, labels=reviews[1], budget=unlimited)
    attached = attach(probed, suite)
    plain.train(), probed.train()
    assert attached.notes == []
    run = Run(probed.run.path)
    assert len(run.probes()) == len(wanted)
    assert not [(c.probe, c.name, c.value) for c in run.checks() if not c.ok]
    found, expected = weights_of(probed.policy), weights_of(plain.policy)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(p.grad is None or p.requires_grad for p in probed.policy.parameters())
