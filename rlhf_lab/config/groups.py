"""Groups of configuration fields, by their headings in `--help` and docs/settings.md."""

from dataclasses import dataclass
from types import MappingProxyType

from rlhf_lab.config import algorithm_fields as algorithm
from rlhf_lab.config import fields

# classes of settings by the title of their group
GROUPS: MappingProxyType[str, type] = MappingProxyType(
    {
        "run and logs": fields.RunArgs,
        "model": fields.ModelArgs,
        "adapter": fields.AdapterArgs,
        "sampling": fields.SamplingArgs,
        "chat": fields.ChatArgs,
        "reward": fields.RewardArgs,
        "credit": algorithm.CreditArgs,
        "PPO": algorithm.PPOArgs,
        "KL": algorithm.KLArgs,
        "optimizer": algorithm.OptimizerArgs,
        "memory and speed": algorithm.SpeedArgs,
    }
)


# a dataclass starts with the fields of its last base: the order of GROUPS
@dataclass(frozen=True, kw_only=True)
class AllFields(
    algorithm.SpeedArgs,
    algorithm.OptimizerArgs,
    algorithm.KLArgs,
    algorithm.PPOArgs,
    algorithm.CreditArgs,
    fields.RewardArgs,
    fields.ChatArgs,
    fields.SamplingArgs,
    fields.AdapterArgs,
    fields.ModelArgs,
    fields.RunArgs,
):
    """All fields of all groups, flat and not validated."""

    @property
    def minibatch_size(self) -> int:
        """Sequences per minibatch."""
        return self.batch_size // self.num_minibatches

    @property
    def rows_at_once(self) -> int:
        """Sequences per forward pass without gradients."""
        return self.micro_batch_size or self.minibatch_size

    @property
    def logger_names(self) -> list[str]:
        """The distinct names in `loggers`."""
        names = (name.strip() for name in self.loggers.split(","))
        return list(dict.fromkeys(name for name in names if name))
