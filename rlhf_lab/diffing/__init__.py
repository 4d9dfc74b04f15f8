"""Model diffing: two models side by side, and which of their weights makes which difference."""

from rlhf_lab.diffing.groups import Groups, coarse_groups, fine_groups, restrict

__all__ = ["Groups", "coarse_groups", "fine_groups", "restrict"]
