"""The trainer: holds the components of a run, iterates over phases and calls the callbacks.

The algorithm is in `ppo.py`, logs and checkpoints are in `recorder.py`.
"""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.config.presets import method_warning
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.models import Forward, compare_with_reference
from rlhf_lab.models.lora import merged_lora
from rlhf_lab.models.outputs import ReferenceComparison
from rlhf_lab.organism.language import REEL_LANGUAGE, read_language
from rlhf_lab.parallel.launcher import is_grouped
from rlhf_lab.samples import Samples
from rlhf_lab.sampling import SamplingSpec, check_context, sample
from rlhf_lab.training import components, ppo
from rlhf_lab.training.callbacks import Callback, Callbacks, Event, preserve_gradients
from rlhf_lab.training.capture import InterventionFn, Interventions, Stage, capture_at_event
from rlhf_lab.training.checkpoint import FROZEN, checksum_model
from rlhf_lab.training.kl_control import get_kl_controller, reference_stats, reset_reference
from rlhf_lab.training.objective import Objective
from rlhf_lab.training.optim import read_rates
from rlhf_lab.training.optimization import StepInBackward
from rlhf_lab.training.overrides import COMPONENTS, Overrides, describe_source, warn_if_set
from rlhf_lab.training.phase_stats import TOO_FAST
from rlhf_lab.training.prompts import Prompts, informative_rollout_phase, phase_spec
from rlhf_lab.training.recorder import Recorder
from rlhf_lab.training.report import LearningStats, PhaseReport, compute_cost
from rlhf_lab.training.resume import resume_trainer
from rlhf_lab.training.rollout import Rollout, summarize
from rlhf_lab.training.run_dir import RunDir
from rlhf_lab.training.run_loop import RunLoop
from rlhf_lab.training.sinks import attach_sinks
from rlhf_lab.training.step_graph import StepGraph


