"""The loop of the trainer over phases: start, stop and end of a run, and custom loops."""

import dataclasses
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from rlhf_lab.config.algorithm_fields import AllFields
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.models.forward import validate_unhooked_blocks
from rlhf_lab.models.hooked_model import has_hooks
from rlhf_lab.samples import Samples
from rlhf_lab.training import ppo
from rlhf_lab.training.kl_control import kl_to_initial
from rlhf_lab.training.overrides import COMPONENTS, Overrides
from rlhf_lab.training.phase_stats import TOO_FAST, validate_finite_weights
from rlhf_lab.training.random_streams import phase_generator
from rlhf_lab.training.report import PhaseReport
from rlhf_lab.training.rollout import Rollout, mean_of_batches

EVALUATION_BATCHES = 4
FIXED = {"args", "tokenizer", "forward", "objective", "overrides", "rewards", "sampling_spec"}
FIXED |= {*COMPONENTS, *(x.name for k in (Overrides, AllFields) for x in dataclasses.fields(k))}
FIXED -= {"optimizer", "scheduler"}  # `start` checks those of a subclass


class RunLoop:
    """Methods of `RLHFTrainer` for its own loop, and for one of the caller as in TRL.

    A `with` statement calls `finish()`, or unlocks the run's directory after an error.
    """

    def __init__(self) -> None:
        self.generated, self.truncated, self.stop_requested = 0, set[str](), False
        self.directory: str | None = None  # of the run, known to each of several processes
        self.unfinished: list[PhaseReport] = []
        self._started = self._recording = False
        self._learned_alone = set[int]()  # phases of learning_phase outside of run_phase

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FIXED and hasattr(self, "_weights"):  # which __init__ sets last
            raise ConfigError(f"trainer.{name} cannot be set. Pass {name} to another trainer.")
        super().__setattr__(name, value)

    def __reduce__(self) -> Any:
        raise ConfigError("A trainer cannot be copied or pickled. Use RLHFTrainer.resume(path).")

    def start(self) -> None:
        """Create the directory of a new run and emit run_start, once."""
        if not torch.is_grad_enabled():
            raise ConfigError("Gradients are off. Train outside of torch.no_grad().")
        if torch.is_autocast_enabled(self.policy.device.type):
            raise ConfigError("torch.autocast is on. Train outside of it, with precision='bf16'.")
        maximizes = all(group.get("maximize", True) for group in self.optimizer.param_groups)
        if not maximizes or self.scheduler.optimizer is not self.optimizer:
            raise ConfigError("trainer.optimizer was set. Pass optimizer to another trainer.")
        if self.policy.last_start[0] is not self.interventions.last_start:
            raise ConfigError("Another trainer trains this policy. Use that one, or a deepcopy.")
        self.policy.last_start[0] = self.interventions.last_start = object()
        learned = (group["params"] for group in self.optimizer.param_groups)
        weights = {weight for weight in self.policy.parameters() if weight.requires_grad}
        if added := weights.difference(self._weights, *learned):
            warnings.warn("added weights do not train. Pass a policy that has them.", stacklevel=3)
            self._weights |= added
        is_stored = {"policy", "interventions"}.isdisjoint(self.custom_components)
        if is_stored and has_hooks(self.policy):
            problem = "the run does not store hooks on its policy, and its readers have none"
            warnings.warn(f"{problem}. To change it, use trainer.intervene.", stacklevel=3)
        self.truncated.clear()
        if self._started:
            return
        if self.args.activation_checkpointing:
            validate_unhooked_blocks(self.policy)
        with self._recorded():
            if self.world is None:
                self.recorder.open()
            else:
                self.directory = self.world.open_run(self.recorder)
            self._started = True
            self.emit("run_start")

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        if self._recording:
            raise ConfigError("The run is within a phase. Begin the next one when it has ended.")
        self._recording = True
        try:
            yield
        except BaseException as error:
            self.break_off(error)
            raise
        finally:
            self._recording = False

    def sample_greedily(self, prompts: Sequence[Sequence[int]]) -> Samples:
        """Return the most likely token at every step after each prompt."""
        spec = dataclasses.replace(self.sampling_spec, top_k=1, top_p=None)
        return self.sample(prompts, torch.Generator(), spec)

    def break_off(self, error: BaseException) -> None:
        for sink in self.sinks:
            sink.break_off(error)
        self.recorder.break_off(error if self._started else None)

    def __iter__(self) -> Iterator[PhaseReport]:
        """Run the remaining phases; the iteration can be stopped and continued."""
        self.stop_requested = False
        self.start()
        while self.phase < self.args.total_phases:
            stops = self.stop_requested
            if stops if self.world is None else self.world.max_over_ranks(stops):
                break
            self.unfinished.append(self.run_phase())
            yield self.unfinished[-1]
        self.end(self.unfinished)

    def end(self, reports: list[PhaseReport]) -> None:
        self.unfinished = []
        with self._recorded():
            self.emit("run_end", reports=reports)

    def train(self) -> list[PhaseReport]:
        """Run all remaining phases; warn if none remain."""
        if self.phase >= self.args.total_phases:
            warnings.warn(f"all {self.phase} phases are done. Make another trainer.", stacklevel=2)
        return list(self)

    def request_stop(self) -> None:
        """Finish the current phase, save, and end the iteration."""
        self.stop_requested = True

    def fresh_rollouts(self) -> Iterator[Rollout]:
        """Sample and score several batches, the same ones at every call in a phase."""
        validate_finite_weights(self)
        generator = phase_generator(self.args.seed, self.phase, "evaluation")
        for batch in range(EVALUATION_BATCHES):
            samples = self.sample(self.prompts.of_batch(batch), generator, self.sampling_spec)
            yield ppo.score_samples(self, samples)

    def evaluate(self, rollouts: Sequence[Rollout] | None = None) -> dict[str, float | int | None]:
        """Return means over batches of fresh samples; raise RunError if the KL is not finite."""
        rollouts = list(self.fresh_rollouts()) if rollouts is None else rollouts
        means, kl = mean_of_batches(rollouts), kl_to_initial(self, *rollouts)
        means |= {} if kl is None else {"kl_to_initial_per_sequence": kl}
        if not math.isfinite(means["kl_per_sequence"]):
            raise RunError(
                f"kl_per_sequence is {means['kl_per_sequence']} in phase {self.phase}. {TOO_FAST}."
            )
        return means

    def generate(
        self, prompts: Any, return_prompt: bool = False, **settings: Any
    ) -> list[str] | list[Int[Tensor, " response"]] | Int[Tensor, "1 response"]:
        """Continue texts or token ids with the policy; see `compat.trl.generate`."""
        from rlhf_lab.compat import trl

        return trl.generate(self, prompts, return_prompt, **settings)

    def step(
        self, queries: Any, responses: Any, scores: Any, response_masks: Any = None
    ) -> PhaseReport:
        """Learn from texts that are scored already, for one phase; see `compat.trl.step`."""
        from rlhf_lab.compat import trl

        report = trl.step(self, queries, responses, scores, response_masks)
        self.unfinished.append(report)
        return report

    def finish(self) -> None:
        """Save a run of steps, or one whose iteration was left, and close its loggers."""
        if self.unfinished:
            self.end(self.unfinished)

    def __enter__(self) -> "RunLoop":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.finish()
        else:
            self.break_off(error)

    def view(self) -> Any:
        """Return the page about the run so far, which a notebook shows once it has begun."""
        from rlhf_lab.views.report import page_frame

        if self.run is None:
            raise ConfigError("The run has not begun. Train a phase before view().")
        return page_frame(self.run)
