"""Settings of a run's forward passes: precision, and what is stored for the backward pass."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from rlhf_lab.config import RLHFArgs
from rlhf_lab.models.device import float32_products, product_dtype


@dataclass
class Forward:
    """Settings of a run's forward passes.

    Args:
        dtype: dtype of the matrix products; that of the weights if None.
        recompute: store only the inputs of blocks, and run each block again in the backward pass.
        tf32: multiply float32 matrices in TF32 on CUDA, within `products`.
        units: module within which a block runs if its weights are gathered for it (FSDP2).
    """

    dtype: torch.dtype | None = None
    recompute: bool = False
    tf32: bool = field(default=False, kw_only=True)
    units: Mapping[nn.Module, nn.Module] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_args(cls, args: RLHFArgs) -> "Forward":
        """Return the settings of a run."""
        dtype = product_dtype(args.precision)
        return cls(dtype, args.activation_checkpointing, tf32=args.precision == "tf32")

    def products(self) -> AbstractContextManager[None]:
        """Return a context in which CUDA multiplies matrices in TF32 if that is set."""
        return float32_products("tf32") if self.tf32 else nullcontext()
