"""Checks of StepInfluence's record: rows, labels and signs against interventions on weights."""

import copy
import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.diffing.groups import Groups, restrict
from rlhf_lab.models.device import exact, has_float64
from rlhf_lab.probes.policy_groups import transformer_groups
from rlhf_lab.probes.probe import Check, Observation, Record
from rlhf_lab.probes.step_influence import (
    AdamStep,
    ByWeight,
    adam_step,
    inner,
    row_direction,
)
from rlhf_lab.probes.step_shares import Target, exact_copy, shares_of, slope_of
from rlhf_lab.probes.step_taken import BeforeStep, moved_weights
from rlhf_lab.training.capture import capture_activations
from tests.probes.audit.anew import as_float64, as_rows_say, gap, off_mask, relative_gap
from tests.probes.audit.labels import check_slots, check_tokens
from tests.probes.audit.read_out_rows import check_read_out

MOVE = {torch.float64: 1e-6, torch.float32: 2e-3}
"""How far weights are moved for a central difference, as a share of their own norm."""
LEFT_OUT = 1e-7
"""The share of a sample that is left out, in float64: only gradients of about 0 turn their sign."""
CHANGE_ROUNDING = {"fp32": 1e-2, "tf32": 0.05, "bf16": 0.3}
SHORT_STEP = 0.01
"""The share of the step at which the remainder must fall as a square: cubes no longer show."""
ABOVE_ROUNDING = 1e-13
"""Of a target's size: a remainder below it is rounding."""
StoredColumns = dict[str, Float[Tensor, "..."]]


def bind_step_influence(seen: Observation, record: Record, target: Target) -> list[Check]:
    """Hold what is stored to the run, and rows to what moving the weights does, looked up by name.

    1. Tokens, mask, slots, groups, kappa; the target against the model's own logits.
    2. A random group: its rows against moving its weights along p; with its momentum and decay,
       against moving them as the step did.
    3. The terms against moving all weights; the rows of the read-out against a closed form.
    4. A random sample: its rows against its own gradient; its counterfactual against the step
       redone with less of it.
    """
    minibatch, before = seen.ctx.minibatch, seen.prepared
    mask = record.tensors["mask"].cpu()
    columns = {name: as_float64(x) for name, x in record.tensors.items() if name != "mask"}
    by_token = {name: columns[name].sum(0) for name in ("rows", "terms")}
    groups = transformer_groups(seen.ctx.policy, record.values["fine"])
    checks = [
        *check_tokens(seen, record, minibatch.tokens, mask, "minibatch"),
        Check.at_most("the stored mask is the minibatch's", gap(mask, minibatch.mask), 0),
        Check.at_most(
            "nothing is stored for tokens that do not count", off_mask(by_token, mask), 0
        ),
        Check.at_most(
            "groups and terms sum to the same for every token",
            relative_gap(by_token["rows"], by_token["terms"], mask, 1e-12),
            1e-3,
        ),
        Check.at_most(
            "groups are those of the model", float(record.values["groups"] != groups.names), 0
        ),
        *_run(seen, record),
    ]
    if "slots" in record.values:
        checks.append(check_slots(seen, record, first=minibatch.prefix_len))
    redone = _Redone(seen, before, target, groups)
    checks += [
        *redone.group(record, columns),
        *redone.terms(columns["terms"], mask),
        *redone.sample(columns, mask),
        *redone.remainder(record),
    ]
    if "read_out_terms" in columns and as_rows_say(seen):
        of_group = columns["rows"][groups.names.index("unembed")]
        checks += check_read_out(seen, columns["read_out_terms"], of_group, redone.p, mask)
    return checks


def _run(seen: Observation, record: Record) -> list[Check]:
    """Clipping, the target and the remainder, from what the run itself says."""
    values, limit = record.values, seen.args.max_grad_norm
    norm = seen.ctx.grad_norm
    kappa = 1.0 if limit is None else min(1.0, limit / norm)
    size = max(1e-6, abs(values["f_after"]))
    left = values["f_after"] - values["f_before"] - values["linear"]
    return [
        Check.at_most(
            "the gradient's norm is the trainer's", abs(values["grad_norm"] / norm - 1), 1e-5
        ),
        Check.at_most("kappa is what clipping does", abs(values["kappa"] / kappa - 1), 1e-5),
        Check.at_most(
            "the target is that of the model's logits",
            abs(values["f_after"] - _target_anew(seen, values)) / size,
            1e-6,
        ),
        Check.at_most(
            "the remainder is what is left", abs(values["remainder"] - left) / size, 1e-9
        ),
    ]


