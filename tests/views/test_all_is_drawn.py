"""A test that everything a probe stores changes what the report shows of it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_lab.config import RLHFArgs
from rlhf_lab.probes import Run, attach, default_suite
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.views import probe_pictures

DEFAULT = ("RunHealth", "StepLedger", "TextHeatmap", "KLByPosition")
DEFAULT += ("ValueLens", "Direction", "WeightDelta", "WordsMoved")
NOT_DRAWN = {
    "Direction": {"direction": "its cosines, projections and accuracies are drawn"},
    "WordsMoved": {
        name: "to split the shift of other contrasts: `parts_over_phases`, in the answers"
        for name in ("ids", "words", "slots", "contrasts.weights", "won", "measured", "moved")
        + ("stream", "columns", "constants")
    },
    "TextHeatmap": {"prefix_len": "the tokens drawn without colour are as many"},
}


def changed(stored: Any) -> Any:
    if isinstance(stored, dict):
        return {key: changed(value) for key, value in stored.items()}
    if isinstance(stored, list):
        return [changed(value) for value in stored]
    if isinstance(stored, Tensor) and stored.dtype == torch.bool:
        return stored ^ (torch.arange(stored.numel()).view(stored.shape) == 0)
    if isinstance(stored, bool):
        return not stored
    if isinstance(stored, Tensor | float):
        return 1.7 * stored + 0.3
    if isinstance(stored, int):
        return stored - 1
    return 0.5 if stored is None else f"~{stored}"


def names_in(record: dict[str, Any]) -> set[str]:
    """What is stored: the names, and where it is a table, those of its columns behind a dot."""
    names = set()
    for name, value in record.items():
        is_table = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
        names |= {f"{name}.{column}" for row in value for column in row} if is_table else {name}
    return names - {"phase"}


def with_changed(record: dict[str, Any], which: str) -> dict[str, Any]:
    name, _, column = which.partition(".")
    value = record.get(name)
    if value is None:
        return record
    if not column:
        return record | {name: changed(value)}
    rows = [{k: changed(v) if k == column else v for k, v in row.items()} for row in value]
    return record | {name: rows}


class Changed(Run):
    """A run one of whose probes stored something else under one name."""

    def __init__(self, run: Run, which: str) -> None:
        super().__init__(run.path)
        self.which = which

    def records(self, probe: str) -> list[dict[str, Any]]:
        return [with_changed(record, self.which) for record in super().records(probe)]

    def tensors(self, probe: str, phase: int) -> dict[str, Tensor]:
        tensors = super().tensors(probe, phase)
        return {k: changed(v) if k == self.which else v for k, v in tensors.items()}


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    sizes = {"total_phases": 3, "warmup_steps": 1, "batch_size": 8, "num_minibatches": 2}
    args = RLHFArgs(preset="reel", reward_fn="true_reward", base_lr=1e-3, **sizes)
    trainer = RLHFTrainer(args, out=tmp_path_factory.mktemp("drawn") / "run")
    attach(trainer, default_suite(trainer))
    trainer.train()
    return Run(trainer.run.path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DEFAULT)
def test_whatever_a_probe_stores_changes_its_picture(probed, kind):
    exempt = NOT_DRAWN.get(kind, {})
    kinds = {probe["kind"] for probe in probed.store.read_suite()["probes"]}
    assert kinds == set(DEFAULT), "a probe of the default suite is not looked at"
    name = next(p["name"] for p in probed.store.read_suite()["probes"] if p["kind"] == kind)
    shown = probe_pictures.probe_html(probed, name)
    stored = set.union(*map(names_in, probed.records(name)))
    last = probed.phases(name)[-1]
    if probed.store.tensor_path(name, last).is_file():
        stored |= probed.tensors(name, last).keys()
    silent = {
        which
        for which in stored - exempt.keys()
        if probe_pictures.probe_html(Changed(probed, which), name) == shown
    }
    assert silent == set()
    assert exempt.keys() <= stored
