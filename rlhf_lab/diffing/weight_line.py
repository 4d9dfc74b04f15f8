"""Straight line of weights between two models, and the logits of what lies on it."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.func import functional_call

from rlhf_lab.diffing.groups import weights_of_both
from rlhf_lab.models import merged_copy
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.models.padding import run_left_padded
from rlhf_lab.models.reference import model_where_exact


class WeightLine:
    """All weights between two models of one architecture, adapters merged, without hooks.

    On a device without float64 everything is on the CPU. Neither model is changed.

    Args:
        in_float64: hold weights and activations in float64; else as the first model does.

    Attributes:
        before, after, delta: weights by name, and their difference.

    Raises:
        ConfigError: the models have other weights than each other.
    """

    def __init__(self, model0: HookedModel, model1: HookedModel, in_float64: bool = False) -> None:
        model0, model1 = model_where_exact(model0), model_where_exact(model1)
        self.before, self.after = weights_of_both(model0, model1)
        self.model = merged_copy(model0)
        if in_float64:
            self.model.to(torch.float64, print_details=False)
            self.before, self.after = (
                {name: weight.double() for name, weight in weights.items()}
                for weights in (self.before, self.after)
            )
        self.delta = {name: self.after[name] - self.before[name] for name in self.before}

    @property
    def text_device(self) -> torch.device:
        """Where weights are, and text is to be."""
        return next(self.model.parameters()).device

    def at(self, alpha: float) -> dict[str, Float[Tensor, "..."]]:
        """All weights at a share of the way; at 0 and 1 those of the models, bit for bit."""
        return {name: torch.lerp(self.before[name], self.after[name], alpha) for name in self.after}

    def logits(
        self,
        weights: dict[str, Float[Tensor, "..."]],
        tokens: Int[Tensor, "batch seq"],
        attention_mask: Bool[Tensor, "batch seq"] | None = None,
    ) -> Float[Tensor, "batch seq d_vocab"]:
        """What the modules make of a text with these weights, in float64.

        Args:
            attention_mask: False on padding to the left of a prompt.
        """

        def run(rows: Int[Tensor, "batch seq"]) -> tuple[Tensor, ...]:
            mask = {"attention_mask": torch.ones_like(rows)}
            return (functional_call(self.model, weights, (rows,), mask),)

        return run_left_padded(run, tokens, attention_mask)[0].double()
