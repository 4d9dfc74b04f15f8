"""Validation of settings: one table of ranges, and values that cannot be combined."""

import math
from collections.abc import Callable, Iterator
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple, get_type_hints

from beartype import BeartypeConf
from beartype.door import is_bearable

from rlhf_lab.config.groups import AllFields
from rlhf_lab.config.reward_names import reward_conflicts
from rlhf_lab.errors import ConfigError

NEED_GROUPS = ("reinforce++_baseline", "rloo", "grpo", "dr_grpo", "opo")  # several responses each
LOGGERS = ("tensorboard", "trackio")  # besides wandb


class Range(NamedTuple):
    """A condition on a value, and its description in error messages."""

    holds: Callable[[Any], Any]
    remedy: str


def _comma_separated(condition: Callable[[str], Any], what: str) -> Range:
    return Range(lambda v: all(map(condition, v.split(","))), f"{what}, comma-separated, or None")


POSITIVE = Range(lambda v: 0 < v < math.inf, "greater than 0")
AT_LEAST_0 = Range(lambda v: 0 <= v < math.inf, "0 or greater")
AT_LEAST_1 = Range(lambda v: v >= 1, "1 or greater")
TEMPERATURE = Range(
    lambda v: 1e-6 <= v < math.inf, "1e-6 or greater; top_k=1 takes the most likely token"
)
SEED = Range(lambda v: 0 <= v < 2**63, "0 or greater, and below 2**63")
RANGES = MappingProxyType(
    {
        POSITIVE: "clip_coef clip_coef_high max_log_ratio vf_clip max_grad_norm target_kl "
        "kl_target reward_clip lora_alpha",
        AT_LEAST_0: "base_lr head_lr weight_decay warmup_steps vf_coef ent_coef kl_coef "
        "min_response_length overlong_buffer lora_rank keep_checkpoints",
        AT_LEAST_1: "total_phases batch_size num_minibatches micro_batch_size kl_horizon "
        "generation_batch_size batches_per_learning_phase samples_per_prompt gen_len gen_len_min "
        "prompt_words top_k save_every dynamic_sampling reset_reference_every",
        SEED: "seed",
        TEMPERATURE: "temperature",
        Range(lambda v: 1 < v < math.inf, "greater than 1"): "ratio_threshold dual_clip",
        Range(lambda v: 0 <= v <= 1, "between 0 and 1"): "final_scale gamma gae_lambda",
        Range(lambda v: 0 < v <= 1, "greater than 0 and at most 1"): "top_p",
        Range(lambda v: -math.inf < v < 0, "below 0"): "reward_penalty",
        Range(str.strip, "a text that is not empty"): "base_model reward_fn reward_model "
        "wandb_project_name prompts_column labels_column answers_column positive_label wandb_group "
        "prompts system_prompt critic_path adapter_path",
        Range(lambda v: v and all(abs(x) < 1e38 for x in v), "one finite number per reward"): (
            "reward_weights"
        ),
        _comma_separated(len, "texts"): "stop_tokens",
        _comma_separated(str.strip, "tags"): "wandb_tags",
        _comma_separated(lambda n: n.strip().isascii() and n.strip().isdigit(), "token ids"): (
            "stop_token_ids"
        ),
    }
)


def check_range(of: Range, **values: Any) -> None:
    """Raise ConfigError if a value is out of range. None is valid."""
    for name, value in values.items():
        if value is not None and not of.holds(value):
            raise ConfigError(f"{name}={value!r} is out of range. It must be {of.remedy}.")


def check_args(args: AllFields) -> None:
    """Raise ConfigError for the first setting with a wrong type, range or combination."""
    for name, hint in get_type_hints(type(args)).items():
        _check_type(args, name, hint)
    for of, names in RANGES.items():
        check_range(of, **{name: getattr(args, name) for name in names.split()})
    conflicts = _batches, _weights, _texts, reward_conflicts, _algorithm
    for sentence in chain.from_iterable(find(args) for find in conflicts):
        raise ConfigError(sentence)


def _check_type(args: AllFields, name: str, hint: Any) -> None:
    """Raise ConfigError for a wrong type. Convert integers to floats and lists to tuples."""
    value, kind = getattr(args, name), getattr(hint, "__name__", str(hint).removeprefix("typing."))
    if name == "reward_fn" and callable(value):
        raise ConfigError(
            f"reward_fn={value!r} is a function, but settings are text. Pass it to the trainer: "
            "RLHFTrainer(args, reward_fn=...)."
        )
    if isinstance(value, list):
        value = tuple(value)  # JSON and YAML have lists
    numbers = value if isinstance(value, tuple) else (value,)
    is_flag_for_number = hint is not bool and any(isinstance(x, bool) for x in numbers)
    hints = float if isinstance(value, tuple) else hint  # beartype checks one item of a tuple
    widening = BeartypeConf(is_pep484_tower=True)  # integers are floats
    if (
        is_flag_for_number
        or not is_bearable(value, hint, conf=widening)
        or not all(is_bearable(x, hints, conf=widening) for x in numbers)
    ):
        raise ConfigError(f"{name}={value!r} has the wrong type. It must be {kind}.")
    if hint in (float, float | None) and isinstance(value, int) and abs(value) < 2**53:
        value = float(value)
    if isinstance(value, tuple):
        value = tuple(float(x) if abs(x) < 2**53 else x for x in value)
    object.__setattr__(args, name, value)  # the dataclass is frozen


