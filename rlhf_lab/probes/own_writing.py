"""Prompts, sampling settings and reward of a run, for probes that sample texts."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.models import has_hooks
from rlhf_lab.organism import true_reward
from rlhf_lab.probes.probe import Observation
from rlhf_lab.rewards.load import load_reward
from rlhf_lab.sampling_spec import SamplingSpec
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.prompts import Prompts


def refuse_own_parts(trainer: RLHFTrainer, probe: str, instead: str) -> None:
    """Raise ConfigError, with a remedy, for prompts or a reward that are not in the settings."""
    own = {"prompts", "reward_fn"} & set(trainer.custom_components)
    if "prompts" in own or (own and trainer.true_reward_fn is None):
        raise ConfigError(
            f"{probe} reads prompts and reward from the settings, and this run has its own "
            f"{' and '.join(sorted(own))}; {instead}."
        )


def refuse_hooks(seen: Observation, what: str) -> None:
    """Raise ConfigError if the policy has hooks, because copies sample without them."""
    if has_hooks(seen.ctx.policy.base_model):
        raise ConfigError(f"hooks are on the policy, and {what} would write without them.")


def run_prompts(seen: Observation) -> list[list[int]]:
    """Return the run's prompts as token ids."""
    return Prompts(seen.args, None, seen.ctx.reference).tokens


def run_sampling(seen: Observation) -> SamplingSpec:
    """Return the sampling settings of the run."""
    return SamplingSpec.from_args(seen.args, seen.ctx.reference.tokenizer)


def resolve_true_reward(seen: Observation) -> Callable[[list[str]], Float[Tensor, " batch"]]:
    """Return the true reward if it is known, else the run's reward."""
    return true_reward if seen.truth is not None else load_reward(seen.args)
