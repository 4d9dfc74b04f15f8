"""Every field that a probe of the default suite stores changes what the report shows of it."""

import pytest
import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.probes import Run, attach, default_suite
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.views import probe_html

SMALL = dict(total_phases=3, warmup_steps=1, batch_size=8, num_minibatches=2, base_lr=1e-3)
NOT_DRAWN = {
    "direction_sentiment": {"direction"},  # its cosines, projections and accuracies are drawn
    "words_moved": {"ids", "words", "slots", "won", "measured", "moved", "stream", "columns"}
    | {"constants"},  # the shift of other contrasts is computed from these
    "text_heatmap": {"prefix_len"},  # as many tokens have no color
}


def changed(stored):
    if isinstance(stored, dict):
        return {name: changed(value) for name, value in stored.items()}
    if isinstance(stored, list):
        return list(map(changed, stored))
    if isinstance(stored, torch.Tensor) and stored.dtype == torch.bool:
        return stored ^ (torch.arange(stored.numel()).view(stored.shape) == 0)
    if isinstance(stored, torch.Tensor | float):
        return 1.7 * stored + 0.3
    is_text = isinstance(stored, str)
    return f"~{stored}" if is_text else 0.5 if stored is None else stored - 1


class Changed(Run):
    """A run whose probes have stored other values in one field."""

    field = ""

    def with_changed(self, found):
        return {k: changed(v) if k == self.field else v for k, v in found.items()}

    def records(self, probe):
        return list(map(self.with_changed, super().records(probe)))

    def tensors(self, probe, phase):
        return self.with_changed(super().tensors(probe, phase))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    args = RLHFArgs(preset="reel", reward_fn="true_reward", **SMALL)
    trainer = RLHFTrainer(args, out=tmp_path_factory.mktemp("drawn") / "run")
    attach(trainer, default_suite(trainer))
    trainer.train()
    return Changed(trainer.run.path)


@pytest.mark.slow
def test_every_stored_field_changes_the_report(run, monkeypatch):
    for name in run.kinds():
        page, phase = probe_html(run, name), run.phases(name)[-1]
        fields = set().union(*run.records(name)) - {"phase"}
        if run.store.tensor_path(name, phase).is_file():
            fields |= run.tensors(name, phase).keys()
        silent = set()
        for field in fields:
            monkeypatch.setattr(run, "field", field)
            silent |= {field} if probe_html(run, name) == page else set()
        monkeypatch.setattr(run, "field", "")
        assert silent == NOT_DRAWN.get(name, set()), name
