"""Context managers for modes of torch that apply to the whole process."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextlib.contextmanager
def torch_modes_kept() -> Iterator[None]:
    """Restore grad mode and default dtype afterwards."""
    dtype, gradients = torch.get_default_dtype(), torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(gradients)


def differentiable_attention() -> AbstractContextManager[None]:
    """Return a context in which fused attention has forward-mode and second derivatives."""
    return sdpa_kernel(SDPBackend.MATH)
