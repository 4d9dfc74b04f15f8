"""Faults of ComponentTransplant, written down before looking whether its checks tell."""

from tests.probes.planting import Fault

OBSERVE = "component_transplant:ComponentTransplant.observe"
KIND = "ComponentTransplant"
COMPONENT_TRANSPLANT_FAULTS = (
    Fault(
        "policy and reference exchanged",
        KIND,
        OBSERVE,
        "ctx.reference, ctx.policy.base_model, groups",
        "ctx.policy.base_model, ctx.reference, groups",
    ),
    Fault(
        "labels in reverse", KIND, OBSERVE, '"groups": found.groups', '"groups": found.groups[::-1]'
    ),
    Fault("another seed", KIND, OBSERVE, "seen.args.seed", "seen.args.seed + 1"),
    Fault(
        "rewards of coalitions rolled",
        KIND,
        OBSERVE,
        '"rewards": found.rewards',
        '"rewards": found.rewards.roll(1, 0)',
    ),
    Fault(
        "put in stored as taken out",
        KIND,
        OBSERVE,
        "_ends(found, name) for name in TRANSPLANT_EFFECTS",
        "_ends(found, TRANSPLANT_EFFECTS[name == 'put_in']) for name in TRANSPLANT_EFFECTS",
    ),
    Fault("KL in reverse", KIND, OBSERVE, '"kl": found.kl', '"kl": found.kl.flip(0)'),
)
