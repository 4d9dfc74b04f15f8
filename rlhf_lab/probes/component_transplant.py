"""ComponentTransplant: which part's change of weights earns the reward, by grafts that write."""

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.diffing import Transplant, coarse_groups, transplant
from rlhf_lab.diffing.transplant import MOST_EXACT
from rlhf_lab.errors import ConfigError
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.probes.own_writing import (
    refuse_hooks,
    refuse_own_parts,
    resolve_true_reward,
    run_prompts,
    run_sampling,
)
from rlhf_lab.probes.probe import Check, Observation, Probe, Record, decimals
from rlhf_lab.training import RLHFTrainer

TRANSPLANT_EFFECTS = ("put_in", "taken_out", "shapley")


class ComponentTransplant(Probe):
    """Reward of each layer's change at the end of a run: put in, taken out, and by Shapley.

    The reference samples with the policy's weights of every coalition of `coarse_groups`, see
    `transplant`, for the true reward on Reel, else the run's. The three answers differ if the
    reward saturates. Opt-in: two blocks take 128 n samples, 10 s of a core for n = 96.

    Checks: the Shapley values sum to the gain.

    Args:
        n: samples of each coalition.
    """

    name = "component_transplant"
    question = "Which component's change of weights raises the reward?"
    caveat = "The answers differ if the reward saturates."
    events = ("run_end",)

    def __init__(self, n: int = 96, every: int | None = None, name: str | None = None) -> None:
        super().__init__(every, name)
        if n < 2:
            raise ConfigError(f"n={n} is too small; sample at least 2 texts, such as 96.")
        self.n = n

    def check_model(self, model: HookedModel) -> None:
        groups = len(coarse_groups(model))
        if groups > MOST_EXACT:
            raise ConfigError(
                f"{self.name} tries every coalition of parts, and this model has {groups} parts; "
                "call diffing.transplant with groups of your own, or leave the probe out."
            )

    def check_run(self, trainer: RLHFTrainer) -> None:
        refuse_own_parts(trainer, self.name, "call diffing.transplant with them afterwards")

    def observe(self, seen: Observation) -> Record:
        ctx = seen.ctx
        refuse_hooks(seen, "grafts")
        groups = coarse_groups(ctx.reference)
        how = {"prompts": run_prompts(seen), "spec": run_sampling(seen)}
        how |= {"n": self.n, "seed": seen.args.seed, "reward": resolve_true_reward(seen)}
        found = transplant(ctx.reference, ctx.policy.base_model, groups, **how)
        tensors = {
            "members": found.members.to(torch.uint8),
            "rewards": found.rewards,
            "kl": found.kl,
            **{name: _ends(found, name) for name in TRANSPLANT_EFFECTS},
        }
        if found.grammatical is not None:
            tensors["grammatical"] = found.grammatical
        means = {name: decimals(tensors[name][:, 0]) for name in TRANSPLANT_EFFECTS}
        values = {"groups": found.groups, "n": self.n, "gain": found.gain.mean().item(), **means}
        summed = (tensors["shapley"][:, 0].sum() - found.gain.double().mean()).abs().item()
        return Record(values, tensors, [Check.at_most("parts sum to the gain", summed, 1e-6)])


def _ends(found: Transplant, name: str) -> Float[Tensor, "group 3"]:
    interval = getattr(found, name)()
    return torch.stack([interval.value, interval.low, interval.high], 1)
