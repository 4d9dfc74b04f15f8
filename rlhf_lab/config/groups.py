"""Groups of configuration fields, by the names that `--help` and docs/settings.md give them."""

from dataclasses import dataclass
from types import MappingProxyType

from rlhf_lab.config import fields

GROUPS: MappingProxyType[str, type] = MappingProxyType(
    {
        "run and logs": fields.RunArgs,
        "model": fields.ModelArgs,
        "adapter": fields.AdapterArgs,
        "sampling": fields.SamplingArgs,
        "chat": fields.ChatArgs,
        "reward": fields.RewardArgs,
        "credit": fields.CreditArgs,
        "PPO": fields.PPOArgs,
        "KL": fields.KLArgs,
        "optimizer": fields.OptimizerArgs,
        "memory and speed": fields.SpeedArgs,
    }
)
"""The classes that hold the fields of `RLHFArgs`, by the heading of each group."""


# A dataclass takes the fields of its last base first: in the order of GROUPS.
@dataclass(frozen=True, kw_only=True)
class AllFields(
    fields.SpeedArgs,
    fields.OptimizerArgs,
    fields.KLArgs,
    fields.PPOArgs,
    fields.CreditArgs,
    fields.RewardArgs,
    fields.ChatArgs,
    fields.SamplingArgs,
    fields.AdapterArgs,
    fields.ModelArgs,
    fields.RunArgs,
):
    """All fields of all groups, flat and unchecked."""

    @property
    def minibatch_size(self) -> int:
        """Sequences per minibatch."""
        return self.batch_size // self.num_minibatches

    @property
    def rows_at_once(self) -> int:
        """Sequences that go through a model at a time where nothing is learned from them."""
        return self.micro_batch_size or self.minibatch_size

    @property
    def logger_names(self) -> list[str]:
        """The names in `loggers`, each once."""
        names = (name.strip() for name in self.loggers.split(","))
        return list(dict.fromkeys(name for name in names if name))
