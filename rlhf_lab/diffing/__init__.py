"""Model diffing: two models side by side, and which of their weights makes which difference."""

from rlhf_lab.diffing.activation_store import ActivationStore, collect_activations
from rlhf_lab.diffing.groups import Groups, coarse_groups, fine_groups, restrict

__all__ = [
    "ActivationStore",
    "Groups",
    "coarse_groups",
    "collect_activations",
    "fine_groups",
    "restrict",
]