def _target_anew(seen: Observation, values: dict) -> float:
    """The target after the step, by the stored words and position, from the model's own forward."""
    tokens, temperature = seen.text.tokens[: values["n"]], seen.args.temperature
    lengths = [int(row.sum()) for row in seen.text.attention_mask[: values["n"]]]
    model, reference = seen.ctx.policy.base_model, seen.ctx.reference
    ask = lambda model: capture_activations(exact_copy(model), tokens, ["logits"])["logits"]
    logits = ask(model)
    if values["target"] == "logit_difference":
        read = lambda text: model.tokenizer(text, add_special_tokens=False)["input_ids"]
        (word,), (other,) = read(values["word"]), read(values["other"])
        at = [x[:n][values["pos"]] for x, n in zip(logits, lengths, strict=True)]
        return sum((x[word] - x[other]).item() for x in at) / len(at)
    now, then = ((x / temperature).log_softmax(-1) for x in (logits, ask(reference)))
    kl = (now.exp() * (now - then)).sum(-1)
    behind = [x[values["prefix_len"] - 1 : n - 1] for x, n in zip(kl, lengths, strict=True)]
    return torch.cat(behind).mean().item()


class _Redone:
    """Interventions on the weights that a step started from."""

    def __init__(
        self, seen: Observation, before: BeforeStep, target: Target, groups: Groups
    ) -> None:
        self.seen, self.before, self.target, self.groups = seen, before, target, groups
        ctx = seen.ctx
        self.policy = ctx.policy
        if has_float64(ctx.policy.device):
            self.policy = copy.deepcopy(ctx.policy).to(torch.float64)
        models = self.policy, ctx.reference
        self.shares = shares_of(*models, ctx.minibatch, seen.args, ctx.kl_coef)
        dtype = next(self.policy.parameters()).dtype
        self.start = {name: x.to(dtype) for name, x in before.params.items()}
        self.move, self.allowed = MOVE[dtype], CHANGE_ROUNDING[seen.args.rounding]
        self.step = adam_step(*before, seen.args.max_grad_norm)
        self.slope = slope_of(target, before.params)
        self.p = row_direction(self.step, self.slope, before.settings)
        self.random = torch.Generator().manual_seed(ctx.phase)

    def group(self, record: Record, columns: StoredColumns) -> list[Check]:
        """One group's rows, momentum and decay, by its stored name."""
        names = record.values["groups"]
        index = self._draw(len(names))
        if names[index] not in self.groups.names:
            return [Check.at_most("rows of a group are those of its weights", math.nan, 0)]
        found, steady = self._central(restrict(self.p, self.groups, names[index]))
        rows = columns["rows"][index]
        moved = moved_weights(self.seen.ctx.policy, self.before.params)
        of_group = restrict({name: moved[name] for name in self.slope}, self.groups, names[index])
        effect = _central(lambda w: self.target(w).detach(), self.before.params, of_group, 0.01)
        stored = rows.sum() + columns["momentum"][index] + columns["decay"][index]
        change = abs(record.values["f_after"] - record.values["f_before"])
        parts = rows.sum().abs() + columns["momentum"][index].abs() + 1e-3 * change
        return [
            Check.at_most(
                "rows of a group are the shares' change along its p",
                relative_gap(rows, found.sum(0), steady.all(0), 1e-12),
                self.allowed,
            ),
            Check.at_most(
                "rows, momentum and decay of a group are the target's change by its step",
                abs(stored.item() - effect.item()) / max(parts.item(), abs(effect.item()), 1e-12),
                self.allowed,
            ),
        ]

    def terms(
        self, terms: Float[Tensor, "term minibatch gen"], mask: Bool[Tensor, "minibatch gen"]
    ) -> list[Check]:
        """Every term of every token, along p of all groups."""
        found, steady = self._central(self.p)
        least = 0.01 * found.abs().max().item()  # the KL's is 0 where the policy is the reference
        return [
            Check.at_most(
                f"the term {number} is the shares' change along p",
                relative_gap(stored, change, calm & mask, max(least, 1e-12)),
                self.allowed,
            )
            for number, (stored, change, calm) in enumerate(zip(terms, found, steady, strict=True))
        ]

    def sample(self, columns: StoredColumns, mask: Bool[Tensor, "minibatch gen"]) -> list[Check]:
        """One sample's rows and counterfactual, from its own gradient."""
        index = self._draw(len(mask))
        own = self._gradient_of(index)
        rows = columns["rows"].sum((0, 2))
        miss = abs(rows[index].item() - inner(self.p, own))
        more, less = (self._step_with(own, by) for by in (LEFT_OUT, -LEFT_OUT))
        change = {name: more.delta[name] - less.delta[name] for name in self.slope}
        counted = inner(self.slope, change) / (2 * LEFT_OUT)
        stored = columns["counterfactual"][index].item()
        size = max(rows.abs().max().item(), 1e-12)
        return [
            Check.at_most("rows of a sample are those of its gradient", miss / size, 1e-3),
            Check.at_most(
                "a counterfactual is that of the step redone with less of the sample",
                abs(stored - counted) / max(size, abs(counted)),
                self.allowed,
            ),
        ]

    def remainder(self, record: Record) -> list[Check]:
        """The stored remainder at half the step, and how remainders fall as the step gets shorter.

        They fall as its square: at half the step to a quarter. A slope that is wrong lets them fall
        to a half. It is looked at where the step is short: at its whole length the cube counts too.
        """
        values, whole = record.values, {n: exact(x) for n, x in self.before.params.items()}
        moved = moved_weights(self.seen.ctx.policy, self.before.params)
        slope = inner(self.slope, moved)
        at = lambda share: self.target(_shifted(whole, moved, share)).item()
        with torch.no_grad():
            start, half, short, shorter = (at(x) for x in (0, 0.5, SHORT_STEP, SHORT_STEP / 2))
        left_half = half - start - values["linear"] / 2
        left, less = short - start - SHORT_STEP * slope, shorter - start - SHORT_STEP / 2 * slope
        size = max(1.0, abs(start))
        allowed = max(0.3 * abs(left), ABOVE_ROUNDING * size)
        return [
            Check.at_most(
                "the remainder at half the step is that of the weights half way",
                abs(values["remainder_half"] - left_half) / size,
                1e-9,
            ),
            Check.at_most(
                "at half a short step the remainder is at most .3 of it", abs(less), allowed
            ),
        ]

    def _step_with(self, own: ByWeight, share: float) -> AdamStep:
        """The step with so much of a sample's gradient added."""
        grads = {n: exact(g) + share * exact(own[n]) for n, g in self.before.grads.items()}
        return adam_step(*self.before._replace(grads=grads), self.seen.args.max_grad_norm)

    def _gradient_of(self, row: int) -> dict[str, Tensor]:
        """The gradient of one sample's shares by all weights; 0 for those it does not reach."""
        leaves = {name: x.detach().requires_grad_() for name, x in self.start.items()}
        with torch.enable_grad():
            total = self.shares(leaves)[:, row].sum()
            slopes = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        found = zip(leaves.items(), slopes, strict=True)
        return {n: torch.zeros_like(x) if slope is None else slope for (n, x), slope in found}

    def _central(
        self, direction: ByWeight
    ) -> tuple[Float[Tensor, "term minibatch gen"], Bool[Tensor, "term minibatch gen"]]:
        """The central difference of all shares along a direction, and where both halves agree.

        They do not where the move goes past a clip, which is no fault of the rows.
        """
        params = self.before.params
        length = sum(exact(x).square().sum().item() for x in direction.values()) ** 0.5
        own = sum(exact(params[n]).square().sum().item() for n in direction) ** 0.5
        step = self.move * own / max(length, 1e-300)
        shares = lambda at: as_float64(self._moved(direction, at * step))
        ahead, here, behind = (shares(at) for at in (1.0, 0.0, -1.0))
        forward, backward = (ahead - here) / step, (here - behind) / step
        found = (forward + backward) / 2
        steady = (forward - backward).abs() <= self.allowed * found.abs().max()
        if steady.double().mean() < 0.5:  # nothing to rely on, which counts as a failure
            found = torch.full_like(found, math.nan)
        return found, steady

    def _moved(self, direction: ByWeight, by: float) -> Tensor:
        with torch.no_grad():
            return self.shares(_shifted(self.start, direction, by))

    def _draw(self, n: int) -> int:
        return int(torch.randint(n, (), generator=self.random))


def _central(
    function: Callable[[ByWeight], Tensor], params: ByWeight, direction: ByWeight, step: float
) -> Tensor:
    """(f(theta + step d) - f(theta - step d)) / (2 step), in float64."""
    whole = {name: exact(x) for name, x in params.items()}
    with torch.no_grad():
        ahead, behind = (function(_shifted(whole, direction, by)) for by in (step, -step))
    return (ahead - behind) / (2 * step)


def _shifted(params: ByWeight, direction: ByWeight, by: float | int) -> ByWeight:
    moved = {name: exact(params[name]) + by * exact(x) for name, x in direction.items()}
    return {**params, **{name: x.to(params[name]) for name, x in moved.items()}}
