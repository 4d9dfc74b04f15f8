"""The trainer: holds the components of a run, iterates over phases and calls the callbacks.

The algorithm is in `ppo.py`, logs and checkpoints are in `recorder.py`.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from rlhf_lab.config import RLHFArgs
from rlhf_lab.models import Forward, ReferenceComparison
from rlhf_lab.organism.bundled import BUNDLED
from rlhf_lab.organism.tokenizer import speaks_reel
from rlhf_lab.parallel.launcher import is_grouped
from rlhf_lab.samples import Samples
from rlhf_lab.sampling import SamplingSpec
from rlhf_lab.training import components, ppo
from rlhf_lab.training.callbacks import Callback, Callbacks, Event
from rlhf_lab.training.capture import Position, capturing
from rlhf_lab.training.custom_components import validate_component_kinds
from rlhf_lab.training.diagnostics import validate_finite, validate_finite_weights
from rlhf_lab.training.dynamic_sampling import informative_rollout_phase
from rlhf_lab.training.interventions import STAGES, InterventionFn, Interventions, Stage
from rlhf_lab.training.isolation import preserve_gradients
from rlhf_lab.training.kl_control import get_kl_controller
from rlhf_lab.training.objective import Objective
from rlhf_lab.training.optimization import StepInBackward
from rlhf_lab.training.overrides import Overrides
from rlhf_lab.training.prompts import Prompts
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
from rlhf_lab.training.run_loop import RunLoop
from rlhf_lab.training.sinks import attach_sinks

EVALUATION_BATCHES = 4


class RLHFTrainer(RunLoop):
    """Trains a policy with PPO against a reward, with a KL penalty and callbacks.

    Iterate over the trainer for one `PhaseReport` per phase, or call `train()`. `rollout_phase()`
    and `learning_phase()` also work on their own; `RunLoop` has `step` for a custom loop.

    Args:
        args: settings; they name each component that is not passed.
        out: directory of the run, which must not contain a run; `runs/PRESET-seedN`, with a number
            appended, if None. It is created when the first phase begins.
        parts: custom components and functions by name; `components.py` lists them.

    Attributes:
        custom_components: names of the components that were passed.
        world: processes of the run; None without torchrun.
        phase: number of learning phases that are done.
        unfinished: reports since the last run_end.

    Raises:
        ConfigError, LoadError: If a setting or component is invalid or cannot be loaded.
        RunError: If `out` contains a run.
    """

    def __init__(self, args: RLHFArgs, *, out: str | Path | None = None, **parts: Any) -> None:
        if out is not None:
            RunDir.at(out).validate_empty()
        given, functions = components.split_components(parts)
        validate_component_kinds(args, given)
        self.custom_components = sorted(name for name, part in parts.items() if part is not None)
        self.args, self.phase = args, 0
        self.overrides = Overrides.choose(functions, args)
        self.device = components.choose_device(args)
        self.policy, self.reference = components.load_models(args, self.device, given)
        self.first_reference, self.reference_phase = self.reference, 0
        self.forward = Forward.from_args(args)
        self.objective = Objective(args, self.overrides, self.forward)
        self.tokenizer = self.policy.base_model.tokenizer
        self.sampling_spec = SamplingSpec.from_args(args, self.tokenizer)
        self.engine = components.load_engine(self, given["rollout_engine"])
        self.speaks_reel = speaks_reel(self.tokenizer) and given["policy"] is None
        self.starts_as_grammar = self.speaks_reel and args.base_model in BUNDLED
        self.prompts = Prompts(args, given["prompts"], self.policy.base_model)
        self.rewards = components.make_rewards(self, given["reward_fn"], given["true_reward_fn"])
        self.world = None
        if is_grouped(args.parallel):
            from rlhf_lab.parallel.world import connect  # imports much of torch

            self.world = connect(self, given["optimizer"])
        self.optimizer, self.scheduler = components.make_optimizer(
            args, self.policy, given["optimizer"], given["scheduler"]
        )
        in_backward = args.optimizer_in_backward
        self.step_in_backward = StepInBackward(self.optimizer) if in_backward else None
        if self.world is not None:
            self.world.open()
        controller = given["kl_controller"]
        self.kl_controller = get_kl_controller(args) if controller is None else controller
        self.stage: Stage = "rollout"
        self.interventions = Interventions(self.policy, lambda: (self.phase, self.stage))
        self.callbacks = Callbacks()
        self.recorder = Recorder(self, out)
        self.sinks = attach_sinks(args, self.callbacks)
        self.generated, self.stop_requested = 0, False
        self.directory: str | None = None  # of the run, known to each of several processes
        self.unfinished: list[PhaseReport] = []
        self._started = self._recording = False

    @property
    def is_main(self) -> bool:
        """True in the process that calls callbacks and writes the run."""
        return self.world is None or self.world.is_main

    @property
    def run(self) -> RunDir | None:
        """The run's directory; None before the first phase begins."""
        return self.recorder.run

    @property
    def prompt(self) -> list[int]:
        """Token ids of the longest prompt."""
        return max(self.prompts.tokens, key=len)

    reward_fn = property(lambda self: self.rewards.reward_fn)
    true_reward_fn = property(lambda self: self.rewards.true_reward_fn)

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
        """Register the decorated `function(ctx, acts)` to read activations; see `capturing`."""
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

        run.json records the intervention and `resume` requires it; see `Interventions.add`.
        """
        self.interventions.validate_not_started(self._started, site)
        self.interventions.add(site, fn, during, name)
        if "interventions" not in self.custom_components:
            self.custom_components.append("interventions")

    def emit(self, event: Event, phase: int | None = None, **fields: Any) -> None:
        """Call the callbacks of an event, in the main process; restore gradients afterwards."""
        if self.world is not None and not self.world.is_apart:
            self.world.emit(self, event, phase, fields)
            return
        if not self.callbacks.registered.get(event):
            return
        if "grad_norm" in fields:
            fields["grad_norm"] = fields["grad_norm"].item()
        fields |= {"args": self.args, "policy": self.policy, "reference": self.reference}
        run, kl_coef = self.run if self._recording else None, self.kl_controller.kl_coef
        with preserve_gradients(self.policy, event):
            phase = self.phase if phase is None else phase
            self.callbacks.emit(event, phase, kl_coef=kl_coef, run=run, **fields)

    def next_prompts(self) -> list[list[int]]:
        """Return the prompt of each row of this phase's batch, grouped by prompt."""
        return self.prompts.of_batch(self.phase)

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        generator: torch.Generator,
        spec: SamplingSpec | None = None,
        at_once: int | None = None,
    ) -> Samples:
        """Continue prompts with the policy.

        Args:
            spec: this phase's sampling spec if None.
            at_once: sequences to generate at a time; `args.generation_batch_size` if None.
        """
        return components.sample_prompts(self, prompts, generator, spec, at_once)

    def compare_with_reference(self, samples: Samples) -> ReferenceComparison:
        """Compute KL, entropy and the reference's residuals; see `models.outputs`."""
        return components.compare_samples(self, samples)

    def rollout_phase(self) -> Rollout:
        """Sample a batch, score it, and compute everything that learning needs; see `ppo`."""
        with self.forward.products():
            if self.args.dynamic_sampling is not None:
                return informative_rollout_phase(self)
            return ppo.rollout_phase(self)

    def learning_phase(self, rollout: Rollout) -> LearningStats:
        """Improve the policy on a rollout; see `ppo`."""
        with self._learning():
            return ppo.learning_phase(self, rollout)

    @contextmanager
    def _learning(self) -> Iterator[None]:
        """Context of a learning phase; entered twice if a subclass overrides learning_phase."""
        if self.stage == "learning":
            yield
            return
        if self.engine is not None:
            self.engine.is_current = False
        world = nullcontext() if self.world is None else self.world.learning(self.callbacks)
        self.stage = "learning"
        try:
            with self.forward.products(), world:
                yield
        finally:
            self.stage = "rollout"

    def run_phase(self, rollout_fn: Callable[[], Rollout] | None = None) -> PhaseReport:
        """Run, log and save one rollout phase, or `rollout_fn`, and one learning phase."""
        self.start()
        reset_reference(self)
        with self._recorded(), self.forward.products():
            began, saving = perf_counter(), self.recorder.seconds
            rollout = self.rollout_phase() if rollout_fn is None else rollout_fn()
            rollout_seconds = perf_counter() - began - (self.recorder.seconds - saving)
            stats = dataclasses.replace(
                summarize(rollout),
                kl_to_initial_per_sequence=kl_to_start(self, rollout),
                reference_phase=age_of_reference(self),
            )
            rates = self.scheduler.get_last_lr()
            rates = rates[0], rates[-1]  # a custom optimizer has any number of groups
            began = perf_counter()
            with self._learning():
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

    def evaluate(self) -> dict[str, float | int | None]:
        """Average over several batches of fresh samples."""
        rollouts = list(self.fresh_rollouts())
        return validate_finite(mean_of_batches(rollouts) | final_kl_to_start(self, rollouts), self)

    def fresh_rollouts(self) -> Iterator[Rollout]:
        """Sample and score several batches, the same ones at every call in a phase."""
        validate_finite_weights(self)
        generator = phase_generator(self.args.seed, self.phase, "evaluation")
        for batch in range(EVALUATION_BATCHES):
            samples = self.sample(self.prompts.of_batch(batch), generator, self.sampling_spec)
            yield ppo.score_samples(self, samples)

    @classmethod
    def resume(
        cls, path: str | Path, changes: Mapping[str, Any] | None = None, **parts: Any
    ) -> "RLHFTrainer":
        """Return a trainer that continues where a run was last saved; see `resume_trainer`.

        Args:
            changes: new values of settings; `training.resume.CHANGEABLE` lists them.
            parts: the run's custom components and `interventions={name: fn}`, which are not stored.
        """
        return resume_trainer(cls, RunDir.open(path), changes, parts)
