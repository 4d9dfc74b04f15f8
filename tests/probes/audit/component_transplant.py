"""Checks of ComponentTransplant's record: the transplant repeated."""

from rlhf_lab.diffing import coarse_groups, transplant
from rlhf_lab.probes.component_transplant import TRANSPLANT_EFFECTS, _ends
from rlhf_lab.probes.own_writing import resolve_true_reward, run_prompts, run_sampling
from rlhf_lab.probes.probe import Check, Observation, Record


def bind_component_transplant(seen: Observation, record: Record) -> list[Check]:
    """Compare the stored numbers with those of a second transplant."""
    base, stored, groups = seen.ctx.reference, record.tensors, coarse_groups(seen.ctx.reference)
    how = {"prompts": run_prompts(seen), "spec": run_sampling(seen), "seed": seen.args.seed}
    reward, n = resolve_true_reward(seen), stored["rewards"].shape[1]
    found = transplant(base, seen.ctx.policy.base_model, groups, reward, n, **how)
    effects = [(stored[name] - _ends(found, name)).abs().max() for name in TRANSPLANT_EFFECTS]
    effects += [
        abs(a - b)
        for name in TRANSPLANT_EFFECTS
        for a, b in zip(record.values[name], stored[name][:, 0].tolist(), strict=True)
    ]
    gain = abs(record.values["gain"] - found.gain.mean().item())
    names = float(record.values["groups"] != found.groups)
    same = (stored["members"].bool() == found.members).all() and (
        stored["rewards"] == found.rewards
    ).all()
    return [
        Check.at_most("stored effects match the repeated rewards", max(*effects, gain), 1e-6),
        Check.at_most("coalitions get the same rewards", float(not same), 0.0),
        Check.at_most("groups have their names", names, 0.0),
        Check.at_most("the KL is the same", (stored["kl"] - found.kl).abs().max(), 1e-4),
    ]
