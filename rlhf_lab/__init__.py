"""RLHF you can see inside: train, probe and learn, on a hooked transformer with a value head."""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_lab.config import RLHFArgs
    from rlhf_lab.shape_checks import check_shapes
    from rlhf_lab.training.trainer import RLHFTrainer

__version__ = "0.1.0"
__all__ = ["RLHFArgs", "RLHFTrainer", "check_shapes"]


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for, so that the command line starts at once."""
    if name == "RLHFArgs":
        from rlhf_lab.config import RLHFArgs

        return RLHFArgs
    if name == "RLHFTrainer":
        from rlhf_lab.training.trainer import RLHFTrainer

        return RLHFTrainer
    if name == "check_shapes":
        from rlhf_lab.shape_checks import check_shapes

        return check_shapes
    raise AttributeError(f"module 'rlhf_lab' has no attribute {name!r}")


if os.environ.get("RLHF_LAB_CHECK_SHAPES") == "1":
    from rlhf_lab.shape_checks import check_shapes

    check_shapes()
