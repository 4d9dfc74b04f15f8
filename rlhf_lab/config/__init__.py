"""Configuration of a run: RLHFArgs with its fields in groups, validation, and presets."""

from rlhf_lab.config.args import RLHFArgs
from rlhf_lab.config.checks import LOGGERS, NEED_GROUPS
from rlhf_lab.config.fields import AdapterArgs, Advantages, ChatArgs
from rlhf_lab.config.groups import GROUPS, AllFields
from rlhf_lab.config.presets import PRESETS, Preset
from rlhf_lab.config.reward_checks import (
    MATCH_OPTIONS,
    refuse_parts_of_batch,
    refuse_with_token_rewards,
    reward_names,
)

__all__ = [
    "GROUPS",
    "LOGGERS",
    "MATCH_OPTIONS",
    "NEED_GROUPS",
    "PRESETS",
    "AdapterArgs",
    "Advantages",
    "AllFields",
    "ChatArgs",
    "Preset",
    "RLHFArgs",
    "refuse_parts_of_batch",
    "refuse_with_token_rewards",
    "reward_names",
]
