"""AdamW for bfloat16 weights: with a float32 copy, or with stochastic rounding."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.adamw import adamw

from rlhf_lab.training.random_streams import phase_generator

CUT_BITS = 16  # of a float32's fraction that a bfloat16 lacks


def round_stochastically(
    x: Float[Tensor, "*shape"], generator: torch.Generator
) -> Float[Tensor, "*shape"]:
    """Round float32 to one of the two neighboring bfloat16 numbers, the nearer one more often.

    1. Read the number as an integer and add a random integer of 16 bits, which carries with a
       probability equal to the fraction in the last 16 bits.
    2. Set the last 16 bits to 0.

    E[round(x)] = x, so steps far below the resolution of bfloat16 (1 part in 256) add up. bfloat16
    numbers, nan and infinities stay unchanged; no finite number becomes infinite.

    P(up) = (x - down) / (up - down)   (Gupta et al. 2015, arXiv 1502.02551, section 3)
    """
    noise = torch.randint(
        0, 1 << CUT_BITS, x.shape, generator=generator, device=x.device, dtype=torch.int32
    )
    rounded = ((x.view(torch.int32) + noise) & (-1 << CUT_BITS)).view(torch.float32)
    most = torch.finfo(torch.bfloat16).max
    rounded = torch.where(x.isfinite(), rounded.clamp(-most, most), x)
    return rounded.to(torch.bfloat16)


class HalfAdamW(Optimizer):
    """AdamW that computes each update in float32 and stores the weights in bfloat16.

    With a copy, weights and moments are stored in float32, and weights are the rounded copy
    (Micikevicius et al. 2018, "Mixed Precision Training"). Without one, weights and moments are
    rounded stochastically, since rounding to the nearest would drop small steps. Float32 weights
    are updated as by AdamW. The rounding depends on seed, step and number of the weight.
    """

    def __init__(
        self, groups: list[dict[str, Any]], policy: nn.Module, has_copy: bool, seed: int
    ) -> None:
        super().__init__(groups, {})
        self.has_copy, self.seed = has_copy, seed
        self._numbers = {id(weight): i for i, weight in enumerate(policy.parameters())}

    def state_dtypes(self, weight: Tensor) -> dict[str, torch.dtype]:
        moments = torch.float32 if self.has_copy else weight.dtype
        kept = {"exp_avg": moments, "exp_avg_sq": moments}
        if self.has_copy and weight.dtype != torch.float32:
            kept["copy"] = torch.float32
        return kept

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step_one(weight, group)

    def _step_one(self, weight: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros(())
            for name, dtype in self.state_dtypes(weight).items():
                start = weight.detach() if name == "copy" else torch.zeros_like(weight)
                state[name] = start.to(dtype, copy=True)
        exact = state["copy"] if "copy" in state else weight.detach().float()
        first, second = state["exp_avg"].float(), state["exp_avg_sq"].float()
        adamw(
            *([exact], [weight.grad.float()], [first], [second], [], [state["step"]]),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            foreach=False,
            **{name: group[name] for name in ("lr", "weight_decay", "eps", "maximize")},
        )
        changed = {"exp_avg": first, "exp_avg_sq": second}
        changed = {name: x for name, x in changed.items() if state[name].dtype != x.dtype}
        generator = None
        if not self.has_copy and weight.dtype != torch.float32:
            number = self._numbers[id(weight)]
            stream = phase_generator(self.seed, int(state["step"]), "rounding", number)
            generator = torch.Generator(weight.device).manual_seed(stream.initial_seed())
        for kept, x in [(weight, exact), *((state[name], x) for name, x in changed.items())]:
            kept.copy_(x if generator is None else round_stochastically(x, generator))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state in the stored formats; torch would convert it to the weights' format."""
        super().load_state_dict(state_dict)
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for index, saved in state_dict["state"].items():
            weight = weights[index]
            for name, dtype in self.state_dtypes(weight).items():
                self.state[weight][name] = saved[name].to(weight.device, dtype, copy=True)


def for_half_weights(optimizer: AdamW, policy: nn.Module, has_copy: bool, seed: int) -> HalfAdamW:
    """Build a `HalfAdamW` with the parameters and settings of an AdamW."""
    taken = ("params", "lr", "weight_decay", "betas", "eps", "maximize")
    groups = [{name: group[name] for name in taken} for group in optimizer.param_groups]
    return HalfAdamW(groups, policy, has_copy, seed)
