"""TF32 on the CPU: a mode that rounds what float32 products multiply, as CUDA's matrix units do."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

LOST_BITS = 13
"""Of float32's 23 bits of mantissa, TF32 keeps 10."""
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu")


def rounded(x: Tensor) -> Tensor:
    """The nearest numbers with 10 bits of mantissa; ties away from zero, as `cvt.rna.tf32` has."""
    half, kept = 1 << (LOST_BITS - 1), ~((1 << LOST_BITS) - 1)
    return ((x.contiguous().view(torch.int32) + half) & kept).view(torch.float32)


class RoundsToTF32(TorchDispatchMode):
    """Rounds the float32 factors of matrix products and of attention; counts the products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in PRODUCTS:
            self.count += 1
            first = 1 if name in ("addmm", "baddbmm") else 0  # what is added is not multiplied

            def factor(x):
                return rounded(x) if isinstance(x, Tensor) and x.dtype == torch.float32 else x

            args = (*args[:first], *tree_map(factor, args[first : first + 3]), *args[first + 3 :])
        return func(*args, **kwargs or {})
