import pytest

from rlhf_lab.models import TransformerWithValueHead, load_model
from rlhf_lab.probes import attach, attach_default_suite, default_suite, had_default_suite
from rlhf_lab.training import RLHFTrainer
from tests.probes.looking import train_soundly


@pytest.mark.slow
def test_suite_elsewhere_than_on_reel_has_no_truth_or_labels(elsewhere_with):
    trainer = elsewhere_with(total_phases=2, lora_rank=0, top_k=4)
    attach(trainer, default_suite(trainer))
    run = train_soundly(trainer)
    names = "kl_by_position run_health step_ledger text_heatmap value_lens weight_delta words_moved"
    assert run.probes() == names.split()
    assert "optimal_reward" not in run.records("run_health")[0]
    assert "true_value" not in run.tensors("text_heatmap", 0)


def test_custom_policy_has_no_truth_even_if_it_speaks_reel(make_trainer):
    policy = TransformerWithValueHead(load_model("reel-nano"))
    suite = default_suite(make_trainer({"policy": policy}))
    assert "words_moved" in [probe.name for probe in suite.probes]
    assert "direction_sentiment" not in [probe.name for probe in suite.probes]


@pytest.mark.slow
def test_a_run_remembers_from_its_very_start_that_it_has_the_default_suite(make_trainer):
    """Noted before the first probe is shown anything, and only when it was asked for."""
    trainer, told = make_trainer(total_phases=4, batch_size=128, gen_len=26), []
    attach_default_suite(trainer, [0, 3])
    trainer.on("run_start")(lambda ctx: told.append(had_default_suite(ctx.run)))
    trainer.on("after_phase")(lambda ctx: told.append(had_default_suite(ctx.run)))
    trainer.run_phase()
    assert told == [True, True]
    resumed = RLHFTrainer.resume(trainer.run.path)
    assert attach_default_suite(resumed).plan["words_moved"] == [0, 3]
    other = make_trainer(total_phases=4)
    default_suite(other).attach(other)
    other.run_phase()
    assert not had_default_suite(other.run)
