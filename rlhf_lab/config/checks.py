"""Validation of settings: types, and one table of ranges and choices."""

import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple, get_type_hints

from beartype import BeartypeConf
from beartype.door import is_bearable

from rlhf_lab.config.algorithm_fields import AllFields
from rlhf_lab.config.conflicts import check_conflicts
from rlhf_lab.errors import ConfigError

LOGGERS = ("tensorboard", "trackio")  # besides wandb
WIDENING = BeartypeConf(is_pep484_tower=True)  # integers are floats


class Range(NamedTuple):
    """A condition on a value, and its description in error messages."""

    holds: Callable[[Any], Any]
    remedy: str


def _comma_separated(condition: Callable[[str], Any], what: str) -> Range:
    return Range(lambda v: all(map(condition, v.split(","))), f"{what}, comma-separated, or None")


POSITIVE = Range(lambda v: 0 < v < math.inf, "greater than 0")
AT_LEAST_0 = Range(lambda v: 0 <= v < math.inf, "0 or greater")
AT_LEAST_1 = Range(lambda v: v >= 1, "1 or greater")
AT_LEAST_2 = Range(lambda v: v >= 2, "at least 2")
TEMPERATURE = Range(
    lambda v: 1e-6 <= v < math.inf, "1e-6 or greater; top_k=1 takes the most likely token"
)
TOP_P = Range(lambda v: 0 < v <= 1, "greater than 0 and at most 1")
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
        TOP_P: "top_p",
        Range(lambda v: 1 < v < math.inf, "greater than 1"): "ratio_threshold dual_clip",
        Range(lambda v: 0 <= v <= 1, "between 0 and 1"): "final_scale gamma gae_lambda",
        Range(lambda v: -math.inf < v < 0, "below 0"): "reward_penalty",
        Range(str.strip, "a text that is not empty"): "base_model reward_fn reward_model "
        "wandb_project_name prompts_column labels_column answers_column positive_label wandb_group "
        "prompts system_prompt critic_path adapter_path",
        Range(
            lambda v: {name.strip() for name in v.split(",")} <= {"", *LOGGERS},
            f"some of {', '.join(LOGGERS)}; metrics.jsonl is always written",
        ): "loggers",
        Range(
            lambda v: v and all(abs(x) < 1e38 for x in v), "one finite number per reward"
        ): "reward_weights",
        _comma_separated(len, "texts"): "stop_tokens",
        _comma_separated(str.strip, "tags"): "wandb_tags",
        _comma_separated(
            lambda n: n.strip().isascii() and n.strip().isdigit(), "token ids"
        ): "stop_token_ids",
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
        object.__setattr__(args, name, _convert(name, getattr(args, name), hint))
    for of, names in RANGES.items():
        check_range(of, **{name: getattr(args, name) for name in names.split()})
    check_conflicts(args)


def _convert(name: str, value: Any, hint: Any) -> Any:
    """Return a value as its type: integers as floats, lists (as in JSON) as tuples of floats."""
    if name == "reward_fn" and callable(value):
        raise ConfigError(
            f"reward_fn={value!r} is a function, but settings are text. Pass it to the trainer: "
            "RLHFTrainer(args, reward_fn=...)."
        )
    value = tuple(value) if isinstance(value, list) else value
    is_tuple = isinstance(value, tuple)
    numbers, of_each = (value, float) if is_tuple else ((value,), hint)
    if not is_bearable(value, hint, conf=WIDENING) or any(
        (isinstance(x, bool) and hint is not bool) or not is_bearable(x, of_each, conf=WIDENING)
        for x in numbers  # beartype checks one item of a tuple
    ):
        kind = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
        raise ConfigError(f"{name}={value!r} has the wrong type. It must be {kind}.")
    if is_tuple or hint in (float, float | None):
        numbers = [float(x) if type(x) is int and abs(x) < 2**53 else x for x in numbers]
    return tuple(numbers) if is_tuple else numbers[0]
