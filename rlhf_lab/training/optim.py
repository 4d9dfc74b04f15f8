"""Optimizers with two learning rates, also for 8-bit moments and bf16 weights; their schedule."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.adamw import adamw
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError, format_argument, import_extra
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.training.random_streams import phase_generator

CUT_BITS = 16  # of a float32's fraction that a bfloat16 lacks


def get_optimizer(
    policy: TransformerWithValueHead, base_lr: float, head_lr: float, weight_decay: float = 0.01
) -> AdamW:
    """Return an AdamW that maximizes, with learning rates for transformer and value head.

    1. Make one parameter group of the transformer, with `base_lr`.
    2. Make another of the value head, with `head_lr`: it starts untrained and has further to go.
    3. Maximize: torch lowers a loss by default, and the objective is to be raised.
    4. Update all moments of a parameter in one pass over memory (fused).

    Source: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization".
    """
    groups = [
        {"params": list(policy.base_model.parameters()), "lr": base_lr},
        {"params": list(policy.value_head.parameters()), "lr": head_lr},
    ]
    return AdamW(groups, maximize=True, weight_decay=weight_decay, fused=True)


def lr_scale(phase: int, warmup_steps: int, total_phases: int, final_scale: float) -> float:
    """Return the factor of the learning rates in a phase: a linear rise to 1, then a linear fall.

    1. During warm-up, (phase + 1) / (warmup_steps + 1): the first phase already learns something.
    2. Then fall from 1, in phase `warmup_steps`, to `final_scale`, in the last phase.
    3. Stay there after that, or at 1 if phase `warmup_steps` is the last one.
    """
    if phase < warmup_steps:
        return (phase + 1) / (warmup_steps + 1)
    decay_phases = total_phases - 1 - warmup_steps
    progress = min(1.0, (phase - warmup_steps) / decay_phases) if decay_phases > 0 else 0.0
    return 1 - (1 - final_scale) * progress


def get_optimizer_and_scheduler(
    args: RLHFArgs, policy: TransformerWithValueHead
) -> tuple[Optimizer, LambdaLR]:
    """Return the optimizer and its schedule, which is stepped once per phase.

    1. Make AdamW with the peak learning rates, with 8-bit moments if `args.optimizer` has them.
    2. If the weights are stored in half precision, use `HalfAdamW` with these groups. Only "bf16"
       keeps a float32 copy of the weights.
    3. Multiply both learning rates by `lr_scale` in each phase.
    """
    optimizer = get_optimizer(policy, args.base_lr, args.head_lr, args.weight_decay)
    if args.optimizer == "adamw_8bit":
        optimizer = with_8bit_moments(optimizer)
    if args.weight_precision != "fp32":
        has_copy = args.weight_precision == "bf16"
        optimizer = HalfAdamW(optimizer.param_groups, policy, has_copy, args.seed)
    scale = lambda phase: lr_scale(phase, args.warmup_steps, args.total_phases, args.final_scale)
    return optimizer, LambdaLR(optimizer, lr_lambda=scale)


def read_rates(policy: TransformerWithValueHead, scheduler: LRScheduler) -> tuple[float, float]:
    """Return the rates of the groups with weights of the transformer and the value head, or 0."""
    base, found = {id(p) for p in policy.base_model.parameters()}, scheduler.optimizer.param_groups
    ids = [{id(p) for p in group["params"]} for group in found]
    groups = [(weights, float(group["lr"])) for weights, group in zip(ids, found, strict=True)]
    is_sharded = {id(p) for p in policy.parameters()}.isdisjoint(set().union(*ids))  # FSDP2
    base_lr = next((lr for group, lr in groups if group & base or is_sharded), 0.0)
    head_lr = next((lr for group, lr in groups[::-1] if group - base), 0.0)
    return base_lr, head_lr


def with_8bit_moments(optimizer: AdamW) -> Optimizer:
    """Build bitsandbytes' AdamW with block-wise quantized moments from an AdamW's groups.

    It can only minimize, so gradients are negated during its step. Tensors of fewer than 4096
    numbers keep moments of 32 bits.

    Source: Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861.
    """
    taken = ("params", "lr", "weight_decay", "betas", "eps")
    groups = [{name: group[name] for name in taken} for group in optimizer.param_groups]
    package = import_extra(
        "bitsandbytes", "optimizer='adamw_8bit'", "eightbit", ", or set optimizer='adamw'"
    )
    eight_bit = package.optim.AdamW8bit(groups)
    eight_bit.register_step_pre_hook(_negate_gradients)
    eight_bit.register_step_post_hook(_negate_gradients)
    return eight_bit


def _negate_gradients(optimizer: Optimizer, *inputs: Any) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_neg_(gradients)


def validate_custom_optimizer(
    args: RLHFArgs, policy: TransformerWithValueHead, optimizer: Any, scheduler: Any
) -> tuple[Optimizer, LRScheduler]:
    """Set a custom optimizer to maximize; return it with its schedule, constant by default."""
    if not hasattr(optimizer, "param_groups"):
        name = format_argument(optimizer)
        raise ConfigError(f"optimizer={name} is not an optimizer. Pass one of torch.optim.")
    if args.optimizer_in_backward or args.weight_precision != "fp32":
        raise ConfigError(
            "optimizer_in_backward and weight_precision require the optimizer of the settings. Set "
            "optimizer_in_backward=False and weight_precision='fp32', or pass no optimizer."
        )
    learned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not learned or not learned <= {id(p) for p in policy.parameters()}:
        raise ConfigError(
            "The optimizer's parameters are not the policy's. Build the policy first and pass "
            "both: RLHFTrainer(args, policy=policy, optimizer=AdamW(policy.parameters(), lr=1e-5))."
        )
    if args.vf_coef and learned.isdisjoint(map(id, policy.value_head.parameters())):
        warnings.warn(
            "the optimizer has no parameter of policy.value_head, which therefore learns nothing. "
            "Add policy.value_head.parameters(), or set vf_coef=0.",
            stacklevel=2,
        )
    if not all("maximize" in group for group in optimizer.param_groups):
        raise ConfigError(
            f"{type(optimizer).__name__} has no option maximize, and the objective is maximized. "
            "Choose one that has it, such as those of torch.optim."
        )
    for group in optimizer.param_groups:
        group["maximize"] = True
    scheduler = LambdaLR(optimizer, lambda phase: 1.0) if scheduler is None else scheduler
    if getattr(scheduler, "optimizer", None) is not optimizer:
        name = format_argument(scheduler)
        raise ConfigError(f"scheduler={name} does not belong to the optimizer. Pass its own.")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError("ReduceLROnPlateau requires a metric in step(). Use LambdaLR.")
    return optimizer, scheduler


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
