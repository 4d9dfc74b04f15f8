"""Signs of dead or exploded learning are reported once; nan raises an error with its cause."""

import io
import json
import math
from collections.abc import Iterable

import pytest
import torch
from rich.console import Console
from torch import Tensor

from rlhf_lab.__main__ import main
from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.training import RLHFTrainer, checkpoint
from rlhf_lab.views import write_report
from rlhf_lab.views.live import RunView


@pytest.fixture
def make(tmp_path):
    def build(reward=None, **settings) -> RLHFTrainer:
        small = {"preset": "reel", "total_phases": 2, "batch_size": 16, "num_minibatches": 2}
        small |= {"warmup_steps": 0, "gen_len": 6}
        return RLHFTrainer(RLHFArgs(**small | settings), out=tmp_path / "run", reward_fn=reward)

    return build


def equal(texts: list[str]) -> list[float]:
    return [0.5] * len(texts)


def strict(text: str) -> dict:
    """Read JSON; raise KeyError at NaN or Infinity."""
    return json.loads(text, parse_constant={}.__getitem__)


@pytest.mark.parametrize(
    ("sign", "words", "reward", "settings"),
    [
        ("reward_spread", "nothing is learned", equal, {}),
        ("reward_spread", "scale them down", lambda t: [1e30, -1e30] * (len(t) // 2), {}),
        ("reward_spread", "nothing is learned", lambda t: [1e-40, 0.0] * (len(t) // 2), {}),
        ("alike", "all 16 responses are the same text", None, {"top_k": 1}),
        ("entropy", "hardly explores", None, {"top_k": 1, "temperature": 1e-5}),
        ("groups", "teaches nothing", equal, {"advantages": "grpo", "samples_per_prompt": 8}),
        ("kl", "is far from it", None, {"base_lr": 0.05, "kl_coef": 0.0, "total_phases": 4}),
    ],
)
def test_sign_is_reported_once_in_panel_report_and_run_json(
    make, capsys, sign, words, reward, settings
):
    trainer = make(reward, **settings)
    with RunView(trainer, Console(force_terminal=False)):
        trainer.train()
    assert " ".join(capsys.readouterr().out.split()).count(words) == 1
    info = strict((trainer.run.path / "run.json").read_text())
    assert words in info["diagnostics"][sign]["text"]
    for line in (trainer.run.path / "metrics.jsonl").read_text().splitlines():
        strict(line)
    assert write_report(trainer.run.path).read_text().count(words) == 1
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(RunView(trainer, console).panel())
    assert words in " ".join(console.export_text().split())


def test_healthy_run_has_no_diagnostics(make, capsys):
    """Its policy with nan in a weight, or a temperature beyond fp32, is not sampled."""
    trainer = make()
    trainer.train()
    assert trainer.run.read_info()["diagnostics"] == {}
    assert main(["sample", str(trainer.run.path), "--temperature", "1e-39"]) == 2
    assert "temperature=1e-39" in capsys.readouterr().err
    path = trainer.run.checkpoints / "last.safetensors"
    tensors, metadata = checkpoint.load_checkpoint(path)
    tensors["base_model.embed.W_E"].fill_(math.nan)
    checkpoint.save_checkpoint(path, tensors, metadata)
    assert main(["sample", str(trainer.run.path)]) == 2
    assert "contains nan or inf" in capsys.readouterr().err


def test_resumed_run_keeps_earlier_diagnostics(make):
    first = make(equal)
    for _ in first:
        first.request_stop()
    diagnostics = first.run.read_info()["diagnostics"]
    assert diagnostics["reward_spread"]["phase"] == 0
    second = RLHFTrainer.resume(first.run.path, reward_fn=equal)
    second.train()
    assert second.run.read_info()["diagnostics"] == diagnostics


@torch.no_grad()
def fill_nan(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(math.nan)


def test_error_names_the_cause_of_nan(make):
    trainer = make()
    for role in ("reference", "policy"):
        fill_nan(getattr(trainer, role).parameters())
        with pytest.raises(RunError, match=f"the {role}'s weight .* contains nan or inf in phase"):
            trainer.evaluate()
    trainer = make()
    trainer.run_phase()
    fill_nan(state["exp_avg"] for state in trainer.optimizer.state.values())
    with pytest.raises(RunError, match="moments contain nan or inf"):
        trainer.train()


def test_error_names_the_setting(make):
    with pytest.raises(ConfigError, match="temperature=1e-20"):
        make(temperature=1e-20).train()
    with pytest.raises(RunError, match="Lower the learning rates"):
        make(base_lr=1e30, total_phases=4).train()
