"""ComponentTransplant: the reward of each component's change of weights, by sampled grafts."""

import torch

from rlhf_lab.diffing import coarse_groups, transplant
from rlhf_lab.diffing.transplant import MOST_EXACT
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import has_hooks
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.organism import true_reward
from rlhf_lab.probes.probe import Check, Observation, Probe, Record, decimals
from rlhf_lab.rewards.load import load_reward
from rlhf_lab.sampling_spec import SamplingSpec
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.prompts import Prompts

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
    options = ("n", *Probe.options)
    n, fewest = 96, 2

    def check_model(self, model: HookedModel) -> None:
        groups = len(coarse_groups(model))
        if groups > MOST_EXACT:
            raise ConfigError(
                f"{self.name} tries every coalition of {MOST_EXACT} groups at most, and this model "
                f"has {groups}. Call diffing.transplant with other groups, or leave out the probe."
            )

    def check_run(self, trainer: RLHFTrainer) -> None:
        custom = {"prompts", "reward_fn"} & set(trainer.custom_components)
        if "prompts" in custom or (custom and trainer.true_reward_fn is None):
            raise ConfigError(
                f"{self.name} takes prompts and reward from the settings, and this run has custom "
                f"{' and '.join(sorted(custom))}. Call diffing.transplant with them afterwards."
            )

    def observe(self, seen: Observation) -> Record:
        args, reference, policy = seen.args, seen.ctx.reference, seen.ctx.policy.base_model
        if has_hooks(policy):
            raise ConfigError(
                f"the policy has hooks, and {self.name} samples without them. Remove them, or "
                "leave out the probe."
            )
        found = transplant(
            reference,
            policy,
            coarse_groups(reference),
            true_reward if seen.truth is not None else load_reward(args),
            self.n,
            args.seed,
            Prompts(args, None, reference).tokens,
            SamplingSpec.from_args(args, reference.tokenizer),
        )
        intervals = {name: getattr(found, name)() for name in TRANSPLANT_EFFECTS}
        tensors = {k: torch.stack([x.value, x.low, x.high], 1) for k, x in intervals.items()}
        means = {name: decimals(tensors[name][:, 0]) for name in TRANSPLANT_EFFECTS}
        values = {"groups": found.groups, "n": self.n, "gain": found.gain.mean().item(), **means}

        def check_sum() -> Check:
            gap = tensors["shapley"][:, 0].sum() - found.gain.double().mean()
            return Check.at_most("parts sum to the gain", gap.abs().item(), 1e-6)

        members = found.members.to(torch.uint8)
        tensors |= {"members": members, "rewards": found.rewards}
        return Record(values, tensors, [check_sum])
