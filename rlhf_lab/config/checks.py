"""Validation of a run's configuration: types, ranges, and values that do not go together."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple, get_type_hints

from beartype import BeartypeConf
from beartype.door import is_bearable

from rlhf_lab.config.groups import AllFields
from rlhf_lab.config.reward_checks import of_rewards
from rlhf_lab.errors import ConfigError

NEED_GROUPS = ("reinforce++_baseline", "rloo", "grpo", "dr_grpo", "opo")
"""Estimators that compare the answers to one prompt with each other."""
LOGGERS = ("tensorboard", "trackio")
"""What `RLHFArgs.loggers` may name."""


class Range(NamedTuple):
    """What numbers, or names, have to be, and that in words."""

    holds: Callable[[Any], Any]
    remedy: str


POSITIVE = Range(lambda v: 0 < v < math.inf, "greater than 0")
AT_LEAST_0 = Range(lambda v: 0 <= v < math.inf, "0 or greater")
AT_LEAST_1 = Range(lambda v: v >= 1, "1 or greater")
TEMPERATURE = Range(
    lambda v: 1e-6 <= v < math.inf, "1e-6 or greater; top_k=1 takes the likeliest token"
)
SEED = Range(lambda v: 0 <= v < 2**63, "0 or greater, and below 2**63")
RANGES = (
    (
        POSITIVE,
        "clip_coef clip_coef_high max_log_ratio vf_clip max_grad_norm target_kl "
        "kl_target reward_clip lora_alpha",
    ),
    (
        AT_LEAST_0,
        "base_lr head_lr weight_decay warmup_steps vf_coef ent_coef kl_coef "
        "min_response_length overlong_buffer lora_rank keep_checkpoints",
    ),
    (
        AT_LEAST_1,
        "total_phases batch_size num_minibatches micro_batch_size generation_batch_size "
        "batches_per_learning_phase samples_per_prompt gen_len gen_len_min prompt_words top_k "
        "kl_horizon save_every dynamic_sampling reset_reference_every",
    ),
    (SEED, "seed"),
    (TEMPERATURE, "temperature"),
    (Range(lambda v: v > 1, "greater than 1"), "ratio_threshold dual_clip"),
    (Range(lambda v: 0 <= v <= 1, "between 0 and 1"), "final_scale gamma gae_lambda"),
    (Range(lambda v: 0 < v <= 1, "greater than 0 and at most 1"), "top_p"),
    (Range(lambda v: v < 0, "below 0"), "reward_penalty"),
    (
        Range(bool, "a name, not empty"),
        "base_model reward_fn reward_model wandb_project_name prompts_column",
    ),
    (Range(bool, "a name, or None"), "labels_column answers_column positive_label wandb_group"),
    (Range(bool, "a file, or None"), "prompts"),
    (Range(str.strip, "a text, or None"), "system_prompt"),
    (
        Range(lambda v: v and all(abs(x) < 1e38 for x in v), "one finite number per reward"),
        "reward_weights",
    ),
    (Range(bool, "a directory, or None"), "critic_from adapter_from"),
    (Range(lambda v: all(v.split(",")), "texts with one comma between, or None"), "stop_tokens"),
    (
        Range(lambda v: all(map(str.strip, v.split(","))), "tags with one comma between, or None"),
        "wandb_tags",
    ),
    (
        Range(
            lambda v: all(n.strip().isascii() and n.strip().isdigit() for n in v.split(",")),
            "whole numbers, 0 or greater, with commas between, or None",
        ),
        "stop_token_ids",
    ),
)


LARGEST = MappingProxyType({int: 2**48, float: 1e38})
"""What all numbers but seeds stay below: no tensor has such a size, and fp32 no larger value."""


def check_range(of: Range, **values: Any) -> None:
    """Refuse a value out of a range, or too large to compute with; None is not one.

    Raises:
        ConfigError: the first that is, by its name.
    """
    for name, value in values.items():
        if value is not None and not of.holds(value):
            raise ConfigError(f"{name}={value!r} is out of range; it must be {of.remedy}.")
        if of is not SEED and type(value) in LARGEST and value >= LARGEST[type(value)]:
            raise ConfigError(f"{name}={value!r} is too large to compute with; give a smaller one.")


def check_args(args: AllFields) -> None:
    """Refuse settings that cannot be, each alone or together.

    Raises:
        ConfigError: the first of them, with the field, its value and the remedy.
    """
    for name, hint in get_type_hints(type(args)).items():
        _check_type(args, name, hint)
    for of, names in RANGES:
        check_range(of, **{name: getattr(args, name) for name in names.split()})
    by_subject = (
        _of_sizes,
        _of_credit,
        _of_memory,
        _of_weights,
        _of_sampling,
        _of_loss,
        of_rewards,
        _of_run,
    )
    for sentence in chain.from_iterable(conflicts(args) for conflicts in by_subject):
        raise ConfigError(sentence)


def _check_type(args: AllFields, name: str, hint: Any) -> None:
    """Refuse a value of another type; a whole number becomes a float where one is meant."""
    value, numbers_widen = getattr(args, name), BeartypeConf(is_pep484_tower=True)
    if hint == tuple[float, ...] | None and isinstance(value, list | tuple):
        value = _numbers(value)  # JSON and YAML have lists
        object.__setattr__(args, name, value)  # the dataclass is frozen
    flags = [isinstance(v, bool) for v in (value if isinstance(value, tuple) else (value,))]
    is_flag_for_number = any(flags) and hint is not bool
    if name == "reward_fn" and callable(value):
        raise ConfigError(
            f"reward_fn={value!r} is a function, and settings are text; hand it to the trainer: "
            "RLHFTrainer(args, reward_fn=...)."
        )
    if is_flag_for_number or not is_bearable(value, hint, conf=numbers_widen):
        raise ConfigError(f"{name}={value!r} is not allowed here; it must be {_in_words(hint)}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name}={value!r} is not a finite number; give a finite one.")
    if hint in (float, float | None) and isinstance(value, int):
        object.__setattr__(args, name, float(value))  # the dataclass is frozen


def _numbers(values: Sequence[Any]) -> tuple[Any, ...]:
    """Whole numbers as floats; what is no number stays, to be refused."""
    return tuple(float(v) if type(v) is int and abs(v) < 2**53 else v for v in values)


def _in_words(hint: Any) -> str:
    """A type as a reader would say it."""
    names = {int: "a whole number", float: "a number", str: "text", bool: "True or False"}
    names[tuple[float, ...] | None] = "a list of numbers, or None"
    return names.get(hint, str(hint).removeprefix("typing.").replace("Literal", "one of "))


def _of_sizes(args: AllFields) -> Iterator[str]:
    for name in ("num_minibatches", "samples_per_prompt"):
        if args.batch_size % getattr(args, name):
            yield (
                f"batch_size={args.batch_size} is not divisible by {name}={getattr(args, name)}; "
                "choose a divisor."
            )
    if args.micro_batch_size is not None and args.minibatch_size % args.micro_batch_size:
        yield (
            f"micro_batch_size={args.micro_batch_size} does not divide the minibatch of "
            f"batch_size / num_minibatches = {args.minibatch_size} sequences; choose a divisor."
        )


def _of_credit(args: AllFields) -> Iterator[str]:
    if args.advantages in NEED_GROUPS and args.samples_per_prompt == 1:
        yield (
            f"advantages={args.advantages!r} compares the answers to a prompt, but "
            "samples_per_prompt=1; sample at least 2 per prompt, such as 8."
        )
    if args.dynamic_sampling is not None and args.samples_per_prompt == 1:
        yield (
            f"dynamic_sampling={args.dynamic_sampling} looks for prompts whose answers earn the "
            "same, but samples_per_prompt=1; sample at least 2 per prompt, or leave it None."
        )
    if args.advantages == "remax" and args.normalize_reward:
        yield (
            "advantages='remax' compares with the greedy answer's reward, which "
            "normalize_reward=True would leave on another scale; set normalize_reward=False."
        )
    if args.advantages == "remax" and args.whiten_rewards:
        yield (
            "advantages='remax' compares with the greedy answer's reward, which "
            "whiten_rewards=True would leave on another scale; set whiten_rewards=False."
        )


def _of_memory(args: AllFields) -> Iterator[str]:
    if args.optimizer_in_backward and args.max_grad_norm is not None:
        yield (
            "optimizer_in_backward=True steps before the norm of all gradients is known, so "
            f"that max_grad_norm={args.max_grad_norm} cannot hold; set max_grad_norm=None."
        )
    if args.optimizer_in_backward and args.micro_batch_size is not None:
        yield (
            "optimizer_in_backward=True lets no gradient wait for those of other parts, which "
            f"micro_batch_size={args.micro_batch_size} needs; leave it None."
        )


def _of_weights(args: AllFields) -> Iterator[str]:
    if args.lora_rank and args.adapter_from is not None:
        yield (
            f"lora_rank={args.lora_rank} asks for fresh adapters, and adapter_from="
            f"{args.adapter_from!r} for those that are there; leave one of the two out."
        )
    if args.weight_precision == "fp32":
        return
    given = f"weight_precision={args.weight_precision!r}"
    if args.lora_rank or args.adapter_from is not None:
        name = "lora_rank" if args.lora_rank else "adapter_from"
        yield (
            f"{name}={getattr(args, name)!r} trains adapters in fp32 beside weights that are "
            f"merged with them, which {given} would round away; set weight_precision='fp32'."
        )
    if args.optimizer != "adamw":
        yield f"{given} has an AdamW of its own; leave optimizer={args.optimizer!r} at 'adamw'."
    if args.precision != "fp32":
        yield (
            f"{given} multiplies in the format of its weights; leave precision={args.precision!r} "
            "at 'fp32'."
        )


def _of_sampling(args: AllFields) -> Iterator[str]:
    for name in ("gen_len_min", "min_response_length", "overlong_buffer"):
        value = getattr(args, name) or 0
        if value > args.gen_len:
            yield f"{name}={value!r} exceeds gen_len={args.gen_len}; lower it or raise gen_len."
    if not args.prefix and not args.prepend_bos:
        yield (
            "prefix='' with prepend_bos=False leaves nothing to start from; "
            "give a prefix or set prepend_bos=True."
        )
    if args.system_prompt is not None and not args.chat:
        yield (
            f"system_prompt={args.system_prompt!r:.60} is a message of a chat, but chat=False; set "
            "chat=True (--chat)."
        )
    if args.labels_column is not None and args.prompts is None:
        yield (
            f"labels_column={args.labels_column!r} is a column of prompts, and there are none; "
            "set prompts to a file that has it."
        )


def _of_loss(args: AllFields) -> Iterator[str]:
    knows = {
        "clip_coef_high": ("ppo", "gspo", "cispo"),
        "dual_clip": ("ppo",),
        "max_log_ratio": ("ppo", "gspo"),
    }
    for name, losses in knows.items():
        if getattr(args, name) is not None and args.policy_loss not in losses:
            yield (
                f"{name}={getattr(args, name)!r} has no effect with "
                f"policy_loss={args.policy_loss!r}; leave it None, or choose "
                f"{' or '.join(losses)}."
            )
    if args.kl_controller == "adaptive" and args.batch_size > args.kl_horizon:
        yield (
            f"batch_size={args.batch_size} exceeds kl_horizon={args.kl_horizon}, so that one "
            "update could swing kl_coef by more than a fifth; raise kl_horizon."
        )


def _of_run(args: AllFields) -> Iterator[str]:
    if args.critic_from is not None and args.value_head != "separate":
        yield (
            f"critic_from={args.critic_from!r} needs a critic of its own, but "
            f"value_head={args.value_head!r}; set value_head='separate'."
        )
    if args.warmup_steps >= args.total_phases:
        yield (
            f"warmup_steps={args.warmup_steps} must be smaller than "
            f"total_phases={args.total_phases}; shorten the warm-up or train longer."
        )
    every = args.reset_reference_every
    if every is not None and every >= args.total_phases:
        yield (
            f"reset_reference_every={every} is not below total_phases={args.total_phases}, so that "
            "no phase would have the new reference; lower it, or leave it None."
        )
    unknown = [name for name in args.logger_names if name not in LOGGERS]
    if unknown:
        yield (
            f"loggers={args.loggers!r} names {unknown[0]!r}, which is none of "
            f"{', '.join(LOGGERS)}; metrics.jsonl is always written, wandb by wandb_mode."
        )
