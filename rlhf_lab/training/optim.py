"""The optimiser with two learning rates, and their schedule over the phases."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import TransformerWithCritic, TransformerWithValueHead
from rlhf_lab.training.eight_bit import with_8bit_moments
from rlhf_lab.training.half_weights import for_half_weights


def get_optimizer(
    policy: TransformerWithValueHead, base_lr: float, head_lr: float, weight_decay: float = 0.01
) -> AdamW:
    """AdamW that maximises, with a learning rate for the transformer and one for the value head.

    1. Make one parameter group of the transformer, with `base_lr`.
    2. Make another of the value head, with `head_lr`: it starts untrained and has further to go.
    3. Maximise, since the objective is something to have more of.
    4. Update all moments of a parameter in one pass over memory (fused).

    Source: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization".
    """
    groups = [
        {"params": list(policy.base_model.parameters()), "lr": base_lr},
        {"params": list(policy.value_head.parameters()), "lr": head_lr},
    ]
    # torch lowers a loss by default; an objective is to be raised
    return AdamW(groups, maximize=True, weight_decay=weight_decay, fused=True)


def add_critic(optimizer: Optimizer, policy: TransformerWithValueHead) -> None:
    """Let a separate critic, if the policy has one, learn at the transformer's rate, in place."""
    if isinstance(policy, TransformerWithCritic):
        optimizer.param_groups[0]["params"].extend(policy.critic.parameters())


def lr_scale(phase: int, warmup_steps: int, total_phases: int, final_scale: float) -> float:
    """What the learning rates are multiplied by in a phase: a linear rise to 1, then a linear fall.

    1. During warm-up, (phase + 1) / (warmup_steps + 1): the first phase already learns something.
    2. Then fall from 1, in phase `warmup_steps`, to `final_scale`, in the last phase.
    3. Stay there after that. If phase `warmup_steps` is itself the last one, nothing falls: stay
       at 1.
    """
    if phase < warmup_steps:
        return (phase + 1) / (warmup_steps + 1)
    decay_phases = total_phases - 1 - warmup_steps
    progress = min(1.0, (phase - warmup_steps) / decay_phases) if decay_phases > 0 else 0.0
    return 1 - (1 - final_scale) * progress


def get_optimizer_and_scheduler(
    args: RLHFArgs, policy: TransformerWithValueHead
) -> tuple[Optimizer, LambdaLR]:
    """The optimiser and its schedule, which is stepped once per phase.

    1. Make the optimiser with the peak learning rates (`get_optimizer`), with the moments that
       `args.optimizer` names (`with_8bit_moments`), for weights of `args.weight_precision`
       (`for_half_weights`, of which only "bf16" keeps a copy in float32).
    2. Let the schedule multiply both rates by `lr_scale` of the phase, worked out anew in each.
    """
    optimizer = get_optimizer(policy, args.base_lr, args.head_lr, args.weight_decay)
    if args.optimizer == "adamw_8bit":
        optimizer = with_8bit_moments(optimizer)
    if args.weight_precision != "fp32":
        has_copy = args.weight_precision == "bf16"
        optimizer = for_half_weights(optimizer, policy, has_copy, args.seed)

    def scale(phase: int) -> float:
        return lr_scale(phase, args.warmup_steps, args.total_phases, args.final_scale)

    return optimizer, LambdaLR(optimizer, lr_lambda=scale)


