"""Learning that is dead or has exploded says so once; nan is refused with its cause."""

import io
import json
import math

import pytest
import torch
from rich.console import Console

from rlhf_lab.__main__ import main
from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.training import RLHFTrainer, checkpoint
from rlhf_lab.training.run_dir import finite
from rlhf_lab.views import write_report
from rlhf_lab.views.live import RunView

SMALL = {
    "preset": "reel",
    "total_phases": 2,
    "batch_size": 16,
    "num_minibatches": 2,
    "warmup_steps": 0,
    "gen_len": 6,
}


def trained(tmp_path, reward=None, **settings) -> RLHFTrainer:
    parts = {} if reward is None else {"reward_fn": reward}
    trainer = RLHFTrainer(RLHFArgs(**SMALL | settings), out=tmp_path / "run", **parts)
    with RunView(trainer, Console(force_terminal=False)):
        trainer.train()
    return trainer


def strict(text: str) -> dict:
    """JSON as the standard has it."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(
    ("sign", "words", "reward", "settings"),
    [
        ("reward_spread", "nothing is learned", lambda t: [0.5] * len(t), {}),
        (
            "reward_spread",
            "scale them down",
            lambda t: [1e30 * (-1) ** i for i in range(len(t))],
            {},
        ),
        ("reward_spread", "nothing is learned", lambda t: [1e-40 * i for i in range(len(t))], {}),
        ("alike", "all 16 responses are the same text", None, {"top_k": 1}),
        ("entropy", "hardly explores", None, {"top_k": 1, "temperature": 1e-5}),
        (
            "groups",
            "comparing them teaches nothing",
            lambda t: [0.5] * len(t),
            {"advantages": "grpo", "samples_per_prompt": 8},
        ),
        ("kl", "is far from it", None, {"base_lr": 0.05, "kl_coef": 0.0, "total_phases": 4}),
    ],
)
def test_a_sign_is_told_once_in_panel_report_and_run_json(
    tmp_path, capsys, sign, words, reward, settings
) -> None:
    trainer = trained(tmp_path, reward, **settings)
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count(words) == 1
    info = strict((trainer.run.path / "run.json").read_text())
    assert words in info["diagnostics"][sign]["text"]
    for line in (trainer.run.path / "metrics.jsonl").read_text().splitlines():
        strict(line)
    page = write_report(trainer.run.path).read_text()
    assert page.count(words) == 1
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(RunView(trainer, console).panel())
    assert words in " ".join(console.export_text().split())


def test_a_healthy_run_has_no_remark_and_a_second_part_keeps_the_first_ones(tmp_path) -> None:
    healthy = trained(tmp_path / "healthy")
    assert healthy.run.read_info()["diagnostics"] == {}
    flat = {"reward_fn": lambda texts: [0.0] * len(texts)}
    first = RLHFTrainer(RLHFArgs(**SMALL), out=tmp_path / "flat", **flat)
    for _ in first:
        first.request_stop()
    found = first.run.read_info()["diagnostics"]
    assert found["reward_spread"]["phase"] == 0
    second = RLHFTrainer.resume(tmp_path / "flat", **flat)
    second.train()
    assert second.run.read_info()["diagnostics"] == found


def test_nan_in_the_weights_is_told_as_such_and_never_evaluated(tmp_path) -> None:
    trainer = RLHFTrainer(RLHFArgs(**SMALL), out=tmp_path / "run")
    with torch.no_grad():
        for model in (trainer.policy, trainer.reference):
            for weight in model.parameters():
                weight.fill_(math.nan)
    for act in (trainer.train, trainer.evaluate):
        with pytest.raises(RunError, match="contains nan or inf in phase 0") as error:
            act()
        assert "learning rates" not in str(error.value)


def test_a_temperature_beyond_single_precision_is_told_as_such(tmp_path) -> None:
    with pytest.raises(ConfigError, match="temperature=1e-20"):
        trained(tmp_path, temperature=1e-20)


def test_moments_that_are_nan_are_told_as_such(tmp_path) -> None:
    trainer = RLHFTrainer(RLHFArgs(**SMALL), out=tmp_path / "run")
    trainer.run_phase()
    for state in trainer.optimizer.state.values():
        state["exp_avg"].fill_(math.nan)
    with pytest.raises(RunError, match="moments contain nan or inf"):
        trainer.train()


def test_the_learning_rate_is_blamed_where_it_is_to_blame(tmp_path) -> None:
    with pytest.raises(RunError, match="Lower the learning rates"):
        trained(tmp_path, base_lr=1e30, total_phases=4)


def test_sampling_from_a_model_that_gives_nan_is_refused(tmp_path, capsys) -> None:
    trainer = trained(tmp_path)
    assert main(["sample", str(trainer.run.path), "--temperature", "1e-39"]) == 2
    assert "temperature=1e-39" in capsys.readouterr().err
    with torch.no_grad():
        next(iter(trainer.policy.base_model.parameters())).fill_(math.nan)
    path = trainer.run.checkpoints / "last.safetensors"
    _, notes = checkpoint.load_checkpoint(path)
    checkpoint.save_checkpoint(path, checkpoint.weights(trainer.policy), notes)
    assert main(["sample", str(trainer.run.path)]) == 2
    assert "contains nan or inf" in capsys.readouterr().err


def test_numbers_that_json_lacks_become_null() -> None:
    assert finite({"a": [math.inf, (1.5, math.nan)], "b": -math.inf, "c": 2, "d": True}) == {
        "a": [None, [1.5, None]],
        "b": None,
        "c": 2,
        "d": True,
    }
