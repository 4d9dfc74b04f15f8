"""Short runs whose models a probe is shown after training, as often as a test likes."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_lab.probes import EvalText, Observation, Probe, Record, ReelTruth
from rlhf_lab.probes.probe import Check
from rlhf_lab.training import Context, RLHFTrainer


class Trained(NamedTuple):
    """A run that is over, as seen after the last rollout that was scored.

    Args:
        tokens, mask: eval text.
        truth: Reel's, if the policy speaks it.
    """

    trainer: RLHFTrainer
    ctx: Context
    tokens: Tensor
    truth: ReelTruth | None
    mask: Tensor | None = None

    def seen(self) -> Observation:
        """What a probe is shown; the weights are those after the last phase."""
        return Observation(
            ctx=self.ctx,
            args=self.trainer.args,
            prefix_len=len(self.trainer.prompt),
            own_parts=[],
            acts={},
            reference_acts={},
            text=EvalText.of(self.tokens, self.mask),
            truth=self.truth,
        )


def trained(trainer: RLHFTrainer, tokens: Tensor, truth: ReelTruth | None) -> Trained:
    """Train to the end, and keep what the last event after scoring showed."""
    found: list[Any] = []
    trainer.on("after_score")(found.append)
    trainer.train()
    return Trained(trainer, found[-1], tokens, truth)


@torch.no_grad()
def look(run: Trained, probe: Probe) -> Record:
    """One record, with all of its checks."""
    seen = run.seen()
    record = probe.observe(seen)
    return Record(record.values, record.tensors, [*record.checks, *probe.bind(seen, record)])


def failed(run: Trained, probe: Probe) -> list[Check | str]:
    """The checks that do not hold, or the error that the probe ended in."""
    try:
        return [check for check in look(run, probe).checks if not check.ok]
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
