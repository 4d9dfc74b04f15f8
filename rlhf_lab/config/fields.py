"""Fields of the run, models, sampling and rewards, in the groups of docs/settings.md."""

from dataclasses import dataclass
from typing import Literal

from rlhf_lab.config.presets import Preset


@dataclass(frozen=True, kw_only=True)
class RunArgs:
    """Length, seed and device, checkpoints and loggers."""

    preset: Preset = "gpt2-medium"
    """Starting values for all fields below; any of them can be overridden."""
    seed: int = 1
    """Seed for the value head's initial weights, sampling noise and minibatch order."""
    device: str = "auto"
    """cpu, cuda, cuda:0 or mps; auto picks CUDA, then MPS, then CPU."""
    total_phases: int = 200
    """Phases in the run. Each is a rollout followed by gradient steps."""
    save_every: int = 1
    """Phases between two checkpoints, from which a killed run can resume."""
    keep_checkpoints: int | None = None
    """Checkpoints to keep in addition to the first, best and last; all when None."""
    wandb_mode: Literal["disabled", "online", "offline"] | None = None
    """Mode of Weights & Biases. For its environment variables, see docs/wandb.md."""
    wandb_project_name: str = "rlhf_transformers"
    """Project in Weights & Biases and trackio."""
    wandb_entity: str | None = None
    """User or team in Weights & Biases; your default when None."""
    wandb_group: str | None = None
    """Group of the run in Weights & Biases and trackio."""
    wandb_tags: str | None = None
    """Comma-separated tags in Weights & Biases."""
    wandb_notes: str | None = None
    """Notes in Weights & Biases."""
    loggers: str = ""
    """More loggers, comma-separated: tensorboard, trackio."""
    log_probes: bool = False
    """Also log the records and pictures of probes."""


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
    """The model to train, and its value head."""

    base_model: str = "gpt2-medium"
    """Model to train: reel-nano or sums-nano (seeds: -b, -c), a directory or a hub id."""
    value_head: Literal["shared", "detached", "separate"] = "shared"
    """Weights that the value loss trains: the policy's, only the head, or a separate critic."""
    critic_path: str | None = None
    """Reward model that initializes the separate critic; the policy when None."""


@dataclass(frozen=True, kw_only=True)
class AdapterArgs:
    """LoRA adapters."""

    lora_rank: int = 0
    """Rank of the LoRA adapters; 0 trains all weights instead."""
    lora_alpha: float = 16.0
    """Adapters are multiplied by lora_alpha / lora_rank."""
    adapter_path: str | None = None
    """PEFT adapter to continue training, with its own alpha and targets."""
    lora_targets: str = "W_Q,W_V"
    """Comma-separated matrices that get adapters: W_Q, W_K, W_V, W_O, W_in, W_out, W_gate."""


@dataclass(frozen=True, kw_only=True)
class SamplingArgs:
    """Prompts and sampling."""

    prefix: str = "This is"
    """Prompt for all sequences, unless prompts is set."""
    prompts: str | None = None
    """Prompts: a file with prompts_column or one per line, hub:NAME:SPLIT, or sums."""
    prompts_column: str = "prompt"
    """Column with the prompts."""
    prompt_words: int | None = None
    """Use only this many words of each prompt; all when None."""
    dynamic_sampling: int | None = None
    """Redraw prompts with equal rewards up to this many times (DAPO); off when None."""
    prepend_bos: bool = True
    """Start prompts with the beginning-of-sequence token."""
    gen_len: int = 50
    """Tokens to generate per sequence."""
    gen_len_min: int | None = None
    """If set, each phase draws its length between this and gen_len."""
    stop_at_eos: bool = False
    """End responses at the end-of-sequence token."""
    stop_tokens: str | None = None
    """Other texts that end a response, comma-separated, each one token with its leading space."""
    stop_token_ids: str | None = None
    """Other token ids that end a response, comma-separated."""
    temperature: float = 1.0
    """Temperature for sampling and for all log-probs."""
    top_k: int | None = 10
    """Sample only from the k most likely tokens; off when None."""
    top_p: float | None = None
    """Sample from the smallest set of tokens with this probability; off when None."""


@dataclass(frozen=True, kw_only=True)
class ChatArgs:
    """Chats, in the tokenizer's chat template."""

    chat: bool = False
    """Render prompts with the chat template; reward functions see only the response."""
    system_prompt: str | None = None
    """System message for chats that have none; no message when None."""


@dataclass(frozen=True, kw_only=True)
class RewardArgs:
    """The reward, and how it is processed."""

    reward_fn: str = "sentiment"
    """One or several, comma-separated: sentiment, learned, zero, count:TEXT, regex:PATTERN,
    json_schema:FILE, exact_match, diversity:N; on Reel also true_reward, smoothed,
    smoothed_popcorn, ignore_negation, bag_of_adjectives, length; on sums also sums:exact, ...
    """
    reward_weights: tuple[float, ...] | None = None
    """Weights of several rewards, in order; 1 each when None."""
    reward_model: str = "lvwerra/distilbert-imdb"
    """Sentiment classifier, or directory of a reward model from train-reward."""
    reward_per_token: bool = False
    """Reward each token with its change in score (only for reward_fn=learned)."""
    direction: Literal["pos", "neg"] = "pos"
    """Class that the classifier rewards."""
    positive_label: str | None = None
    """Name of the classifier's positive class, if it cannot be inferred."""
    labels_column: str | None = None
    """Column of texts whose reward is subtracted as a baseline; off when None."""
    answers_column: str | None = None
    """Column with the right answers, for exact_match and ResponseReward."""
    normalize_reward: bool = True
    """Standardize rewards within each batch."""
    reward_scaling: Literal["off", "scale", "scale_and_shift"] = "off"
    """Divide rewards by their running standard deviation, optionally centered."""
    reward_clip: float | None = None
    """Clip rewards to +-reward_clip after scaling; off when None."""
    penalize_no_eos: bool = False
    """Give reward_penalty to responses without a stop token."""
    min_response_length: int = 0
    """Give reward_penalty to shorter responses."""
    reward_penalty: float = -3.0
    """Negative reward for responses that are too short or have no stop token."""
    overlong_buffer: int = 0
    """Subtract up to 1 from the reward in the last overlong_buffer tokens before gen_len."""
