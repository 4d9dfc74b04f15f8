"""Attachment of probes to a trainer: the callbacks that call them and store their records."""

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter

from rlhf_lab.errors import ConfigError, format_argument
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.probes.eval_text import EvalText
from rlhf_lab.probes.exact_values import exact_values
from rlhf_lab.probes.probe import Observation, Probe, Record
from rlhf_lab.probes.shown import Acts, SharedActs, gradients_at, prompt_length
from rlhf_lab.probes.store import ProbeStore, records_file
from rlhf_lab.training import Context, RLHFTrainer
from rlhf_lab.training.callbacks import describe_error, no_side_effects
from rlhf_lab.training.capture import resolve_sites
from rlhf_lab.training.checkpoint import is_numbered

Schedule = int | str | list[int]
FORWARD = "forward"  # passes that several probes share
# of components that probes compare with the reference's
SHAPE = "n_layers n_heads n_key_value_heads d_model d_head d_mlp n_ctx gated_mlp".split()


class Attachment:
    """Probes on one run, made by `Suite.attach`.

    Attributes:
        plan: interval in phases, or the suite's `record`, of each probe that is not switched off.
        notes: the probes that were switched off, and why.
        seconds: the time of each probe, and of the shared forward passes as "forward".
    """

    def __init__(
        self, probes: Sequence[Probe], text: EvalText | None, record: Schedule, trainer: RLHFTrainer
    ) -> None:
        _reject_taken_names(probes, trainer)
        self.probes = {probe.name: probe for probe in probes}
        self.plan = {probe.name: probe.every or record for probe in probes}
        self.text = text
        self.truth, self._of_true_reward = exact_values(trainer)
        self.prefix_len, self.custom_components = len(trainer.prompt), trainer.custom_components
        self.notes: list[str] = []
        self.seconds: Counter[str] = Counter()
        self._store: ProbeStore | None = None
        self._shared = SharedActs(text)
        self._failed: set[tuple[str, str]] = set()
        self._remark = trainer.recorder.remark
        self._optimizer = trainer.optimizer
        self._prepared: dict[str, object] = {}
        events = {"run_start": 1, "run_end": 1}  # and the interval that suits all probes
        for probe in probes:
            resolve_sites(trainer.policy.base_model, probe.sites)
            probe.check_model(trainer.policy.base_model)
            probe.check_run(trainer)
            for event in (*probe.events, *probe.prepares):
                events[event] = math.gcd(events.get(event, 0), probe.every or 1)
        registers = [trainer.on(event, every) for event, every in events.items()]
        for register in registers:  # all, or none if an event is rejected
            register(self._at)

    def _at(self, ctx: Context) -> None:
        if ctx.run is None:
            return
        if self._store is None or ctx.event == "run_start":
            self._begin(ctx)
        active = [x for x in map(self.probes.get, self.plan) if self._is_active(x, ctx)]
        if active:
            gradients = gradients_at(ctx)
            with no_side_effects(ctx.policy, ctx.reference):
                self._show(ctx, active, gradients)

    def _is_active(self, probe: Probe, ctx: Context) -> bool:
        if ctx.event not in (*probe.events, *probe.prepares):
            return False
        if probe.step is not None and hasattr(ctx, "step"):
            steps = ctx.args.num_minibatches * ctx.args.batches_per_learning_phase
            if ctx.step != (0 if probe.step == "first" else steps - 1):
                return False
        return ctx.event in ("run_start", "run_end") or _is_recorded(ctx, probe, self.plan)

    def _begin(self, ctx: Context) -> None:
        self._store = ProbeStore(ctx.run)
        self._store.rewind(ctx.phase, list(self.probes))
        probes = [
            probe.settings() | {"record": self.plan[name]} for name, probe in self.probes.items()
        ]
        eval_shape = None if self.text is None else list(self.text.tokens.shape)
        self._store.write_suite({"probes": probes, "eval_tokens": eval_shape})
        if self.text is not None and self.text.kept:
            self._store.keep_text(self.text)
        for probe in self.probes.values():
            is_new = not self._store.run.read(records_file(probe.name))
            if probe.exact_reward and self._of_true_reward and is_new:
                self._report(ctx, probe.name, self._of_true_reward)

    def _show(self, ctx: Context, active: list[Probe], gradients: Acts) -> None:
        began = perf_counter()
        shared: dict[str, tuple[Acts, Acts]] = {}
        for text in ("eval", "rollout"):
            with suppress(Exception):  # if one probe's site fails, each probe captures alone
                readers = [probe for probe in active if probe.text == text]
                shared[text] = self._shared.capture(ctx, readers, text)
        self.seconds[FORWARD] += perf_counter() - began
        for probe in active:
            began = perf_counter()
            try:
                self._keep(ctx, probe, self._call(ctx, probe, shared, gradients))
            except Exception as error:
                is_other = differ_in_shape(ctx.policy.base_model, ctx.reference)
                why = " (the reference has another architecture)" * is_other
                self._report(ctx, probe.name, describe_error(error, ctx.event, ctx.phase) + why)
                self.plan.pop(probe.name)
            self.seconds[probe.name] += perf_counter() - began

    def _call(
        self, ctx: Context, probe: Probe, shared: dict[str, tuple[Acts, Acts]], gradients: Acts
    ) -> Record | None:
        acts, reference_acts = {}, {}
        if probe.text is not None:
            found = shared.get(probe.text) or self._shared.capture(ctx, [probe], probe.text)
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
            prepared=self._prepared.pop(probe.name, None),
        )
        if ctx.event in probe.prepares:
            self._prepared[probe.name] = probe.prepare(seen)
        if probe.prepares and seen.prepared is None:  # also if it was attached in between
            return None
        record = probe.observe(seen)
        if not (isinstance(record, Record) and (record.checks or record.errors)):
            got = format_argument(record)
            raise ConfigError(
                f"{probe.name} returned {got} without a check. Return Record(checks=...)."
            )
        return record

    def _keep(self, ctx: Context, probe: Probe, record: Record | None) -> None:
        if record is None:
            return
        self._store.write(probe.name, ctx.phase, record)
        for error in record.errors:
            self._warn_once(ctx, probe.name, error, f"{error}. The record is kept without it.")
        for check in record.checks:
            if not check.ok:
                what = f"the check '{check.name}' misses by {check.value:.3g}, with "
                what += f"{check.tolerance:.3g} allowed; do not rely on this record."
                self._warn_once(ctx, probe.name, check.name, what)

    def _report(self, ctx: Context, probe: str, note: str) -> None:
        warnings.warn(f"{probe}: {note}", stacklevel=2)
        self.notes.append(f"{probe}: {note}")
        self._store.note(ctx.phase, probe, note)

    def _warn_once(self, ctx: Context, probe: str, sign: str, text: str) -> None:
        if (probe, sign) in self._failed:
            return
        self._failed.add((probe, sign))
        warnings.warn(f"phase {ctx.phase}: {probe}: {text}", stacklevel=2)
        self._remark(f"{probe}: {sign}", ctx.phase, f"{probe}: {text}")


def differ_in_shape(policy: HookedModel, reference: HookedModel) -> bool:
    """Return True if the models' components differ in number or size."""
    shapes = [[getattr(x.cfg, name, None) for name in SHAPE] for x in (policy, reference)]
    return shapes[0] != shapes[1]


def _is_recorded(ctx: Context, probe: Probe, plan: dict[str, Schedule]) -> bool:
    schedule = plan[probe.name]
    if schedule == "every" or isinstance(schedule, int):
        return schedule == "every" or ctx.phase % schedule == 0
    if "run_end" not in probe.events and ctx.phase == ctx.args.total_phases - 1:
        return True
    return is_numbered(ctx.phase) if schedule == "milestones" else ctx.phase in schedule


def _reject_taken_names(probes: Sequence[Probe], trainer: RLHFTrainer) -> None:
    owners = [getattr(listener, "__self__", None) for listener in trainer.callbacks.listeners()]
    taken = {name for owner in owners if isinstance(owner, Attachment) for name in owner.plan}
    for probe in probes:
        if probe.name in taken:
            raise ConfigError(
                f"a probe named {probe.name!r} is attached to this run already. Give one of them "
                "name=."
            )
