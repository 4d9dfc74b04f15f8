"""Other systems' ways of working: TRL's step and statistics, torchrl's view of a rollout."""

from rlhf_lab.compat.trl_stats import TRLStats
