"""AdamW for weights in bfloat16: by a copy in float32, or with stochastic rounding and no copy."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.adamw import adamw

from rlhf_lab.training.random_streams import phase_generator

CUT_BITS = 16
"""By which a bfloat16 is shorter than a float32: the same exponent, fewer bits of the fraction."""


def round_stochastically(
    x: Float[Tensor, "*shape"], generator: torch.Generator
) -> Float[Tensor, "*shape"]:
    """Round float32 to one of the two bfloat16 next to it, the nearer one more often.

    1. Read the number as an integer; the last 16 bits are what a bfloat16 leaves out.
    2. Add a random integer of 16 bits, which carries into the bits above with a probability of the
       part that is left out.
    3. Cut the last 16 bits off.

    E[round(x)] = x, so that steps far below a bfloat16's resolution (1 part in 256) add up. What a
    bfloat16 represents stays as it is, nan and infinities too; no finite number becomes infinite.

    P(up) = (x - down) / (up - down)   (Gupta et al. 2015, arXiv 1502.02551, section 3)

    Args:
        generator: on the device of x.
    """
    noise = torch.randint(
        0, 1 << CUT_BITS, x.shape, generator=generator, device=x.device, dtype=torch.int32
    )
    kept_bits = -1 << CUT_BITS
    rounded = ((x.view(torch.int32) + noise) & kept_bits).view(torch.float32)
    most = torch.finfo(torch.bfloat16).max
    rounded = torch.where(x.isfinite(), rounded.clamp(-most, most), x)
    return rounded.to(torch.bfloat16)


class HalfAdamW(Optimizer):
    """AdamW that computes each update in float32, for weights that are kept in bfloat16.

    With a copy, weight and moments of float32 are in its state: weights are the copy, rounded to
    the nearest (Micikevicius et al. 2018, "Mixed Precision Training"). Without one, weights and
    moments are rounded stochastically: rounded to the nearest, a weight would ignore steps below 1
    part in 512 of it, and a second moment, which falls by 1 part in 1000 a step, would never fall.
    Weights of float32, as those of the value head, are stepped as ever.

    Args:
        groups: as an `AdamW` has them.
        policy: whose weights they are; their order numbers the random streams.
        has_copy: keep a copy in float32.
        seed: of the rounding, with the number of the step and of the weight.
    """

    def __init__(
        self, groups: list[dict[str, Any]], policy: nn.Module, has_copy: bool, seed: int
    ) -> None:
        super().__init__(groups, {})
        self.has_copy, self.seed = has_copy, seed
        self._numbers = {id(weight): i for i, weight in enumerate(policy.parameters())}

    def state_dtypes(self, weight: Tensor) -> dict[str, torch.dtype]:
        """What is kept of a weight besides the number of steps, and in which format."""
        moments = torch.float32 if self.has_copy else weight.dtype
        kept = {"exp_avg": moments, "exp_avg_sq": moments}
        if self.has_copy and weight.dtype != torch.float32:
            kept["copy"] = torch.float32
        return kept

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Step every weight that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step_one(weight, group)

    def _step_one(self, weight: Tensor, group: Mapping[str, Any]) -> None:
        """Step one weight, in float32, and put it and its moments back in their formats."""
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros(())
            for name, dtype in self.state_dtypes(weight).items():
                is_copy = name == "copy"
                start = weight.detach() if is_copy else torch.zeros_like(weight)
                state[name] = start.to(dtype, copy=True)
        exact = state["copy"] if "copy" in state else weight.detach().float()
        first, second = state["exp_avg"].float(), state["exp_avg_sq"].float()
        adamw(
            *([exact], [weight.grad.float()], [first], [second], [], [state["step"]]),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            foreach=False,
        )
        changed = {"exp_avg": first, "exp_avg_sq": second}
        changed = {name: x for name, x in changed.items() if state[name].dtype != x.dtype}
        generator = None
        if not self.has_copy and weight.dtype != torch.float32:
            generator = self._generator(weight, int(state["step"]))
        for kept, x in [(weight, exact), *((state[name], x) for name, x in changed.items())]:
            kept.copy_(x if generator is None else round_stochastically(x, generator))

    def _generator(self, weight: Tensor, step: int) -> torch.Generator:
        """The random numbers of one weight's step, on its device; the same in a resumed run."""
        seed = phase_generator(
            self.seed, step, "rounding", self._numbers[id(weight)]
        ).initial_seed()
        return torch.Generator(weight.device).manual_seed(seed)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As every optimiser's; what is kept in float32 is not rounded to its weight's format."""
        super().load_state_dict(state_dict)
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for index, saved in state_dict["state"].items():
            weight = weights[index]
            for name, dtype in self.state_dtypes(weight).items():
                self.state[weight][name] = saved[name].to(weight.device, dtype, copy=True)


def state_dtypes(optimizer: Optimizer, weight: Tensor) -> dict[str, torch.dtype]:
    """What an AdamW of any kind keeps of a weight besides steps, where that has its shape."""
    if isinstance(optimizer, HalfAdamW):
        return optimizer.state_dtypes(weight)
    return {"exp_avg": weight.dtype, "exp_avg_sq": weight.dtype}


def for_half_weights(optimizer: AdamW, policy: nn.Module, has_copy: bool, seed: int) -> HalfAdamW:
    """An optimiser of the same parameters and settings, for weights in bfloat16."""
    taken = ("params", "lr", "weight_decay", "betas", "eps", "maximize")
    groups = [{name: group[name] for name in taken} for group in optimizer.param_groups]
    return HalfAdamW(groups, policy, has_copy, seed)