class RLHFTrainer(RunLoop):
    """Trains a policy with PPO against a reward, with a KL penalty and callbacks.

    Iterate over the trainer for one `PhaseReport` per phase, or call `train()`. `rollout_phase()`
    and `learning_phase()` also work on their own; `RunLoop` has `step` for a custom loop.

    Args:
        args: settings; they name each component that is not passed.
        out: directory of the run, which must not contain a run; `runs/PRESET-seedN`, with a number
            appended, if None. It is created when the first phase begins.
        parts: custom components and functions by name; `components.py` lists them. Reward functions
            are called once on made-up texts to check them.

    Attributes:
        custom_components: names of the components that were passed.
        sources: what a run does not store, to compare when it resumes: digests and rewarded class.
        world: processes of the run; None without torchrun.
        phase: number of learning phases that are done.
        unfinished: reports since the last run_end.

    Raises:
        ConfigError, LoadError: If a setting or component is invalid or cannot be loaded.
        RunError: If `out` contains a run.
    """

    def __init__(self, args: RLHFArgs, *, out: str | Path | None = None, **parts: Any) -> None:
        super().__init__()
        if not isinstance(args, RLHFArgs):
            raise ConfigError(f"args={args!r:.40} is not RLHFArgs. Use RLHFArgs(preset='reel').")
        if out is not None:
            RunDir(Path(out)).validate_empty()
        self.custom_components = sorted(name for name, part in parts.items() if part is not None)
        given = {name: parts.pop(name, None) for name in COMPONENTS}
        functions = parts | {name: given[name] for name in ("reward_fn", "true_reward_fn")}
        self.sources = {k: describe_source(v) for k, v in functions.items() if v is not None}
        self.args, self.phase = args, 0
        if message := method_warning(args):
            warnings.warn(message, stacklevel=2)
        self.overrides = Overrides.choose(parts)
        for name in parts.keys() & {"advantages", "policy_loss", "kl_estimator"}:
            warn_if_set(args, name, f"{name}= is set")
        self.device = components.choose_device(args)
        self.policy, self.reference = components.load_models(args, self.device, given)
        self.first_reference, self.reference_phase = self.reference, 0
        self.forward = Forward.from_args(args)
        self.objective = Objective(args, self.overrides, self.forward)
        self.tokenizer = self.policy.base_model.tokenizer
        self.sampling_spec = SamplingSpec.from_args(args, self.tokenizer)
        self.engine = components.load_engine(self, given["rollout_engine"])
        self.language = read_language(self.tokenizer) if given["policy"] is None else None
        self.speaks_reel = self.language is REEL_LANGUAGE
        is_base = not (given["reference"] or args.reference_model or args.adapter_path)
        self.starts_as_grammar = is_base and args.base_model in getattr(self.language, "models", ())
        self.prompts = Prompts(args, given["prompts"], self.policy.base_model)
        check_context(self.reference, len(self.prompt), args.gen_len, "reference")
        self.sources["prompts"] = self.prompts.digest
        self.rewards = components.make_rewards(self, given["reward_fn"], given["true_reward_fn"])
        self.sources |= components.loaded_sources(self.reward_fn, reference=self.reference)
        self.sources[FROZEN] = checksum_model(self.policy)
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
        self.kl_controller = get_kl_controller(args, given["kl_controller"])
        self.step_graph = StepGraph(self) if self.policy.device.type == "cuda" else None
        self.interventions = Interventions(self.policy, lambda: self.phase)
        self.callbacks = Callbacks()
        self.recorder = Recorder(self, out)
        self.sinks = attach_sinks(args, self.callbacks)
        self._weights = set(self.policy.parameters())

    @property
    def is_main(self) -> bool:
        """True in the process that calls callbacks and writes the run."""
        return self.world is None or self.world.is_main

    @property
    def run(self) -> RunDir | None:
        """The run's directory; None before the first phase begins."""
        return self.recorder.run

    prompt = property(lambda self: max(self.prompts.tokens, key=len))  # token ids of the longest
    reward_fn = property(lambda self: self.rewards.reward_fn)
    true_reward_fn = property(lambda self: self.rewards.true_reward_fn)

    capture = capture_at_event
    resume = classmethod(resume_trainer)

    def on(self, event: Event, every: int = 1) -> Callable[[Callback], Callback]:
        """Register a callable for each `every`-th phase of an event; ConfigError if one is bad."""
        return self.callbacks.on(event, every)

    def intervene(
        self,
        site: str,
        fn: InterventionFn,
        during: tuple[Stage, ...] = ("rollout", "learning"),
        name: str | None = None,
    ) -> None:
        """Change activations at a site with `fn(activation, where)` for the whole run.

        run.json records the intervention and `resume` requires it; see `Interventions.add`.
        """
        if self._started:
            raise ConfigError(f"The run has begun. Call intervene({site!r}) before phase 0.")
        self.interventions.add(site, fn, during, name)
        self.sources[f"intervention {self.interventions.records[-1]['name']}"] = describe_source(fn)
        if "interventions" not in self.custom_components:
            self.custom_components.append("interventions")

    def emit(self, event: Event, phase: int | None = None, **fields: Any) -> None:
        """Call the callbacks of an event, in the main process; restore gradients afterwards."""
        if self.world is not None and not self.world.is_apart:
            self.world.emit(self, event, phase, **fields)
            return
        phase = self.phase if phase is None else phase
        if not (self.callbacks.registered.get(event) and self.callbacks.entries(event, phase)):
            return
        if "grad_norm" in fields:
            fields["grad_norm"] = fields["grad_norm"].item()
        fields |= {"args": self.args, "policy": self.policy, "reference": self.reference}
        run, kl_coef = self.run if self._recording else None, self.kl_controller.kl_coef
        with preserve_gradients(self.policy, event):
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
        """Continue prompts with the policy, `at_once` sequences at a time; each process its rows.

        By default, by this phase's sampling spec and `args.generation_batch_size`.
        """
        args, policy = self.args, self.policy
        spec = phase_spec(self.sampling_spec, args, self.phase) if spec is None else spec

        def sample_rows(rows: slice) -> Samples:
            if self.engine is not None and not spec.truncates:
                seed = int(torch.randint(2**31, (), generator=generator)) + (rows.start or 0)
                return self.engine.sample(prompts[rows], spec, seed)
            settings = self.forward, at_once or args.generation_batch_size
            with merged_lora(policy):
                return sample(policy, prompts, spec, generator, *settings, rows)

        if self.world is None:
            samples = sample_rows(slice(0, len(prompts)))
        else:
            samples = self.world.sample(sample_rows, len(prompts), self.tokenizer.pad_token_id or 0)
        if not bool(samples.logprobs.isfinite().all()):
            raise RunError(
                f"The log-probs of samples are not finite in phase {self.phase}. {TOO_FAST}; what "
                "was saved before is intact."
            )
        return samples

    def compare_with_reference(self, samples: Samples) -> ReferenceComparison:
        """Compute KL, entropy and the reference's residuals; each process computes its rows."""
        settings = self.args.temperature, self.args.rows_at_once, self.forward

        def compare(rows: Samples) -> ReferenceComparison:
            return compare_with_reference(self.policy, self.reference, rows, *settings)

        if self.world is None:
            return compare(samples)
        return self.world.compute_by_rank(samples, compare, "comparing with the reference")

    def rollout_phase(self) -> Rollout:
        """Sample a batch, score it, and compute everything that learning needs; see `ppo`."""
        with self.forward.products():
            if self.args.dynamic_sampling is not None:
                return informative_rollout_phase(self)
            return ppo.rollout_phase(self)

    def learning_phase(self, rollout: Rollout) -> LearningStats:
        """Improve the policy on a rollout; see `ppo`. Only `run_phase` also adds 1 to `phase`."""
        if not self._recording:
            if self.phase in self._learned_alone:
                message = "learning_phase ran twice in one phase. Use run_phase()."
                warnings.warn(message, stacklevel=2)
            self._learned_alone.add(self.phase)
        if self.engine is not None:
            self.engine.is_current = False
        world = nullcontext() if self.world is None else self.world.learning()
        self.interventions.stage = "learning"
        try:
            with self.forward.products(), world:
                return ppo.learning_phase(self, rollout)
        finally:
            self.interventions.stage = "rollout"

    def run_phase(self, rollout_fn: Callable[[], Rollout] | None = None) -> PhaseReport:
        """Run, log and save one rollout phase, or `rollout_fn`, and one learning phase."""
        self.start()
        if self.phase == self.args.total_phases:
            warnings.warn(
                f"The phases from here on are beyond total_phases={self.phase}, where the schedule "
                "of the learning rates ends. Set it to the number of all phases.",
                stacklevel=2,
            )
        reset_reference(self)
        with self._recorded(), self.forward.products():
            start = perf_counter()
            rollout = self.rollout_phase() if rollout_fn is None else rollout_fn()
            seconds = perf_counter() - start
            stats = dataclasses.replace(summarize(rollout), **reference_stats(self, rollout))
            rates, kl_coef = read_rates(self.policy, self.scheduler), self.kl_controller.kl_coef
            start = perf_counter()
            self.interventions.stage = "learning"  # also if a subclass overrides learning_phase
            try:
                learned = self.learning_phase(rollout)
            finally:
                self.interventions.stage = "rollout"
            cost = compute_cost(rollout.samples, self.args, seconds, perf_counter() - start)
            report = PhaseReport(self.phase, stats, learned, *rates, kl_coef, cost)
            new = self.kl_controller.update(stats.kl_per_sequence, self.args.batch_size)
            if new not in (None, self.kl_controller.kl_coef):
                raise ConfigError(f"kl_controller.update returned {new} but did not set kl_coef.")
            self.emit("after_phase", rollout=rollout, report=report)
        self.phase, self.generated = self.phase + 1, 0
        return report
