"""A base model, and copies of it that were changed in known parts."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlhf_lab.models import HookedTransformer, load_model


@pytest.fixture(scope="session")
def base() -> HookedTransformer:
    return load_model("reel-nano").requires_grad_(False)


@pytest.fixture(scope="session")
def make_tuned() -> Callable[..., HookedTransformer]:
    """Copies a model, and adds noise to the weights that are named, or to all."""

    def make(
        model: HookedTransformer,
        belongs: Callable[[str], bool] = lambda name: True,
        seed: int = 0,
        size: float = 0.1,
    ) -> HookedTransformer:
        tuned, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in tuned.named_parameters():
                noise = torch.randn(weight.shape, generator=generator).to(weight)
                if belongs(name):
                    weight += size * weight.abs().mean().clamp(min=0.05) * noise
        return tuned

    return make


@pytest.fixture(scope="session")
def tuned(base, make_tuned) -> HookedTransformer:
    """The base with every weight changed."""
    return make_tuned(base)


@pytest.fixture(scope="session")
def far(base, make_tuned) -> HookedTransformer:
    """The base with every weight changed so much that the line between the two is curved."""
    return make_tuned(base, size=0.3)


@pytest.fixture(scope="session")
def reviews() -> Tensor:
    """Twelve reviews of Reel."""
    from rlhf_lab.probes import ReelTruth

    return ReelTruth().reviews(12, seed=5)[0]
