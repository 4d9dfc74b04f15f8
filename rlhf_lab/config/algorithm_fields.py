"""Fields of the algorithm, optimizer and speed, and all groups of settings."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from rlhf_lab.config import fields
from rlhf_lab.config.methods import MethodName

Advantages = Literal[
    "one_step", "gae", "reinforce", "reinforce++", "reinforce++_baseline",
    "remax", "rloo", "grpo", "dr_grpo", "opo",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CreditArgs:
    """Advantages, and methods that set several fields."""

    method: MethodName | None = None
    """Set everything that a paper's method needs (see Methods); fields you give override it."""
    advantages: Advantages = "one_step"
    """Advantage estimator. one_step and gae use the value head, reinforce and reinforce++ the
    batch, remax the greedy response, and the others the prompt's other responses.
    """
    samples_per_prompt: int = 1
    """Responses per prompt, which are compared with each other; divides batch_size."""
    gamma: float = 1.0
    """Discount per token, for one_step, gae, reinforce and reinforce++."""
    whiten_rewards: bool = False
    """Scale token rewards, KL included, to variance 1 over the batch; keep their mean."""
    gae_lambda: float = 0.95
    """GAE's lambda: 0 gives the one-step estimate, 1 the return minus the value."""
    normalize_advantages: bool = True
    """Whiten advantages within each minibatch."""


@dataclass(frozen=True, kw_only=True)
class KLArgs:
    """The KL from the reference model, and its controller."""

    kl_coef: float = 2.5
    """Weight of the KL from the reference model, in nats per token."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Subtract the mean KL from the objective, or each token's KL (k1) from its reward."""
    kl_estimator: Literal["exact", "k1", "k2", "k3", "abs", "mse", "k3_straight_through"] = "exact"
    """Exact KL, or an estimate from the sampled tokens (see functional.kl_estimate)."""
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """Keep kl_coef fixed, or adapt it to reach kl_target."""
    kl_target: float = 6.0
    """KL that the adaptive controller aims for, in nats per sequence."""
    kl_horizon: int = 10_000
    """Sequences over which the controller can change kl_coef by a fifth."""
    reset_reference_every: int | None = None
    """Make the policy the new reference every this many phases; never when None."""


@dataclass(frozen=True, kw_only=True)
class PPOArgs:
    """The objective and its batches."""

    batch_size: int = 32
    """Sequences per phase."""
    num_minibatches: int = 4
    """Minibatches per pass; divides batch_size. The default is lowered to fit."""
    batches_per_learning_phase: int = 2
    """Passes over the batch per phase, each in a new random order."""
    policy_loss: Literal["ppo", "gspo", "cispo", "policy_gradient"] = "ppo"
    """Clip token ratios, response ratios (gspo), gradient weights (cispo) or nothing."""
    clip_coef: float = 0.2
    """PPO's epsilon: ratios are clipped to [1 - clip_coef, 1 + clip_coef]."""
    clip_coef_high: float | None = None
    """Upper epsilon (clip-higher); clip_coef when None."""
    dual_clip: float | None = None
    """Lower bound of the objective at negative advantages: dual_clip times them; off when None."""
    max_log_ratio: float | None = None
    """Clip log-ratios to +-max_log_ratio, without gradient outside; off when None."""
    importance_correction: Literal["none", "truncated", "masked"] = "none"
    """Weight a rollout_engine's tokens by their ratio; above 2, cut it to 2 or to 0."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Average over tokens, over responses, or divide by responses times gen_len."""
    vf_coef: float = 0.15
    """Weight of the value loss."""
    vf_clip: float | None = None
    """Clip values to this distance from the rollout's values (PPO2); off when None."""
    ent_coef: float = 0.001
    """Weight of the entropy bonus."""
    target_kl: float | None = None
    """End a phase early at 1.5 times this KL per token (k3); off when None."""
    ratio_threshold: float | None = None
    """Skip minibatches whose mean ratio exceeds this; off when None."""


@dataclass(frozen=True, kw_only=True)
class OptimizerArgs:
    """The optimizer and its learning rates."""

    base_lr: float = 2e-5
    """Peak learning rate of the transformer. With adapters 1e-3 on Reel, 3e-4 elsewhere."""
    head_lr: float = 5e-4
    """Peak learning rate of the value head, which starts untrained."""
    weight_decay: float = 0.01
    """AdamW's decoupled weight decay."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """AdamW with 32-bit moments, or 8-bit ones (bitsandbytes) in a quarter of the memory."""
    max_grad_norm: float | None = 1.0
    """Clip the gradient's global norm to this before each step; off when None."""
    warmup_steps: int = 20
    """Phases of linear warm-up, below total_phases. The default is lowered to fit."""
    final_scale: float = 0.1
    """Learning rates decay linearly to this fraction of their peak."""


@dataclass(frozen=True, kw_only=True)
class SpeedArgs:
    """Memory and speed. These do not change the objective."""

    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """Format of matrix products; the rest stays in fp32. tf32 needs CUDA, and MPS lacks bf16."""
    weight_precision: Literal["fp32", "bf16", "bf16_stochastic"] = "fp32"
    """Format of weights. bf16 keeps an fp32 copy, bf16_stochastic rounds at random."""
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    """Each torchrun process keeps all weights and moments (ddp, auto) or one shard (fsdp)."""
    cuda_graphs: bool = True
    """On CUDA, use CUDA graphs for decoding and gradients, unless hooks have to run."""
    cpu_tuning: bool = True
    """Let `train` keep freed memory and use the faster exact matrix product."""
    micro_batch_size: int | None = None
    """Sequences per forward and backward pass; the whole minibatch when None."""
    activation_checkpointing: bool = False
    """Recompute blocks in the backward pass: less memory, more time, no hooks in blocks."""
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
    def minibatch_size(self) -> int:
        """Sequences per minibatch."""
        return self.batch_size // self.num_minibatches

    @property
    def rows_at_once(self) -> int:
        """Sequences per forward pass without gradients."""
        return self.micro_batch_size or self.minibatch_size

    @property
    def logger_names(self) -> list[str]:
        """The distinct names in `loggers`."""
        return [name for name in dict.fromkeys(map(str.strip, self.loggers.split(","))) if name]

    @property
    def rounding(self) -> str:
        """The coarsest format that a forward pass rounds to: fp32, tf32 or bf16."""
        return self.precision if self.weight_precision == "fp32" else "bf16"


TITLES = "run and logs,model,adapter,sampling,chat,reward,credit,PPO,KL,optimizer,memory and speed"
# classes of settings by their headings in `--help` and docs/settings.md
GROUPS: MappingProxyType[str, type] = MappingProxyType(
    dict(zip(TITLES.split(","), reversed(AllFields.__bases__), strict=True))
)
