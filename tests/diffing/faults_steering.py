"""Faults to plant in steering, written before looking whether its checks tell."""

from tests.probes.planting import Fault

STEERING = "diffing.steering"


def fault(name: str, function: str, old: str, new: str) -> Fault:
    return Fault(name, "Steering", f"{STEERING}:{function}", old, new)


FAULTS = (
    fault(
        "steering at another layer",
        "steering_hooks",
        "[(site, lambda",
        '[(site.replace("1", "0"), lambda',
    ),
    fault("steering the other way", "steering_hooks", "activation + added", "activation - added"),
    fault(
        "controls of length 1", "steering_sweep", "noise / noise.norm() * vector.norm()",
        "noise / noise.norm()",
    ),
    fault(
        "alpha not stored", "steering_sweep", "Steered(site, float(alpha)", "Steered(site, 1.0",
    ),
    fault(
        "KL of the steered model from itself", "_written",
        "kl_per_token(logprobs, _logprobs(policy, samples))", "kl_per_token(logprobs, logprobs)",
    ),
    fault(
        "KL the other way round", "_written",
        "kl_per_token(logprobs, _logprobs(policy, samples))",
        "kl_per_token(_logprobs(policy, samples), logprobs)",
    ),
    fault(
        "figures under each other's names", "_written",
        "for name, figure in figures.items()",
        "for name, figure in zip(figures, [*figures.values()][::-1])",
    ),
)  # fmt: skip
