"""Fields of the algorithm, optimizer and speed, and all groups of settings."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from rlhf_lab.config import fields
from rlhf_lab.config.presets import MethodName

Advantages = Literal[
    "one_step", "gae", "reinforce", "reinforce++", "reinforce++_baseline",
    "remax", "rloo", "grpo", "dr_grpo", "opo",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CreditArgs:
    """Advantages, and methods that set several fields."""

    method: MethodName | None = None
    """Apply the settings of a paper's method (see Methods), except for fields that you set."""
    advantages: Advantages = "one_step"
    """Advantage estimator. The baseline is the value head (one_step, gae), 0 (reinforce), the batch
    mean (reinforce++), the greedy response (remax) or the prompt's other responses.
    """
    samples_per_prompt: int = 1
    """Responses per prompt; divides batch_size."""
    gamma: float = 1.0
    """Discount factor per token (one_step, gae, reinforce and reinforce++)."""
    whiten_rewards: bool = False
    """Scale token rewards, including the KL, to variance 1 over the batch; keep their mean."""
    gae_lambda: float = 0.95
    """Lambda of gae only, from 0 (one-step estimate) to 1 (return minus value)."""
    normalize_advantages: bool = True
    """Whiten advantages within each minibatch."""


@dataclass(frozen=True, kw_only=True)
class KLArgs:
    """The KL from the reference model, and its controller."""

    kl_coef: float = 2.5
    """Weight of the KL from the reference model, in nats per token."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Subtract the mean KL from the objective, or each token's KL from its reward."""
    kl_estimator: Literal["exact", "k1", "k2", "k3", "abs", "mse", "k3_straight_through"] = "exact"
    """Exact KL, or an estimate from the sampled tokens (see functional.kl_estimate)."""
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """Keep kl_coef fixed, or adapt it to kl_target."""
    kl_target: float = 6.0
    """Target of the adaptive controller, in nats per sequence."""
    kl_horizon: int = 10_000
    """Sequences in which the controller can change kl_coef by a fifth."""
    reference_model: str | None = None
    """Model that the KL is measured from, such as the teacher of gkd; base_model when None."""
    reset_reference_every: int | None = None
    """Phases after which the policy becomes the new reference; never when None."""


@dataclass(frozen=True, kw_only=True)
class PPOArgs:
    """The objective and its batches."""

    batch_size: int = 32
    """Sequences per phase."""
    num_minibatches: int = 4
    """Minibatches per pass; divides batch_size. The default is reduced to fit."""
    batches_per_learning_phase: int = 2
    """Passes over the batch in each phase, each in a new random order."""
    policy_loss: Literal["ppo", "gspo", "cispo", "policy_gradient"] = "ppo"
    """What to clip: token ratios, response ratios (gspo), gradient weights (cispo) or nothing."""
    clip_coef: float = 0.2
    """Epsilon of PPO: ratios are clipped to [1 - clip_coef, 1 + clip_coef]."""
    clip_coef_high: float | None = None
    """Separate upper epsilon (clip-higher); clip_coef when None."""
    dual_clip: float | None = None
    """Bound the objective from below by dual_clip times a negative advantage; off when None."""
    max_log_ratio: float | None = None
    """Clip log-ratios to +-max_log_ratio; off when None."""
    importance_correction: Literal["none", "truncated", "masked"] = "none"
    """Weight tokens of a rollout_engine by their ratio. Ratios above 2 become 2 or 0."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Average over tokens or responses, or divide by responses times gen_len."""
    vf_coef: float = 0.15
    """Weight of the value loss."""
    vf_clip: float | None = None
    """Clip values to within this distance of the rollout's values (PPO2); off when None."""
    ent_coef: float = 0.001
    """Weight of the entropy bonus."""
    target_kl: float | None = None
    """End a phase early if the KL per token (k3) exceeds 1.5 times this; off when None."""
    ratio_threshold: float | None = None
    """Skip minibatches whose mean ratio exceeds this; off when None."""


@dataclass(frozen=True, kw_only=True)
class OptimizerArgs:
    """The optimizer and its learning rates."""

    base_lr: float = 2e-5
    """Peak learning rate of the transformer; with adapters, 1e-3 on Reel and 3e-4 elsewhere."""
    head_lr: float = 5e-4
    """Peak learning rate of the value head."""
    weight_decay: float = 0.01
    """AdamW's decoupled weight decay."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """AdamW with 32-bit or 8-bit moments (bitsandbytes)."""
    max_grad_norm: float | None = 1.0
    """Clip the gradient to this global norm; off when None."""
    warmup_steps: int = 20
    """Phases of linear warm-up. The default is reduced to fit total_phases."""
    final_scale: float = 0.1
    """Fraction of the peak to which learning rates decay linearly."""


@dataclass(frozen=True, kw_only=True)
class SpeedArgs:
    """Memory and speed. These do not change the objective."""

    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """Format of matrix products. tf32 needs CUDA, and bf16 is not supported on MPS."""
    weight_precision: Literal["fp32", "bf16", "bf16_stochastic"] = "fp32"
    """Format of weights. bf16 keeps an fp32 copy, and bf16_stochastic rounds randomly."""
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    """Store all weights in each torchrun process (ddp, auto), or one shard (fsdp)."""
    cuda_graphs: bool = True
    """Use CUDA graphs for decoding and, unless there are hooks, for gradients."""
    reference_device: str | None = None
    """Device of the reference's blocks, such as cpu for a small GPU; the policy's when None."""
    cpu_tuning: bool = True
    """Let `train` keep freed memory and use a faster matrix product with exact results."""
    micro_batch_size: int | None = None
    """Sequences per forward and backward pass; the whole minibatch when None."""
    activation_checkpointing: bool = False
    """Recompute blocks in the backward pass, to save memory. Hooks inside blocks are rejected."""
    generation_batch_size: int | None = None
    """Sequences to sample at once; the whole batch when None."""
    optimizer_in_backward: bool = False
    """Step each weight as soon as its gradient is ready, to save memory."""


# a dataclass starts with the fields of its last base: the order of GROUPS
@dataclass(frozen=True, kw_only=True)
class AllFields(
    SpeedArgs,
    OptimizerArgs,
    KLArgs,
    PPOArgs,
    CreditArgs,
    fields.RewardArgs,
    fields.ChatArgs,
    fields.SamplingArgs,
    fields.AdapterArgs,
    fields.ModelArgs,
    fields.RunArgs,
):
    """All fields of all groups, flat and not validated."""

    @property
    def rows_at_once(self) -> int:
        """Sequences per forward pass without gradients."""
        return self.micro_batch_size or self.batch_size // self.num_minibatches

    @property
    def rounding(self) -> str:
        """The coarsest format that a forward pass rounds to: fp32, tf32 or bf16."""
        return self.precision if self.weight_precision == "fp32" else "bf16"


TITLES = "run and logs,model,adapter,sampling,chat,reward,credit,PPO,KL,optimizer,memory and speed"
# classes of settings by their headings in `--help` and docs/settings.md
GROUPS: MappingProxyType[str, type] = MappingProxyType(
    dict(zip(TITLES.split(","), reversed(AllFields.__bases__), strict=True))
)
