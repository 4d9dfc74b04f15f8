"""Attachment of probes to a trainer: the callbacks that call them, store records and keep time."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.probes.budget import Budget, Planned, Timing, fit_plan
from rlhf_lab.probes.probe import EvalText, Observation, Probe, Record, RunShape
from rlhf_lab.probes.reel_truth import ReelTruth
from rlhf_lab.probes.store import ProbeStore
from rlhf_lab.training import Context, Event, RLHFTrainer
from rlhf_lab.training.capture import capture_activations, resolve_sites, text_at, undisturbed

Acts = dict[str, Tensor]
GRACE_SECONDS = 2.0
INSIDE = (
    "after_rollout",
    "after_score",
    "before_minibatch",
    "after_loss",
    "after_backward",
    "after_step",
)
ONCE = TRUTH, REFERENCE = "reel_truth", "reference"


class Attachment:
    """Some probes on one run; made by `Suite.attach`.

    Args:
        probes: with names of their own.
        text: the eval text, for probes that want it.
        budget: what they may cost.
        trainer: whose run they look at from now on.

    Attributes:
        plan: how often each probe is called, after thinning.
        notes: what was thinned, refused or switched off, in words.
    """

    def __init__(
        self,
        probes: Sequence[Probe],
        text: EvalText | None,
        budget: Budget,
        trainer: RLHFTrainer,
    ) -> None:
        _refuse_taken_names(probes, trainer)
        self.attached, self.text, self.budget = tuple(probes), text, budget
        self.probes = {probe.name: probe for probe in probes}
        self.truth = (
            ReelTruth.of_reward(trainer.args.reward_fn) if trainer.starts_as_grammar else None
        )
        self.prefix_len, self.own_parts = len(trainer.prompt), trainer.own_parts
        self.shape = self._shape(trainer)
        self.notes: list[str] = []
        self.timing = Timing()
        self._untold: list[tuple[str, str]] = []
        self._store: ProbeStore | None = None
        self._reference_acts: Acts = {}
        for probe in probes:
            resolve_sites(trainer.policy.base_model, probe.sites)
        first = [Planned(p.name, p.every, p.cost(self.shape), p.text == "eval") for p in probes]
        self.plan, notes = fit_plan(first, self.shape, self.budget)
        for name, note in notes:
            self._say(name, note)
        self._register(trainer)

    def _shape(self, trainer: RLHFTrainer) -> RunShape:
        args, cfg = trainer.args, trainer.policy.base_model.cfg
        return RunShape(
            phases=args.total_phases,
            batch=args.batch_size,
            prefix_len=self.prefix_len,
            gen_len=args.gen_len,
            passes=args.batches_per_learning_phase,
            eval_tokens=0 if self.text is None else self.text.tokens.numel(),
            n_layers=cfg.n_layers,
            d_model=cfg.d_model,
            d_vocab=cfg.d_vocab,
            n_parameters=sum(p.numel() for p in trainer.policy.parameters()),
            num_minibatches=args.num_minibatches,
        )

    def recording(self) -> set[str]:
        """The probes that are called: neither refused nor switched off."""
        return {planned.name for planned in self.plan if planned.every} & self.probes.keys()

    def _register(self, trainer: RLHFTrainer) -> None:
        events: dict[Event, None] = {"run_start": None, "after_phase": None, "run_end": None}
        for probe in self.attached:
            events |= dict.fromkeys(probe.events)
        for event in events:
            trainer.on(event)(self._at)

    def _at(self, ctx: Context) -> None:
        """Everything that happens at one event."""
        if ctx.run is None:
            return
        if self._store is None or ctx.event == "run_start":
            self._begin(ctx)
        due = [
            self.probes[planned.name]
            for planned in self.plan
            if planned.every and planned.name in self.probes and self._is_due(planned, ctx)
        ]
        if due:
            with undisturbed(ctx.policy, ctx.reference):
                self._show(ctx, due)
        if ctx.event == "after_phase":
            self._measure(ctx)

    def _is_due(self, planned: Planned, ctx: Context) -> bool:
        probe = self.probes[planned.name]
        if ctx.event not in probe.events:
            return False
        if probe.step is not None and hasattr(ctx, "step"):
            steps = ctx.args.num_minibatches * ctx.args.batches_per_learning_phase
            if ctx.step != (0 if probe.step == "first" else steps - 1):
                return False
        return ctx.event in ("run_start", "run_end") or ctx.phase % planned.every == 0

    def _begin(self, ctx: Context) -> None:
        """Make the store of a new run, or rewind that of a resumed one."""
        self._store = ProbeStore(ctx.run)
        self._store.rewind(ctx.phase, [probe.name for probe in self.attached])
        every = {planned.name: planned.every for planned in self.plan}
        probes = [probe.settings() | {"every": every[probe.name]} for probe in self.attached]
        budget = {"mb": self.budget.mb, "time_frac": self.budget.time_frac}
        eval_shape = None if self.text is None else list(self.text.tokens.shape)
        self._store.write_suite({"probes": probes, "budget": budget, "eval_tokens": eval_shape})
        if self.truth is not None:
            began = perf_counter()
            _ = self.truth.graph
            self.timing.note(TRUTH, perf_counter() - began, ctx.event in INSIDE)
        for name, note in self._untold:
            self._store.note(ctx.phase, name, note)
        self._untold = []

    def _show(self, ctx: Context, due: list[Probe]) -> None:
        """Run the forwards that the due probes share, and call each of them."""
        began, noted = perf_counter(), self.timing.seconds.get(REFERENCE, 0.0)
        shared = {text: self._shared(ctx, due, text) for text in ("eval", "rollout")}
        reference_seconds = self.timing.seconds.get(REFERENCE, 0.0) - noted
        forward_seconds = perf_counter() - began - reference_seconds
        looking = [probe for probe in due if probe.text is not None]
        for probe in due:
            began = perf_counter()
            try:
                self._store.write(probe.name, ctx.phase, self._call(ctx, probe, shared))
            except Exception as error:
                self._switch_off(ctx, probe, error)
            own_share = forward_seconds / len(looking) if probe in looking else 0.0
            seconds = perf_counter() - began + own_share
            self.timing.note(probe.name, seconds, ctx.event in INSIDE)

    def _shared(self, ctx: Context, due: list[Probe], text: str) -> tuple[Acts, Acts] | None:
        """The activations that all due probes want; None when one of them spoils it for all."""
        try:
            return self._activations(ctx, [probe for probe in due if probe.text == text], text)
        except Exception:
            return None

    def _call(
        self, ctx: Context, probe: Probe, shared: dict[str, tuple[Acts, Acts] | None]
    ) -> Record:
        """Show a probe what it wants to see; its record must hold a check."""
        acts, reference_acts = {}, {}
        if probe.text is not None:
            sites = resolve_sites(ctx.policy.base_model, probe.sites)
            found = shared[probe.text] or self._activations(ctx, [probe], probe.text)
            acts, reference_acts = (_at_sites(captured, sites, probe.pos) for captured in found)
        seen = Observation(
            ctx=ctx,
            args=ctx.args,
            prefix_len=self.prefix_len,
            own_parts=self.own_parts,
            acts=acts,
            reference_acts=reference_acts,
            text=self.text,
            truth=self.truth,
        )
        record = probe.observe(seen)
        if not record.checks:
            raise ConfigError(f"{probe.name} returned a record without a check; add one.")
        return record

    def _activations(self, ctx: Context, probes: list[Probe], text: str) -> tuple[Acts, Acts]:
        """The policy's and the reference's activations at all sites that these probes want.

        The reference's on the eval text never change and are captured once.
        """
        sites = [site for probe in probes for site in probe.sites]
        if not sites:
            return {}, {}
        if text == "rollout":
            tokens, mask = text_at(ctx)
            return capture_activations(ctx.policy, tokens, sites, attention_mask=mask), {}
        acts = capture_activations(ctx.policy, self.text.tokens, sites)
        wanted = resolve_sites(ctx.reference, [site for site in sites if site != "values"])
        missing = [site for site in wanted if site not in self._reference_acts]
        if missing:
            began = perf_counter()
            new = capture_activations(ctx.reference, self.text.tokens, missing)
            self._reference_acts |= new
            self.timing.note(REFERENCE, perf_counter() - began, ctx.event in INSIDE)
        return acts, self._reference_acts

    def _switch_off(self, ctx: Context, probe: Probe, error: Exception) -> None:
        """Drop a probe that raised; the run and the other probes go on."""
        self.probes.pop(probe.name)
        self._say(
            probe.name,
            f"raised {type(error).__name__} at {ctx.event} of phase {ctx.phase} and is switched "
            f"off: {error}",
            ctx.phase,
        )

    def _say(self, probe: str, note: str, phase: int = 0) -> None:
        """Warn, remember, and store it as soon as there is a store."""
        warnings.warn(f"{probe}: {note}", stacklevel=2)
        self.notes.append(f"{probe}: {note}")
        if self._store is None:
            self._untold.append((probe, note))
        else:
            self._store.note(phase, probe, note)

    def _measure(self, ctx: Context) -> None:
        """Project the measured time to the end of the run, and thin what is over budget.

        1. Time per phase: what the trainer measured, less what the probes took of it.
        2. Time of the probes: what they took so far, and the calls that are left at the pace of the
           fastest, since the first call of each also warms up.
        3. Under 2 seconds in all, nothing is thinned.
        """
        cost, timing = ctx.report.cost, self.timing
        spent = cost.rollout_seconds + cost.learning_seconds - timing.this_phase
        timing.run_seconds += max(spent, 0.0)
        timing.phases, timing.this_phase = timing.phases + 1, 0.0
        left = self.shape.phases - ctx.phase - 1
        run = timing.run_seconds * (timing.phases + left) / timing.phases
        projected = {p.name: self._projected(p, ctx.phase, left) for p in self.plan}
        seconds = sum(timing.seconds.get(name, 0.0) for name in ONCE) + sum(projected.values())
        share = seconds / run if run else math.inf
        if share > self.budget.time_frac and seconds >= GRACE_SECONDS and left:
            self._thin_slowest(projected, share, ctx.phase)

    def _thin_slowest(self, projected: dict[str, float], share: float, phase: int) -> None:
        """Call the probe that takes most time half as often from now on."""
        worst = max(
            (p for p in self.plan if p.every and p.name in self.probes),
            key=lambda p: projected[p.name],
            default=None,
        )
        if worst is None or worst.every >= self.shape.phases:
            return
        self.plan = [replace(p, every=p.every * 2) if p is worst else p for p in self.plan]
        self._say(
            worst.name,
            f"every {worst.every} phases -> every {worst.every * 2}, because a projected "
            f"{share:.0%} of the run's time is over time_frac={self.budget.time_frac}.",
            phase,
        )

    def _projected(self, planned: Planned, phase: int, left: int) -> float:
        """Seconds of a probe over the whole run, at its fastest call so far."""
        gone = not planned.every or planned.name not in self.probes
        if gone or planned.name not in self.timing.seconds:
            return self.timing.seconds.get(planned.name, 0.0)
        due_later = sum(p % planned.every == 0 for p in range(phase + 1, phase + 1 + left))
        due_later += "run_end" in self.probes[planned.name].events
        return self.timing.seconds[planned.name] + self.timing.fastest[planned.name] * due_later


def _at_sites(acts: Acts, sites: list[str], pos: int | None) -> Acts:
    """The activations of those sites that are there, at one position or at all."""
    there = {site: acts[site] for site in sites if site in acts}
    return {site: act if pos is None else act[:, pos] for site, act in there.items()}


def _refuse_taken_names(probes: Sequence[Probe], trainer: RLHFTrainer) -> None:
    """Keep two probes from writing into one file."""
    owners = [getattr(listener, "__self__", None) for listener in trainer.callbacks.listeners()]
    taken = {
        name for owner in owners if isinstance(owner, Attachment) for name in owner.recording()
    }
    for probe in probes:
        if probe.name in taken:
            raise ConfigError(
                f"a probe named {probe.name!r} is attached to this run already; give one of them "
                "name=."
            )
