"""Runs of preset `sums`: GRPO with a verifiable reward."""

import pytest

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.organism.sums import SumsGrammar
from rlhf_lab.training import RLHFTrainer


@pytest.mark.slow
def test_preset_sums_raises_the_true_reward(tmp_path, recwarn):
    args = RLHFArgs(preset="sums", device="cpu", total_phases=5)
    trainer = RLHFTrainer(args, out=tmp_path / "run")
    reports = list(trainer)
    assert not recwarn.list  # with GRPO's settings as published
    assert [report.true_reward for report in reports] == [r.mean_reward for r in reports]
    assert reports[0].true_reward < 0.5 and reports[-1].true_reward > 0.75
    parses = [SumsGrammar().parse(text) for text in trainer.prompts.texts]
    assert {len(str(parse.a)) for parse in parses} == {2, 3}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["majority", "coin", "hole"])
def test_flawed_rewards_have_the_true_reward_next_to_them(name, tmp_path):
    settings = dict(total_phases=1, warmup_steps=0, batch_size=64, num_minibatches=2)
    args = RLHFArgs(preset="sums", device="cpu", reward_fn=f"sums:{name}", **settings)
    (report,) = RLHFTrainer(args, out=tmp_path / "run")
    assert 0 < report.true_reward < report.mean_reward < 1


def test_rewards_of_sums_raise_on_other_prompts(make_trainer):
    with pytest.raises(ConfigError, match="requires prompts such as"):
        make_trainer(reward_fn="sums:exact")
