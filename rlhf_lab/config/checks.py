"""Validation of a run's configuration: types, ranges, and values that do not go together."""

import math
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, get_type_hints

from beartype import BeartypeConf
from beartype.door import is_bearable

from rlhf_lab.config.groups import AllFields
from rlhf_lab.errors import ConfigError

NEED_GROUPS = ("reinforce++_baseline", "rloo", "grpo", "dr_grpo", "opo")
"""Estimators that compare the answers to one prompt with each other."""
LOGGERS = ("tensorboard", "trackio")

_POSITIVE = (lambda v: v > 0, "greater than 0")
_AT_LEAST_0 = (lambda v: v >= 0, "0 or greater")
_AT_LEAST_1 = (lambda v: v >= 1, "1 or greater")
_UNIT = (lambda v: 0 <= v <= 1, "between 0 and 1")
RANGES = MappingProxyType(
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


def check_args(args: AllFields) -> None:
    """Refuse settings that cannot be, each alone or together.

    Raises:
        ConfigError: the first of them, with the field, its value and the remedy.
    """
    for name, hint in get_type_hints(type(args)).items():
        _check_type(args, name, hint)
    for name, (holds, remedy) in RANGES.items():
        value = getattr(args, name)
        if value is not None and not holds(value):
            raise ConfigError(f"{name}={value!r} is out of range; it must be {remedy}.")
    for conflicts in (
        _of_sizes,
        _of_credit,
        _of_memory,
        _of_sampling,
        _of_loss,
        _of_rewards,
        _of_run,
    ):
        for sentence in conflicts(args):
            raise ConfigError(sentence)


def _check_type(args: AllFields, name: str, hint: Any) -> None:
    """Refuse a value of another type; a whole number becomes a float where one is meant."""
    value, numbers_widen = getattr(args, name), BeartypeConf(is_pep484_tower=True)
    is_flag_for_number = isinstance(value, bool) and hint is not bool
    if is_flag_for_number or not is_bearable(value, hint, conf=numbers_widen):
        raise ConfigError(f"{name}={value!r} is not allowed here; it must be {_in_words(hint)}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name}={value!r} is not a finite number; give a finite one.")
    if hint in (float, float | None) and isinstance(value, int):
        object.__setattr__(args, name, float(value))  # the dataclass is frozen


def _in_words(hint: Any) -> str:
    """A type as a reader would say it."""
    names = {int: "a whole number", float: "a number", str: "text", bool: "True or False"}
    return names.get(hint, str(hint).removeprefix("typing.").replace("Literal", "one of "))


def _of_sizes(args: AllFields) -> Iterator[str]:
    if args.batch_size % args.num_minibatches:
        yield (
            f"batch_size={args.batch_size} is not divisible by "
            f"num_minibatches={args.num_minibatches}; choose a divisor."
        )
    if args.micro_batch_size is not None and args.minibatch_size % args.micro_batch_size:
        yield (
            f"micro_batch_size={args.micro_batch_size} does not divide the minibatch of "
            f"batch_size / num_minibatches = {args.minibatch_size} sequences; choose a divisor."
        )
    if args.batch_size % args.samples_per_prompt:
        yield (
            f"batch_size={args.batch_size} is not divisible by "
            f"samples_per_prompt={args.samples_per_prompt}; choose a divisor."
        )


def _of_credit(args: AllFields) -> Iterator[str]:
    if args.advantages in NEED_GROUPS and args.samples_per_prompt == 1:
        yield (
            f"advantages={args.advantages!r} compares the answers to a prompt, but "
            "samples_per_prompt=1; sample at least 2 per prompt, such as 8."
        )
    if args.advantages == "remax" and args.normalize_reward:
        yield (
            "advantages='remax' compares with the greedy answer's reward, which "
            "normalize_reward=True would leave on another scale; set normalize_reward=False."
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


def _of_sampling(args: AllFields) -> Iterator[str]:
    if args.gen_len_min is not None and args.gen_len_min > args.gen_len:
        yield (
            f"gen_len_min={args.gen_len_min} exceeds gen_len={args.gen_len}; lower it or raise "
            "gen_len."
        )
    if not args.prefix and not args.prepend_bos:
        yield (
            "prefix='' with prepend_bos=False leaves nothing to start from; "
            "give a prefix or set prepend_bos=True."
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


def _of_rewards(args: AllFields) -> Iterator[str]:
    if args.reward_fn == "count:":
        yield "reward_fn='count:' names no text; write for example count:great."
    if args.normalize_reward and args.batch_size == 1:
        yield (
            "normalize_reward=True with batch_size=1 turns every reward into 0; "
            "raise batch_size or set normalize_reward=False."
        )
    if args.normalize_reward and args.reward_scaling != "off":
        yield (
            f"reward_scaling={args.reward_scaling!r} is undone by normalize_reward=True; "
            "set one of the two."
        )
    for name in ("penalize_no_eos", "min_response_length", "overlong_buffer"):
        value = getattr(args, name)
        if value and not (args.stop_at_eos or args.stop_tokens):
            yield (
                f"{name}={value!r} needs responses of different lengths, but "
                "stop_at_eos=False; set it True, or name stop_tokens."
            )
        if value > args.gen_len:
            yield f"{name}={value!r} exceeds gen_len={args.gen_len}; lower it or raise gen_len."


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
    unknown = [name for name in args.logger_names if name not in LOGGERS]
    if unknown:
        yield (
            f"loggers={args.loggers!r} names {unknown[0]!r}, which is none of "
            f"{', '.join(LOGGERS)}; metrics.jsonl is always written, wandb by wandb_mode."
        )
