"""A rollout engine on several processes, each with a separate engine."""

import pytest

from tests.pages import ROOT

pytestmark = pytest.mark.process
RUN = """
sys.path.insert(0, {root!r})
from tests.training.test_rollout_engine import Double, expected_logprobs, trainer_with
engine, gaps, phases = Double(), [], 2
trainer = trainer_with(engine, device="cpu", parallel={parallel!r}, total_phases=phases)
@trainer.on("after_score")
def compare(ctx):
    samples = ctx.rollout.samples
    gaps.append((expected_logprobs(engine, samples, 1.0) - samples.logprobs).abs().max().item())
for _ in range(phases):
    trainer.run_phase()
tell(loads=engine.loads, seeds=engine.seeds, gaps=gaps,
     weights=sum(p.double().sum().item() for p in trainer.policy.parameters()))
trainer.world.close()
"""


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_each_process_samples_its_rows_with_current_weights(ranks, parallel):

    both = ranks(2, RUN.format(root=str(ROOT), parallel=parallel))
    first, second = (ended.told for ended in both)
    assert [ended.status for ended in both] == [0, 0], both[0].error + both[1].error
    assert first["loads"] == second["loads"] == 2
    assert len({*first["seeds"], *second["seeds"]}) == 4, "of each process and phase another one"
    assert len(first["gaps"]) == 2 and max(first["gaps"]) < 2e-5 and second["gaps"] == []
    assert first["weights"] == second["weights"]
