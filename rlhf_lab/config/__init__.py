"""Configuration of a run: RLHFArgs with its fields in groups, validation, and presets."""

from rlhf_lab.config.algorithm_fields import GROUPS, Advantages
from rlhf_lab.config.args import RLHFArgs
from rlhf_lab.config.fields import AdapterArgs, ChatArgs
from rlhf_lab.config.presets import PRESETS
