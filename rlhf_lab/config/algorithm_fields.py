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
    """From rewards to the advantages of tokens, and the method of a paper that sets them."""

    method: MethodName | None = None
    """Set all that the method of a paper needs, see Methods below; given fields override it."""
    advantages: Advantages = "one_step"
    """Advantage estimator only, see method. With the value head: one_step, gae. Against the batch:
    reinforce, reinforce++. Against the greedy response: remax. Against the other responses to the
    prompt: reinforce++_baseline, rloo, grpo, dr_grpo, opo.
    """
    samples_per_prompt: int = 1
    """Responses to each prompt, which are compared with each other; divides batch_size."""
    gamma: float = 1.0
    """Discount per token, used by one_step, gae, reinforce and reinforce++."""
    whiten_rewards: bool = False
    """Scale token rewards, including the KL, to variance 1 over the batch; keep their mean."""
    gae_lambda: float = 0.95
    """Lambda of gae: 0 is the one-step estimate, 1 is the return minus the value."""
    normalize_advantages: bool = True
    """Whiten the advantages within each minibatch."""


@dataclass(frozen=True, kw_only=True)
class KLArgs:
    """The KL divergence from the reference model, and its control."""

    kl_coef: float = 2.5
    """Weight of the KL divergence from the reference model, in nats per token."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Subtract the KL's mean from the objective, or each token's KL (k1) from its reward."""
    kl_estimator: Literal["exact", "k1", "k2", "k3", "abs", "mse", "k3_straight_through"] = "exact"
    """Exact KL, or an estimate from the sampled token (see functional.kl_estimate)."""
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """Keep kl_coef, or adapt it so that the KL approaches kl_target."""
    kl_target: float = 6.0
    """KL that the adaptive controller aims at, in nats per sequence."""
    kl_horizon: int = 10_000
    """Sequences over which the adaptive controller can change kl_coef by a fifth."""
    reset_reference_every: int | None = None
    """Phases after which the policy becomes the new reference model; never when None."""


@dataclass(frozen=True, kw_only=True)
class PPOArgs:
    """The objective, its batches, and conditions on steps."""

    batch_size: int = 32
    """Sequences sampled per phase."""
    num_minibatches: int = 4
    """Minibatches per pass over the batch; must divide batch_size. The default is lowered."""
    batches_per_learning_phase: int = 2
    """Passes over the batch in one learning phase, each in a new random order."""
    policy_loss: Literal["ppo", "gspo", "cispo", "policy_gradient"] = "ppo"
    """Clip token ratios, response ratios (gspo), gradient weights (cispo) or nothing."""
    clip_coef: float = 0.2
    """PPO's epsilon: the probability ratio is clipped to [1 - clip_coef, 1 + clip_coef]."""
    clip_coef_high: float | None = None
    """Clip the ratio to 1 + clip_coef_high above (clip-higher); to 1 + clip_coef when None."""
    dual_clip: float | None = None
    """Lower bound of a token with a negative advantage: dual_clip times it; off when None."""
    max_log_ratio: float | None = None
    """Clip log-ratios to +-max_log_ratio, without gradient outside; off when None."""
    importance_correction: Literal["none", "truncated", "masked"] = "none"
    """Weight of a rollout_engine's token: 1, or its probability ratio, above 2 cut to 2 or to 0."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Policy loss: mean of tokens, mean of responses, or sum over (responses times gen_len)."""
    vf_coef: float = 0.15
    """Weight of the value loss in the objective."""
    vf_clip: float | None = None
    """Clip the value prediction to this distance from the rollout's value (PPO2); off when None."""
    ent_coef: float = 0.001
    """Weight of the entropy bonus in the objective."""
    target_kl: float | None = None
    """End the learning phase before a step at 1.5 times this KL per token (k3); off when None."""
    ratio_threshold: float | None = None
    """Skip the step of a minibatch whose mean probability ratio exceeds this; off when None."""


@dataclass(frozen=True, kw_only=True)
class OptimizerArgs:
    """The optimizer and its learning rates over the phases."""

    base_lr: float = 2e-5
    """Peak learning rate of the transformer. Adapters: 1e-3 in preset reel, 3e-4 in others."""
    head_lr: float = 5e-4
    """Peak learning rate of the value head, which starts untrained."""
    weight_decay: float = 0.01
    """AdamW's decoupled weight decay."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """AdamW with moments of 32 bits, or of 8 bits (bitsandbytes) in a quarter of the memory."""
    max_grad_norm: float | None = 1.0
    """Global norm that gradients are clipped to before each optimizer step; off when None."""
    warmup_steps: int = 20
    """Phases of linear warm-up; smaller than total_phases. The default is lowered."""
    final_scale: float = 0.1
    """The learning rates decay linearly to this fraction of their peak in the last phase."""


@dataclass(frozen=True, kw_only=True)
class SpeedArgs:
    """Memory and speed; the objective and its gradient stay the same."""

    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """Format of matrix products; all else stays in fp32. tf32 needs CUDA; MPS lacks bf16."""
    weight_precision: Literal["fp32", "bf16", "bf16_stochastic"] = "fp32"
    """Weights and activations. bf16 keeps an fp32 copy, bf16_stochastic rounds at random."""
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    """Each process (torchrun) stores all trained weights and moments (ddp, auto) or a shard."""
    cuda_graphs: bool = True
    """On CUDA, replay decode steps and gradients from CUDA graphs if no other code has to run."""
    cpu_tuning: bool = True
    """Let `train` keep freed memory and use the faster exact matrix product."""
    micro_batch_size: int | None = None
    """Sequences per forward and backward pass; divides the minibatch. All of it when None."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass: less memory, more time, no hooks in blocks."""
    generation_batch_size: int | None = None
    """Sequences sampled at a time, which saves memory; the samples are the same. All when None."""
    optimizer_in_backward: bool = False
    """Step each weight once its gradient is ready, which leaves none for after_backward."""


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
