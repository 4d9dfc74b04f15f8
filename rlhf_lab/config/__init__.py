"""Configuration of a run: RLHFArgs with its fields in groups, validation, and presets."""

from rlhf_lab.config.algorithm_fields import Advantages
from rlhf_lab.config.args import RLHFArgs
from rlhf_lab.config.checks import LOGGERS, NEED_GROUPS
from rlhf_lab.config.fields import AdapterArgs, ChatArgs
from rlhf_lab.config.groups import GROUPS
from rlhf_lab.config.presets import PRESETS
from rlhf_lab.config.reward_names import (
    MATCH_OPTIONS,
    reward_names,
    validate_token_rewards,
    validate_whole_batch,
)

__all__ = [
    "GROUPS",
    "LOGGERS",
    "MATCH_OPTIONS",
    "NEED_GROUPS",
    "PRESETS",
    "AdapterArgs",
    "Advantages",
    "ChatArgs",
    "RLHFArgs",
    "reward_names",
    "validate_token_rewards",
    "validate_whole_batch",
]
