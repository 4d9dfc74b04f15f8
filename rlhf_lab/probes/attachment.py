"""Attachment of probes to a trainer: the callbacks that call them, and what they may cost."""

import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter

from rlhf_lab.errors import ConfigError
from rlhf_lab.probes.budget import MEGABYTE, NOTE_BYTES, Budget, bytes_at_most
from rlhf_lab.probes.eval_text import EvalText
from rlhf_lab.probes.probe import Check, Observation, Probe, Record
from rlhf_lab.probes.reel_truth import truth_of
from rlhf_lab.probes.shown import Acts, SharedActs, gradients_at, prompt_length
from rlhf_lab.probes.store import EVAL_TEXT, SUITE, ProbeStore, size_of
from rlhf_lab.training import Context, RLHFTrainer
from rlhf_lab.training.capture import resolve_sites
from rlhf_lab.training.isolation import no_side_effects

Taken = defaultdict[str, Counter]
GRACE_SECONDS = 2.0
OUTSIDE = ("run_start", "after_phase", "checkpoint", "run_end")
"""The events that the times of a phase's report do not include."""
TRUTH, REFERENCE, EARLIER, NOTES = "reel_truth", "reference", "earlier", "notes"


class Attachment:
    """Some probes on one run, within a budget; made by `Suite.attach`.

    Attributes:
        plan: the probes that are called, neither refused nor switched off, and every how many
            phases.
        notes: what was thinned, refused or switched off, in words.
        seconds: what each probe took in each phase; beside the probes, what is done only once.
        bytes: what each stored in each phase; beside the probes, notes, and what was there before.
    """

    def __init__(
        self, probes: Sequence[Probe], text: EvalText | None, budget: Budget, trainer: RLHFTrainer
    ) -> None:
        _refuse_taken_names(probes, trainer)
        self.probes = {probe.name: probe for probe in probes}
        self.plan = {probe.name: probe.every for probe in probes}
        self.text, self.budget, self.phases = text, budget, trainer.args.total_phases
        own = trainer.reward_fn if "reward_fn" in trainer.custom_components else None
        self.truth, self._of_true_reward = None, ""
        if trainer.starts_as_grammar:
            self.truth, self._of_true_reward = truth_of(trainer.args.reward_fn, own)
        self.prefix_len, self.custom_components = len(trainer.prompt), trainer.custom_components
        self.notes: list[str] = []
        self.seconds: Taken = defaultdict(Counter)
        self.bytes: Taken = defaultdict(Counter)
        self._within_phase, self._run_seconds = 0.0, []
        self._store: ProbeStore | None = None
        self._shared = SharedActs(text)
        self._failed: set[tuple[str, str]] = set()
        self._remark = trainer.recorder.remark
        self._optimizer, self._objective = trainer.optimizer, trainer.objective
        self._prepared: dict[str, object] = {}
        events = dict.fromkeys(("run_start", "after_phase", "run_end"))
        for probe in probes:
            resolve_sites(trainer.policy.base_model, probe.sites)
            probe.check_model(trainer.policy.base_model)
            probe.check_run(trainer)
            events |= dict.fromkeys((*probe.events, *probe.prepares))
        registers = [trainer.on(event) for event in events]
        for register in registers:  # all, or none where an event is refused
            register(self._at)

    def _at(self, ctx: Context) -> None:
        """Everything that happens at one event."""
        if ctx.run is None:
            return
        if self._store is None or ctx.event == "run_start":
            self._begin(ctx)
        due = [self.probes[name] for name in self.plan if self._is_due(self.probes[name], ctx)]
        if due:
            gradients = gradients_at(ctx)
            with no_side_effects(ctx.policy, ctx.reference):
                self._show(ctx, due, gradients)
        if ctx.event == "after_phase":
            self._keep_to_budget(ctx)

    def _is_due(self, probe: Probe, ctx: Context) -> bool:
        if ctx.event not in (*probe.events, *probe.prepares):
            return False
        if probe.step is not None and hasattr(ctx, "step"):
            steps = ctx.args.num_minibatches * ctx.args.batches_per_learning_phase
            if ctx.step != (0 if probe.step == "first" else steps - 1):
                return False
        return ctx.event in ("run_start", "run_end") or ctx.phase % self.plan[probe.name] == 0

    def _begin(self, ctx: Context) -> None:
        """Make the store of a new run, or rewind that of a resumed one."""
        self._store = ProbeStore(ctx.run)
        self._store.rewind(ctx.phase, list(self.probes))
        self.bytes[EARLIER][ctx.phase] = sum(map(self._store.stored_bytes, self.probes))
        probes = [
            probe.settings() | {"every": self.plan[name]} for name, probe in self.probes.items()
        ]
        budget = {"mb": self.budget.mb, "time_frac": self.budget.time_frac}
        eval_shape = None if self.text is None else list(self.text.tokens.shape)
        self._store.write_suite({"probes": probes, "budget": budget, "eval_tokens": eval_shape})
        if self.text is not None and self.text.kept:
            self._store.keep_text(self.text)
        for file in (SUITE, EVAL_TEXT):
            self.bytes[EARLIER][ctx.phase] += size_of(self._store.path / file)
        if self.truth is not None:
            began = perf_counter()
            _ = self.truth.graph
            self._note_time(ctx, TRUTH, perf_counter() - began)
        for probe in self.probes.values():
            is_new = not self._store.stored_bytes(probe.name)
            if probe.exact_reward and self._of_true_reward and is_new:
                self._say(ctx, probe.name, self._of_true_reward)

    def _show(self, ctx: Context, due: list[Probe], gradients: Acts) -> None:
        """Run the forwards that the due probes share, and call each of them."""
        began, noted = perf_counter(), self.seconds[REFERENCE].total()
        shared: dict[str, tuple[Acts, Acts]] = {}
        for text in ("eval", "rollout"):
            with suppress(Exception):  # a site that spoils it for all is found out in its own call
                wanting = [probe for probe in due if probe.text == text]
                shared[text] = self._activations(ctx, wanting, text)
        reference_seconds = self.seconds[REFERENCE].total() - noted
        forward_seconds = perf_counter() - began - reference_seconds
        looking = [probe for probe in due if probe.text is not None]
        for probe in due:
            began = perf_counter()
            try:
                self._keep(ctx, probe, self._call(ctx, probe, shared, gradients))
            except Exception as error:
                note = f"raised {type(error).__name__} at {ctx.event} of phase {ctx.phase} and is "
                self._say(ctx, probe.name, f"{note}switched off: {error}")
                self.plan.pop(probe.name)
            own_share = forward_seconds / len(looking) if probe in looking else 0.0
            self._note_time(ctx, probe.name, perf_counter() - began + own_share)

    def _call(
        self, ctx: Context, probe: Probe, shared: dict[str, tuple[Acts, Acts]], gradients: Acts
    ) -> Record | None:
        """Show a probe what it wants to see; its record must hold a check.

        At an event that it prepares at, what it returns is kept for its next call, and there is no
        record.
        """
        acts, reference_acts = {}, {}
        if probe.text is not None:
            found = shared.get(probe.text) or self._activations(ctx, [probe], probe.text)
            model = ctx.policy.base_model
            acts, reference_acts = (self._shared.at(each, model, probe) for each in found)
        seen = Observation(
            ctx=ctx,
            args=ctx.args,
            prefix_len=prompt_length(ctx, self.prefix_len),
            custom_components=self.custom_components,
            acts=acts,
            reference_acts=reference_acts,
            text=self.text,
            truth=self.truth,
            gradients=gradients,
            optimizer=self._optimizer,
            objective=self._objective,
            prepared=self._prepared.pop(probe.name, None),
        )
        if ctx.event in probe.prepares:
            self._prepared[probe.name] = probe.prepare(seen)
        if probe.prepares and seen.prepared is None:  # also where it was attached in between
            return None
        return self._observe(probe, seen)

    def _observe(self, probe: Probe, seen: Observation) -> Record:
        record = probe.observe(seen)
        if not record.checks:
            raise ConfigError(f"{probe.name} returned a record without a check; add one.")
        return record

    def _activations(self, ctx: Context, probes: list[Probe], text: str) -> tuple[Acts, Acts]:
        """Activations at all sites that these probes want: the policy's, and the reference's."""
        acts = self._shared.of_policy(ctx, probes, text)
        if text == "rollout":
            return acts, {}
        began = perf_counter()
        reference_acts = self._shared.of_reference(ctx, probes)
        self._note_time(ctx, REFERENCE, perf_counter() - began)
        return acts, reference_acts

    def _keep(self, ctx: Context, probe: Probe, record: Record | None) -> None:
        """Store a record, if there is one, or refuse the probe when there is no room for it."""
        if record is None:
            return
        size = bytes_at_most(record)
        stored = sum(taken.total() for taken in self.bytes.values())
        reserved = max(0, NOTE_BYTES * len(self.probes) - self.bytes[NOTES].total())
        if stored + reserved + size > self.budget.mb * MEGABYTE:
            self._say(
                ctx,
                probe.name,
                f"refused, because its record of {size / MEGABYTE:.3g} MB and the "
                f"{stored / MEGABYTE:.3g} MB that are stored are over mb={self.budget.mb}.",
            )
            self.plan.pop(probe.name)
            return
        self.bytes[probe.name][ctx.phase] += self._store.write(probe.name, ctx.phase, record)
        for check in record.checks:
            if not check.ok:
                self._say_failed(ctx, probe.name, check)

    def _note_time(self, ctx: Context, name: str, seconds: float) -> None:
        self.seconds[name][ctx.phase] += seconds
        self._within_phase += 0.0 if ctx.event in OUTSIDE else seconds

    def _say(self, ctx: Context, probe: str, note: str) -> None:
        """Warn, remember and store."""
        warnings.warn(f"{probe}: {note}", stacklevel=2)
        self.notes.append(f"{probe}: {note}")
        self.bytes[NOTES][ctx.phase] += self._store.note(ctx.phase, probe, note)

    def _say_failed(self, ctx: Context, probe: str, check: Check) -> None:
        """Warn of a check that fails, and remark it in the run; once for each check of a probe."""
        if (probe, check.name) in self._failed:
            return
        self._failed.add((probe, check.name))
        what = f"the check '{check.name}' misses by {check.value:.3g}, with {check.tolerance:.3g}"
        text = f"{probe}: {what} allowed; do not rely on this record."
        warnings.warn(f"phase {ctx.phase}: {text}", stacklevel=2)
        self._remark(f"{probe}: {check.name}", ctx.phase, text)

    def _keep_to_budget(self, ctx: Context) -> None:
        """Project what was measured to the end of the run, and thin what is over budget.

        1. Time per phase: what the trainer measured, less what the probes took of it.
        2. Time of the probes: what they took so far, and the calls that are left at the pace of the
           fastest, since the first call of each also warms up. Likewise their megabytes.
        3. Under 2 seconds in all, nothing is thinned for its time.
        """
        cost, budget, left = ctx.report.cost, self.budget, self.phases - ctx.phase - 1
        spent = cost.rollout_seconds + cost.learning_seconds - self._within_phase
        self._run_seconds.append(max(spent, 0.0))
        self._within_phase = 0.0
        if not left:
            return
        phases = len(self._run_seconds)
        run = sum(self._run_seconds) * (phases + left) / phases
        projected = self._projected(self.seconds, ctx.phase)
        seconds = sum(projected.values())
        share = seconds / run if run else math.inf
        if share > budget.time_frac and seconds >= GRACE_SECONDS:
            over = f"{share:.0%} of the run's time is over time_frac={budget.time_frac}"
            self._thin_largest(ctx, projected, over)
        projected = self._projected(self.bytes, ctx.phase)
        megabytes = sum(projected.values()) / MEGABYTE
        if megabytes > budget.mb:
            self._thin_largest(ctx, projected, f"{megabytes:.3g} MB is over mb={budget.mb}")

    def _projected(self, taken: Taken, phase: int) -> dict[str, float | int]:
        """What each takes over the whole run, if every call left takes as little as the least."""
        return {
            name: by_phase.total() + min(by_phase.values(), default=0) * self._calls(name, phase)
            for name, by_phase in taken.items()
        }

    def _calls(self, name: str, phase: int) -> int:
        """The phases after this one in which a probe is due, the end of the run included."""
        if name not in self.plan:
            return 0
        due = (self.phases - 1) // self.plan[name] - phase // self.plan[name]
        return due + ("run_end" in self.probes[name].events)

    def _thin_largest(self, ctx: Context, projected: dict[str, float | int], over: str) -> None:
        """Call the probe that takes most half as often from now on."""
        worst = max(self.plan, key=lambda name: projected.get(name, 0.0), default=None)
        if worst is None or self.plan[worst] >= self.phases:
            return
        every = self.plan[worst]
        self.plan[worst] = 2 * every
        self._say(
            ctx,
            worst,
            f"every {every} phases -> every {2 * every}, because a projected {over}; a larger "
            "budget=Budget(...) leaves it as it was.",
        )


def _refuse_taken_names(probes: Sequence[Probe], trainer: RLHFTrainer) -> None:
    """Keep two probes from writing into one file."""
    owners = [getattr(listener, "__self__", None) for listener in trainer.callbacks.listeners()]
    taken = {name for owner in owners if isinstance(owner, Attachment) for name in owner.plan}
    for probe in probes:
        if probe.name in taken:
            raise ConfigError(
                f"a probe named {probe.name!r} is attached to this run already; give one of them "
                "name=."
            )
