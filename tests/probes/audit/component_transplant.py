"""Checks of ComponentTransplant's record: grafts recomputed by stored name."""

from rlhf_lab.diffing import Transplant, coarse_groups
from rlhf_lab.diffing.transplant import transplant_plan
from rlhf_lab.probes.component_transplant import TRANSPLANT_EFFECTS, _ends
from rlhf_lab.probes.own_writing import resolve_true_reward, run_prompts, run_sampling
from rlhf_lab.probes.probe import Check, Observation, Record
from tests.diffing.transplant_checks import check_transplant


def bind_component_transplant(seen: Observation, record: Record) -> list[Check]:
    """Compare the stored numbers with grafts recomputed by stored name."""
    model0, model1 = seen.ctx.reference, seen.ctx.policy.base_model
    stored, groups = record.tensors, coarse_groups(model0)
    shares = transplant_plan(len(record.values["groups"]), seen.args.seed)[1]
    found = Transplant(
        record.values["groups"],
        stored["members"].bool(),
        stored["rewards"],
        stored.get("grammatical"),
        stored["kl"],
        shares,
    )
    errors = [(stored[name] - _ends(found, name)).abs().max().item() for name in TRANSPLANT_EFFECTS]
    errors += [
        abs(a - b)
        for name in TRANSPLANT_EFFECTS
        for a, b in zip(record.values[name], stored[name][:, 0].tolist(), strict=True)
    ]
    gain = abs(record.values["gain"] - found.gain.mean().item())
    how = {"prompts": run_prompts(seen), "spec": run_sampling(seen)}
    return [
        Check.at_most("stored effects match the stored rewards", max(*errors, gain), 1e-6),
        *check_transplant(
            found, model0, model1, groups, resolve_true_reward(seen), seen.args.seed, **how
        ),
    ]
