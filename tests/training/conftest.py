"""Small Reel runs for the tests of training."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from rlhf_lab.config import RLHFArgs
from rlhf_lab.training import RLHFTrainer

SMALL = {
    "preset": "reel",
    "total_phases": 2,
    "batch_size": 8,
    "num_minibatches": 2,
    "warmup_steps": 1,
    "gen_len": 6,
}


@pytest.fixture(scope="session")
def reel_args() -> Callable[..., RLHFArgs]:
    def make(**overrides: Any) -> RLHFArgs:
        return RLHFArgs(**(SMALL | overrides))

    return make


@pytest.fixture
def make_trainer(tmp_path: Path, reel_args: Callable[..., RLHFArgs]) -> Callable[..., RLHFTrainer]:
    """Makes trainers that write to fresh directories; `parts` are handed to the trainer."""
    made = []

    def make(parts: dict[str, Any] | None = None, **overrides: Any) -> RLHFTrainer:
        made.append(tmp_path / f"run{len(made)}")
        return RLHFTrainer(reel_args(**overrides), out=made[-1], **(parts or {}))

    return make


@pytest.fixture(scope="session")
def broken_off_and_resumed() -> Callable[[RLHFTrainer], RLHFTrainer]:
    """Stops a run after its second phase, and trains it to its end in a trainer of its own."""

    def finish(halved: RLHFTrainer) -> RLHFTrainer:
        for report in halved:
            if report.phase == 1:
                halved.request_stop()
        resumed = RLHFTrainer.resume(halved.run.path)
        resumed.train()
        return resumed

    return finish


@pytest.fixture(scope="session")
def parameters_of() -> Callable[[nn.Module], dict[str, Tensor]]:
    """Copies of all parameters of a module, by name."""

    def copy(module: nn.Module) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in module.named_parameters()}

    return copy


@pytest.fixture(scope="session")
def metrics_of() -> Callable[[Path], list[dict[str, Any]]]:
    """The lines of metrics.jsonl in a run's directory, without what they cost."""

    def read(run: Path) -> list[dict[str, Any]]:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [{k: v for k, v in json.loads(line).items() if k != "cost"} for line in lines]

    return read


@pytest.fixture(
    params=[None, "hook_embed", "blocks.0.attn.hook_pattern"],
    ids=["no hook", "hook on the residual stream", "hook on a pattern"],
)
def listens(request):
    """Hook point that a hook reads; a hook on a pattern replaces the fused attention."""
    return request.param