def _batches(args: AllFields) -> Iterator[str]:
    for name in ("num_minibatches", "samples_per_prompt"):
        if args.batch_size % getattr(args, name):
            yield (
                f"batch_size={args.batch_size} is not divisible by {name}={getattr(args, name)}. "
                "Choose a divisor."
            )
    if args.micro_batch_size is not None and args.minibatch_size % args.micro_batch_size:
        yield (
            f"micro_batch_size={args.micro_batch_size} does not divide the minibatch of "
            f"batch_size / num_minibatches = {args.minibatch_size} sequences. Choose a divisor."
        )
    compares = args.advantages in NEED_GROUPS, args.dynamic_sampling is not None
    for name, needs_group in zip(("advantages", "dynamic_sampling"), compares, strict=True):
        if needs_group and args.samples_per_prompt == 1:
            yield (
                f"{name}={getattr(args, name)!r} compares the responses to a prompt, but "
                "samples_per_prompt=1. To compare, sample at least 2 per prompt, such as 8."
            )
    for name in ("max_grad_norm", "micro_batch_size"):
        if args.optimizer_in_backward and getattr(args, name) is not None:
            yield (
                "optimizer_in_backward=True steps each weight before other gradients are known, "
                f"which {name}={getattr(args, name)} needs. Set {name}=None."
            )


def _weights(args: AllFields) -> Iterator[str]:
    if args.lora_rank and args.adapter_path is not None:
        yield (
            f"lora_rank={args.lora_rank} creates new adapters, but adapter_path="
            f"{args.adapter_path!r} loads stored ones. Remove one of them."
        )
    only = {"lora_rank": 0, "adapter_path": None, "optimizer": "adamw", "precision": "fp32"}
    for name, value in only.items():
        if args.weight_precision != "fp32" and getattr(args, name) != value:
            yield (
                f"{name}={getattr(args, name)!r} cannot be combined with "
                f"weight_precision={args.weight_precision!r}, which has its own AdamW and products "
                f"and would round adapters away. Set {name}={value!r} or weight_precision='fp32'."
            )
    if args.critic_path is not None and args.value_head != "separate":
        yield (
            f"critic_path={args.critic_path!r} requires a separate critic, but "
            f"value_head={args.value_head!r}. Set value_head='separate'."
        )


def _texts(args: AllFields) -> Iterator[str]:
    for name in ("gen_len_min", "min_response_length", "overlong_buffer"):
        value = getattr(args, name) or 0
        if value > args.gen_len:
            yield f"{name}={value!r} exceeds gen_len={args.gen_len}. Lower it or raise gen_len."
    if not args.prefix and not args.prepend_bos:
        yield "prefix='' with prepend_bos=False is an empty prompt. Set prepend_bos=True."
    if args.system_prompt is not None and not args.chat:
        yield (
            f"system_prompt={args.system_prompt!r:.60} is a chat message, but chat=False. Set "
            "chat=True (--chat)."
        )
    for name in ("labels_column", "answers_column"):
        if getattr(args, name) is not None and args.prompts is None:
            yield (
                f"{name}={getattr(args, name)!r} is a column of prompts, but prompts=None. "
                "To read it, set prompts to a file with this column."
            )


def _algorithm(args: AllFields) -> Iterator[str]:
    for name in ("normalize_reward", "whiten_rewards"):
        if args.advantages == "remax" and getattr(args, name):
            yield (
                "advantages='remax' subtracts the reward of the greedy response, which "
                f"{name}=True would leave on another scale. Set {name}=False."
            )
    losses = {
        "clip_coef_high": ("ppo", "gspo", "cispo"),
        "dual_clip": ("ppo",),
        "max_log_ratio": ("ppo", "gspo"),
    }
    for name, supported in losses.items():
        if getattr(args, name) is not None and args.policy_loss not in supported:
            yield (
                f"{name}={getattr(args, name)!r} has no effect with policy_loss="
                f"{args.policy_loss!r}. Set it to None, or use {' or '.join(supported)}."
            )
    if args.kl_controller == "adaptive" and args.batch_size > args.kl_horizon:
        yield (
            f"batch_size={args.batch_size} exceeds kl_horizon={args.kl_horizon}, so one update "
            "could change kl_coef by more than a fifth. Raise kl_horizon."
        )
    for name in ("warmup_steps", "reset_reference_every"):
        value = getattr(args, name)
        if value is not None and value >= args.total_phases:
            yield (
                f"{name}={value} must be smaller than total_phases={args.total_phases}. "
                "Lower it, or train longer."
            )
    for name in args.logger_names:
        if name not in LOGGERS:
            yield (
                f"loggers={args.loggers!r} has the unknown {name!r}. Choose from "
                f"{', '.join(LOGGERS)}; metrics.jsonl is always written, wandb with wandb_mode."
            )