def own_optimizer_and_scheduler(
    args: RLHFArgs,
    policy: TransformerWithValueHead,
    optimizer: Any,
    scheduler: Any,
) -> tuple[Optimizer, LRScheduler]:
    """The caller's optimiser, made to maximise, and its schedule.

    Raises:
        ConfigError: a schedule without its optimiser, or one of another; parameters that are not
            the policy's; an optimiser that cannot maximise, or one that settings forbid.
    """
    if optimizer is None:
        raise ConfigError("scheduler is handed in without its optimizer; hand in both.")
    if args.optimizer_in_backward:
        raise ConfigError(
            "optimizer_in_backward=True needs the optimizer that the settings describe; leave it "
            "False, or hand in none."
        )
    if args.weight_precision != "fp32":
        raise ConfigError(
            f"weight_precision={args.weight_precision!r} needs the optimizer that the settings "
            "describe; leave it 'fp32', or hand in none."
        )
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"optimizer={optimizer!r} is no optimizer; hand in one of torch.optim.")
    groups = optimizer.param_groups
    learned = {id(p) for group in groups for p in group["params"]}
    if not learned or not learned <= {id(p) for p in policy.parameters()}:
        raise ConfigError(
            "the optimizer's parameters are not the policy's; build the policy first, and hand in "
            "both: RLHFTrainer(args, policy=policy, optimizer=AdamW(policy.parameters(), lr=1e-5))."
        )
    if not all("maximize" in group for group in groups):
        raise ConfigError(
            f"{type(optimizer).__name__} has no option maximize, and the objective is raised, not "
            "lowered; choose one that has it, as those of torch do."
        )
    for group in groups:
        group["maximize"] = True
    if scheduler is None:
        return optimizer, LambdaLR(optimizer, lambda phase: 1.0)
    if scheduler.optimizer is not optimizer:
        raise ConfigError("the scheduler is of another optimizer; hand in its own.")
    return optimizer, scheduler


def clip_gradients(
    policy: TransformerWithValueHead, max_grad_norm: float | None
) -> Float[Tensor, ""]:
    """Scale all gradients down, in place, if their common norm exceeds a limit; return the norm.

    1. Take the Euclidean norm over all parameters together.
    2. If it is above the limit, or not finite, multiply every gradient by limit / norm; otherwise
       by 1, or, where the host can see the norm for nothing, not at all.

    Args:
        max_grad_norm: the limit; none when None.
    """
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if hasattr(norm, "full_tensor"):  # of shards, which each process scales for itself
        norm, gradients = norm.full_tensor(), [shard.to_local() for shard in gradients]
    if max_grad_norm is None or (is_at_hand(norm) and norm <= max_grad_norm):
        return norm
    scale = torch.where(norm <= max_grad_norm, 1.0, max_grad_norm / (norm + 1e-6))
    torch._foreach_mul_(gradients, scale)
    return norm


def is_at_hand(x: Tensor) -> bool:
    """Whether the host can read a tensor without waiting for a device to finish its queue."""
    return x.device.type == "cpu"


def step_if(sound: Bool[Tensor, ""], optimizer: Optimizer) -> None:
    """Step, but leave weights and moments as they are where `sound` is False.

    A fused AdamW decides that on the device, by the flag that torch's GradScaler sets, so that
    the host need not wait; for any other optimiser the host looks.
    """
    is_fused = all(group.get("fused") for group in optimizer.param_groups)
    if isinstance(optimizer, AdamW) and is_fused and sound.device.type in ("cpu", "cuda"):
        # read by the fused kernel on its device: 1 leaves weights and moments as they are
        optimizer.found_inf = (~sound).float()
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf
    elif sound:
        optimizer.step()


class StepInBackward:
    """Steps each parameter as soon as its gradient is there, and lets the gradient go at once.

    Hooks on the parameters do it during `climb`; other backward passes are left alone. Without
    clipping by a common norm, the weights are those of one step at the end.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._sound: Bool[Tensor, ""] | None = None
        self._norms: list[Float[Tensor, ""]] = []
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._stepping(index))

    def climb(self, objective: Float[Tensor, ""], sound: Bool[Tensor, ""]) -> Float[Tensor, ""]:
        """Go back from the objective, stepping on the way; return the norm of the whole gradient.

        Args:
            sound: False leaves all weights as they are, as a gradient that is not finite does those
                of its parameter.
        """
        self.optimizer.zero_grad()
        self._sound, self._norms = sound, []
        try:
            objective.backward()
        finally:
            self._sound = None
        return torch.linalg.vector_norm(torch.stack(self._norms))

    def _stepping(self, index: int) -> Callable[[Tensor], None]:
        """What is done with a parameter of a group when its gradient is there."""

        def step(parameter: Tensor) -> None:
            if self._sound is None:
                return
            norm = torch.linalg.vector_norm(parameter.grad)
            self._norms.append(norm)
            groups = self.optimizer.param_groups
            self.optimizer.param_groups = [groups[index] | {"params": [parameter]}]
            try:
                step_if(self._sound & norm.isfinite(), self.optimizer)
            finally:
                self.optimizer.param_groups = groups
            parameter.grad = None

        return step
