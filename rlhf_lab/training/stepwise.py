"""Stepwise: a trainer whose loop is the caller's, as in TRL: generate, score, step, finish."""

from types import TracebackType
from typing import Any

from jaxtyping import Int
from torch import Tensor

from rlhf_lab.training.components import Parts
from rlhf_lab.training.report import PhaseReport


class Stepwise(Parts):
    """What a trainer offers to a loop of one's own; see `compat.trl` for each.

    `finish()` ends such a run: its state is saved, and its loggers are closed. A `with` statement
    calls it, and lets the run's directory go if an error comes through.
    """

    def generate(
        self, prompts: Any, return_prompt: bool = False, **settings: Any
    ) -> list[str] | list[Int[Tensor, " response"]] | Int[Tensor, "1 response"]:
        """Let the policy answer texts or token ids, with settings of this call's own; see
        `compat.trl.generate`.
        """
        from rlhf_lab.compat import trl

        return trl.generate(self, prompts, return_prompt, **settings)

    def step(
        self, queries: Any, responses: Any, scores: Any, response_masks: Any = None
    ) -> PhaseReport:
        """One phase of learning from texts that are scored already; see `compat.trl.step`."""
        from rlhf_lab.compat import trl

        report = trl.step(self, queries, responses, scores, response_masks)
        self.unfinished.append(report)
        return report

    def finish(self) -> None:
        """End a run of steps, or one whose iteration was left: save it, and close its loggers.

        Nothing is done where no phase has run since the last end. A step after it goes on with the
        run, which is then to be finished again.
        """
        if self.unfinished:
            self.end(self.unfinished)

    def __enter__(self) -> "Stepwise":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.finish()
        else:
            self.break_off(error)
