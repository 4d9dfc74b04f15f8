"""The trainer: builds the parts of a run, calls the callbacks, and iterates over phases.

The algorithm is in `ppo.py`, and what is logged and saved in `recorder.py`.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from jaxtyping import Int
from torch import Tensor

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.models.forward import validate_unhooked_blocks
from rlhf_lab.training import ppo
from rlhf_lab.training.callbacks import Callback, Callbacks, Event
from rlhf_lab.training.capture import Position, capturing
from rlhf_lab.training.diagnostics import validate_finite, validate_finite_weights
from rlhf_lab.training.dynamic_sampling import informative_rollout_phase
from rlhf_lab.training.interventions import STAGES, InterventionFn, Interventions, Stage
from rlhf_lab.training.isolation import preserve_gradients
from rlhf_lab.training.random_streams import phase_generator
from rlhf_lab.training.recorder import Recorder
from rlhf_lab.training.reference_reset import (
    age_of_reference,
    final_kl_to_start,
    kl_to_start,
    reset_reference,
)
from rlhf_lab.training.report import LearningStats, PhaseReport, cost_of
from rlhf_lab.training.resume import resume_trainer
from rlhf_lab.training.rollout import Rollout, mean_of_batches, summarize
from rlhf_lab.training.run_dir import RunDir
from rlhf_lab.training.sinks import attach_sinks
from rlhf_lab.training.stepwise import Stepwise

EVALUATION_BATCHES = 4
SAVES = ("run_start", "after_phase", "run_end")
"""The events at which the recorder may save the training state."""


class RLHFTrainer(Stepwise):
    """Trains a policy with PPO against a reward, under a KL penalty, open to callbacks throughout.

    Iterate over it for one `PhaseReport` per phase, or call `train()`. `rollout_phase()` and
    `learning_phase()` work on their own, too; `generate()` and `step()` leave the loop to you, and
    `finish()` ends it.

    Args:
        args: the settings.
        out: the run's directory, which must not hold a run yet; `runs/PRESET-seedN`, numbered on,
            when None. It is made when the first phase begins.
        parts: parts of the run that are the caller's own, by name: `policy`, `reference`,
            `prompts`, `reward_fn`, `gold_fn`, `kl_controller`, `optimizer`, `scheduler`,
            `rollout_engine` (see `Parts`), or a function such as `kl_penalty=my_kl` (see
            `Overrides`).

    Raises:
        ConfigError, LoadError: see there; before anything is written.
        RunError: `out` holds a run already.
    """

    def __init__(self, args: RLHFArgs, *, out: str | Path | None = None, **parts: Any) -> None:
        if out is not None:
            RunDir.at(out).validate_empty()
        super().__init__(args, **parts)
        self.generated, self.stop_requested = 0, False
        self.directory: str | None = None  # known to all processes, of which one writes there
        self.unfinished: list[PhaseReport] = []
        self.interventions = Interventions(self.policy, lambda: self.phase)
        self.callbacks = Callbacks()
        self.recorder = Recorder(self, out)
        self.sinks = attach_sinks(args, self.callbacks)
        self._started = self._recording = False

    @property
    def run(self) -> RunDir | None:
        """The run's directory; None before the first phase begins."""
        return self.recorder.run

    def on(self, event: Event, every: int = 1) -> Callable[[Callback], Callback]:
        """Register the decorated callable for an event of every `every`-th phase."""
        return self.callbacks.on(event, every)

    def capture(
        self,
        hook_names: str | Sequence[str],
        pos: Position = None,
        at: Event = "after_phase",
        every: int = 1,
        tokens: Int[Tensor, "batch seq"] | None = None,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register the decorated `function(ctx, acts)` to look at activations; see `capturing`."""
        callback = capturing(self.policy, hook_names, pos, at, tokens)

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            self.on(at, every)(callback(function))
            return function

        return register

    def intervene(
        self,
        site: str,
        fn: InterventionFn,
        during: tuple[Stage, ...] = STAGES,
        name: str | None = None,
    ) -> None:
        """Change activations at a site with `fn(activation, where)` for the whole run.

        It is written in run.json, and `resume` asks for it again; see `Interventions.add`.

        Raises:
            ConfigError: the run has begun, or see there.
        """
        self.interventions.refuse_late(self._started, site)
        self.interventions.add(site, fn, during, name)
        if "interventions" not in self.own_parts:
            self.own_parts.append("interventions")

    def emit(self, event: Event, phase: int | None = None, **fields: Any) -> None:
        """Call the callbacks of an event; what they do to gradients is undone.

        Of several processes the main one does, and the others wait for it where they meet next.
        """
        if event in SAVES:
            is_saved = event != "after_phase" or self.recorder.is_save_phase(self.phase + 1)
            self.weights.gather_moments(self.optimizer, is_saved)
        if not self.weights.is_learning:
            self._call(event, phase, fields)
            return
        with self.weights.shown(event) as are_whole:
            if are_whole:
                self._call(event, phase, fields)

    def _call(self, event: Event, phase: int | None, fields: dict[str, Any]) -> None:
        """Call the callbacks of an event, where this is the process that has some."""
        if not self.world.is_main or not self.callbacks.has_callbacks(event):
            return
        if "grad_norm" in fields:
            fields["grad_norm"] = fields["grad_norm"].item()
        always = {
            "args": self.args,
            "policy": self.policy,
            "reference": self.reference,
            "kl_coef": self.kl_controller.kl_coef,
            "run": self.run if self._recording else None,
        }
        with self.world.apart(), preserve_gradients(self.policy, event):
            self.callbacks.emit(event, self.phase if phase is None else phase, **always, **fields)

    def rollout_phase(self) -> Rollout:
        """Sample a batch, score it, and compute all that learning needs; see `ppo`."""
        with self.forward.products():
            if self.args.dynamic_sampling is not None:
                return informative_rollout_phase(self)
            return ppo.rollout_phase(self)

    def learning_phase(self, rollout: Rollout) -> LearningStats:
        """Improve the policy on a rollout; see `ppo`."""
        learning = self.weights.learning(self.callbacks.registered_events)
        if self.engine is not None:
            self.engine.is_current = False
        with self.interventions.learning(), self.forward.products(), learning:
            return ppo.learning_phase(self, rollout)

    def run_phase(self) -> PhaseReport:
        """One rollout phase and one learning phase, logged and saved."""
        return self.run_phase_on(self.rollout_phase)

    def run_phase_on(self, roll_out: Callable[[], Rollout]) -> PhaseReport:
        """One phase whose rollout is made by `roll_out`, logged and saved."""
        self.start()
        reset_reference(self)
        with self._recorded(), self.forward.products():
            began, saving = perf_counter(), self.recorder.seconds
            rollout = roll_out()
            rollout_seconds = perf_counter() - began - (self.recorder.seconds - saving)
            stats = dataclasses.replace(
                summarize(rollout),
                kl_to_start_per_sequence=kl_to_start(self, rollout),
                reference_phase=age_of_reference(self),
            )
            rates = self.scheduler.get_last_lr()
            rates = rates[0], rates[-1]  # an optimizer of one's own may have one, or several
            began = perf_counter()
            with self.interventions.learning():  # also where a subclass has its own
                learned = self.learning_phase(rollout)
            passes = self.args.batches_per_learning_phase
            seconds = rollout_seconds, perf_counter() - began
            cost = cost_of(rollout.samples, passes, *seconds, self.device)
            kl_coef = self.kl_controller.kl_coef
            report = PhaseReport(self.phase, stats, learned, *rates, kl_coef, cost)
            self.kl_controller.update(stats.kl_per_sequence, self.args.batch_size)
            self.emit("after_phase", rollout=rollout, report=report)
        self.phase, self.generated = self.phase + 1, 0
        return report

    def start(self) -> None:
        """Make the directory of a new run, and call the callbacks of its start; once."""
        if self._started:
            return
        if self.args.activation_checkpointing:
            validate_unhooked_blocks(self.policy)
        with self._recorded():
            with self.world.together("opening the run's directory"):
                if self.world.is_main:
                    self.recorder.open()
            self.directory = self.world.of_main(str(self.run.path) if self.run else None)
            self._started = True
            self.emit("run_start")

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        """Give callbacks the run's directory; a phase that is run on its own leaves no record."""
        if self._recording:
            raise ConfigError("the run is within a phase; begin the next when it is over.")
        self._recording = True
        try:
            yield
        except BaseException as error:
            self.break_off(error)
            raise
        finally:
            self._recording = False

    def break_off(self, error: BaseException) -> None:
        """Close the loggers of a run that an error ends, and let its directory go."""
        self.world.break_off(error)
        for sink in self.sinks:
            sink.break_off(error)
        self.recorder.break_off()

    def __iter__(self) -> Iterator[PhaseReport]:
        """Run the phases that are left, one `PhaseReport` each; stop and go on as you like."""
        self.stop_requested = False
        self.start()
        while self.phase < self.args.total_phases and not self.world.any(self.stop_requested):
            self.unfinished.append(self.run_phase())
            yield self.unfinished[-1]
        self.end(self.unfinished)

    def end(self, reports: list[PhaseReport]) -> None:
        """Call the callbacks of the run's end with the reports of its last part."""
        self.unfinished = []
        with self._recorded():
            self.emit("run_end", reports=reports)

    def train(self) -> list[PhaseReport]:
        """Run all phases that are left; where there is none, warn and return no report."""
        if self.phase >= self.args.total_phases:
            said = f"all {self.phase} phases are done; to train again, make another trainer."
            warnings.warn(said, stacklevel=2)
        return list(self)

    def request_stop(self) -> None:
        """Finish the phase in progress, save, and end the iteration."""
        self.stop_requested = True

    def evaluate(self) -> dict[str, float | int | None]:
        """Sample afresh from the policy as it is, and average over several batches."""
        rollouts = list(self.fresh_rollouts())
        return validate_finite(mean_of_batches(rollouts) | final_kl_to_start(self, rollouts), self)

    def fresh_rollouts(self) -> Iterator[Rollout]:
        """Several batches of fresh samples, the same ones at every call in a phase."""
        validate_finite_weights(self)
        generator = phase_generator(self.args.seed, self.phase, "evaluation")
        for batch in range(EVALUATION_BATCHES):
            samples = self.sample(self.prompts.of_batch(batch), generator, self.sampling_spec)
            yield ppo.score_samples(self, samples)

    @classmethod
    def resume(
        cls, path: str | Path, changes: Mapping[str, Any] | None = None, **parts: Any
    ) -> "RLHFTrainer":
        """A trainer that goes on where a run was last saved; see `resume_trainer`.

        Args:
            changes: new values of settings that may change: `training.resume.CHANGEABLE`.
            parts: the run's own parts, and `interventions={name: fn}`: they are not stored.
        """
        return resume_trainer(cls, RunDir.open(path), changes, parts)
