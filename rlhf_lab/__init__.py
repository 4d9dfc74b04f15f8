"""RLHF you can see inside: train, probe and learn, on a hooked transformer with a value head."""

import logging
import os
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_lab.config import RLHFArgs
    from rlhf_lab.shape_checks import check_shapes
    from rlhf_lab.training.trainer import RLHFTrainer

__version__ = "0.1.0"
__all__ = ["RLHFArgs", "RLHFTrainer", "check_shapes"]
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of missing kernels on import


def __getattr__(name: str) -> Any:
    """Import a public name or a module when it is used, so that the command line starts at once."""
    modules = {"RLHFArgs": "config", "RLHFTrainer": "training.trainer"}
    if name in __all__:
        return getattr(import_module(f"rlhf_lab.{modules.get(name, 'shape_checks')}"), name)
    if name.startswith("_") or find_spec(f"rlhf_lab.{name}") is None:
        raise AttributeError(f"module 'rlhf_lab' has no attribute {name!r}")
    return import_module(f"rlhf_lab.{name}")


if os.environ.get("RLHF_LAB_CHECK_SHAPES", "0") not in ("", "0"):
    from rlhf_lab.shape_checks import check_shapes

    check_shapes()
