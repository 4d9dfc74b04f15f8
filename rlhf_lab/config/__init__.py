"""Configuration of a run: RLHFArgs with its fields in groups, validation, and presets."""

from rlhf_lab.config.args import RLHFArgs
from rlhf_lab.config.checks import LOGGERS, NEED_GROUPS, refuse_with_token_rewards
from rlhf_lab.config.fields import AdapterArgs, Advantages
from rlhf_lab.config.groups import GROUPS, AllFields
from rlhf_lab.config.presets import PRESETS, Preset

__all__ = [
    "GROUPS",
    "LOGGERS",
    "NEED_GROUPS",
    "PRESETS",
    "AdapterArgs",
    "Advantages",
    "AllFields",
    "Preset",
    "RLHFArgs",
    "refuse_with_token_rewards",
]
