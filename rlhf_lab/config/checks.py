"""Validation of settings: types, one table of ranges and choices, and combinations."""

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple, SupportsIndex, get_type_hints

from beartype import BeartypeConf
from beartype.door import is_bearable

from rlhf_lab.config.algorithm_fields import AllFields
from rlhf_lab.config.presets import PRESETS
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
AT_LEAST_1 = Range(lambda v: isinstance(v, SupportsIndex) and v >= 1, "1 or greater, an integer")
AT_LEAST_2 = Range(lambda v: isinstance(v, SupportsIndex) and v >= 2, "at least 2, an integer")
TEMPERATURE = Range(lambda v: 1e-6 <= v < math.inf, "1e-6 or greater; top_k=1 is greedy")
TOP_P = Range(lambda v: 0 < v <= 1, "greater than 0 and at most 1")
SEED = Range(lambda v: isinstance(v, SupportsIndex) and 0 <= v < 2**63, "0, 1, ... or 2**63 - 1")
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
        "prompts system_prompt critic_path adapter_path reference_model",
        Range(
            lambda v: {name.strip() for name in v.split(",")} <= {"", *LOGGERS},
            f"some of {', '.join(LOGGERS)}; metrics.jsonl is always written",
        ): "loggers",
        Range(
            lambda v: any(v) and all(abs(x) < 1e38 for x in v), "finite numbers, and not all 0"
        ): "reward_weights",
        _comma_separated(len, "texts"): "stop_tokens",
        _comma_separated(str.strip, "tags"): "wandb_tags",
        _comma_separated(
            lambda n: n.strip().isascii() and n.strip().isdigit(), "token ids"
        ): "stop_token_ids",
    }
)
NEED_GROUPS = ("reinforce++_baseline", "rloo", "grpo", "dr_grpo", "opo")  # several responses each
REEL_REWARDS = tuple(  # organism.REWARDS
    "true_reward smoothed smoothed_popcorn ignore_negation bag_of_adjectives length".split()
)
SUMS_NAMES = tuple(  # organism.sums.SUMS_REWARDS
    f"sums:{name}" for name in "exact process units format hole majority coin".split()
)
PLAIN_REWARDS = ("sentiment", "learned", "zero", "exact_match", *REEL_REWARDS, *SUMS_NAMES)
EXAMPLES = MappingProxyType(  # rewards that need a value after a colon
    {"count": "great", "regex": "[0-9]+", "json_schema": "schema.json", "diversity": "2"}
)
MATCH_OPTIONS = ("ignore_case", "ignore_punctuation", "last_number")  # after exact_match:, with +
# settings without effect for other values of another setting; "" is any but None, 0 and False
USED_BY = MappingProxyType(
    {
        "clip_coef clip_coef_high": ("policy_loss", "ppo gspo cispo"),
        "dual_clip": ("policy_loss", "ppo"),
        "max_log_ratio": ("policy_loss", "ppo gspo"),
        "gamma": ("advantages", "one_step gae reinforce reinforce++"),
        "gae_lambda": ("advantages", "gae"),
        "kl_target kl_horizon": ("kl_controller", "adaptive"),
        "critic_path": ("value_head", "separate"),
        "vf_clip": ("vf_coef", ""),
        "system_prompt": ("chat", ""),
        "lora_alpha lora_targets": ("lora_rank", ""),
        "labels_column answers_column prompt_words prompts_column": ("prompts", ""),
    }
)
_NEXT_REWARD = re.compile(rf",\s*(?=(?:{'|'.join((*PLAIN_REWARDS, *EXAMPLES))})(?:[,:]|$))")


def check_range(of: Range, **values: Any) -> None:
    """Raise ConfigError if a value is out of range. None is valid."""
    for name, value in values.items():
        with contextlib.suppress(TypeError):  # of a text
            if value is None or of.holds(value):
                continue
        finite = "finite and " if value in (math.inf, -math.inf) else ""
        raise ConfigError(f"{name}={value!r} is out of range. It must be {finite}{of.remedy}.")


def check_args(args: AllFields) -> None:
    """Raise ConfigError for the first setting with a wrong type, range or combination."""
    for name, hint in get_type_hints(type(args)).items():
        object.__setattr__(args, name, _convert(name, getattr(args, name), hint))
    for of, names in RANGES.items():
        check_range(of, **{name: getattr(args, name) for name in names.split()})
    for name, reason in chain(_batches(args), _models(args), _texts(args), _rewards(args)):
        raise ConfigError(f"{name}={getattr(args, name)!r} {reason}")


def _convert(name: str, value: Any, hint: Any) -> Any:
    """Return a value as its type: integers as floats, lists (as in JSON) as tuples of floats."""
    if name == "reward_fn" and callable(value):
        raise ConfigError(
            f"reward_fn={value!r} is a function, but settings are text. Pass it to the trainer: "
            "RLHFTrainer(args, reward_fn=...)."
        )
    value = tuple(value) if isinstance(value, list) else value
    is_tuple, takes_tuple = isinstance(value, tuple), "tuple" in str(hint)
    numbers, of_each = (value, float) if is_tuple else ((value,), None if takes_tuple else hint)
    if (is_tuple and not takes_tuple) or any(
        (isinstance(x, bool) and hint is not bool) or not is_bearable(x, of_each, conf=WIDENING)
        for x in numbers  # beartype checks a random item of a tuple
    ):
        if choices := re.search(r"Literal\[([^]]*)", str(hint)):
            raise ConfigError(f"{name}={value!r} is unknown. Choose one of: {choices[1]}.")
        kind = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
        raise ConfigError(f"{name}={value!r} has the wrong type. It must be {kind}.")
    if is_tuple or hint in (float, float | None):
        numbers = [float(f"{x}") if type(x) is int else x for x in numbers]  # inf if too large
    return tuple(numbers) if is_tuple else numbers[0]


def _batches(a: AllFields) -> Iterator[tuple[str, str]]:
    """Yield a setting of batches, steps or the loss, or one without effect, and the reason."""
    for name in ("num_minibatches", "samples_per_prompt"):
        if a.batch_size % getattr(a, name):
            yield "batch_size", f"is not divisible by {name}={getattr(a, name)}. Choose a divisor."
    compares = {"advantages": a.advantages in NEED_GROUPS, "dynamic_sampling": a.dynamic_sampling}
    for name in filter(compares.get, compares if a.samples_per_prompt == 1 else ()):
        yield name, "compares responses, but samples_per_prompt=1. To compare, sample at least 2."
    for name in _on(a, "max_grad_norm", "micro_batch_size") if a.optimizer_in_backward else ():
        yield name, "cannot be combined with optimizer_in_backward=True. Set it to None."
    if a.kl_controller == "adaptive" and not a.kl_coef:
        yield "kl_coef", "stays 0 with kl_controller='adaptive', which multiplies it. Raise it."
    if a.kl_controller == "adaptive" and a.batch_size > a.kl_horizon:  # more than a fifth at once
        yield "batch_size", f"exceeds kl_horizon={a.kl_horizon}. Raise kl_horizon."
    for name in ("warmup_steps", "reset_reference_every"):
        if (getattr(a, name) or 0) >= a.total_phases:
            yield name, f"must be below total_phases={a.total_phases}. Lower it, or train longer."
    if a.reset_reference_every and (a.reference_model or a.method == "gkd"):
        yield "reset_reference_every", "discards the teacher. Set it to None."
    for names, (other, values) in USED_BY.items():
        value = getattr(a, other)
        is_used = value in values.split() if values else value
        choices = f" to {' or '.join(values.split())}" if values else ""
        for name in () if is_used else names.split():
            if getattr(a, name) != getattr(AllFields, name):
                remedy = f"Remove it, or set {other}{choices}"
                yield name, f"has no effect with {other}={value!r}. {remedy}."


def _models(a: AllFields) -> Iterator[tuple[str, str]]:
    if a.lora_rank and a.adapter_path:
        yield "lora_rank", f"conflicts with adapter_path={a.adapter_path!r}. Remove one of them."
    off = {"lora_rank": 0, "adapter_path": None, "optimizer": "adamw", "precision": "fp32"}
    for name, value in off.items() if a.weight_precision != "fp32" else ():
        if getattr(a, name) != value:
            yield name, f"conflicts with weight_precision={a.weight_precision!r}. Use {value!r}."


def _texts(a: AllFields) -> Iterator[tuple[str, str]]:
    for name in _on(a, "gen_len_min", "min_response_length", "overlong_buffer"):
        if getattr(a, name) > a.gen_len:
            yield name, f"exceeds gen_len={a.gen_len}. Lower it or raise gen_len."
    stops = a.stop_at_eos or a.stop_tokens or a.stop_token_ids or a.chat
    for name in _on(a, "penalize_no_eos", "min_response_length", "overlong_buffer"):
        if not stops:
            yield name, "requires texts that end, but stop_at_eos=False. Set stop_at_eos=True."


def _rewards(a: AllFields) -> Iterator[tuple[str, str]]:
    names = reward_names(a.reward_fn)
    for name in names:
        kind, colon, value = name.partition(":")
        if names.count(name) > 1:
            yield "reward_fn", f"has {name!r} twice. Remove one."
        if colon and not value and kind in EXAMPLES:
            yield "reward_fn", f"has no value after {name!r}. Use {kind}:{EXAMPLES[kind]}."
        if kind == "diversity":
            validate_whole_batch(a, f"reward_fn={name!r}")
        if kind == "exact_match" and a.answers_column is None:
            yield "reward_fn", "requires answers. Set answers_column in a run (`score` has none)."
    unread = ("direction", "positive_label") if "sentiment" not in names else ()
    unread += ("reward_model",) * {"sentiment", "learned"}.isdisjoint(names)
    for name in unread:
        if getattr(a, name) not in (getattr(AllFields, name), PRESETS[a.preset].get(name)):
            yield name, f"has no effect with reward_fn={a.reward_fn!r}. Remove it."
    if a.reward_per_token and "learned" not in names:
        yield "reward_per_token", "requires reward_fn='learned', or a TokenReward."
    if a.reward_per_token:
        validate_token_rewards(a)
    for name in _on(a, "normalize_reward", "whiten_rewards") if a.advantages == "remax" else ():
        yield name, "scales rewards, but advantages='remax' needs them unscaled. Set it to False."
    is_flawed = a.penalize_no_eos or a.min_response_length
    if a.reward_penalty != AllFields.reward_penalty and not is_flawed:
        yield "reward_penalty", "has no effect without penalize_no_eos or min_response_length."
    if a.normalize_reward and a.batch_size == 1:
        yield "normalize_reward", "with batch_size=1 turns every reward into 0. Set it to False."
    if a.normalize_reward and a.reward_scaling != "off":
        yield "reward_scaling", "is undone by normalize_reward=True. Set normalize_reward=False."


def _on(args: AllFields, *names: str) -> list[str]:
    """Return the names of the settings that are neither None, 0 nor False."""
    return [name for name in names if getattr(args, name)]


def reward_names(reward_fn: str) -> list[str]:
    """Split `reward_fn` at the commas that precede the name of a reward.

    Other commas belong to a pattern, a text or a file name, as in regex:[0-9]{1,3}.
    """
    return _NEXT_REWARD.split(reward_fn)


def validate_token_rewards(args: AllFields) -> None:
    """Raise ConfigError if a setting for one reward per text is on, with rewards per token."""
    off = {"normalize_reward": False, "reward_scaling": "off", "reward_clip": None}
    for name, value in (off | {"dynamic_sampling": None}).items():
        if getattr(args, name) != value:
            raise ConfigError(
                f"{name}={getattr(args, name)!r} is for one reward per text, but reward_fn scores "
                f"each token. Set {name}={value!r} (whiten_rewards=True scales tokens' rewards)."
            )


def validate_whole_batch(args: AllFields, reward: str) -> None:
    """Raise ConfigError if a setting scores part of a batch, with a reward of the whole batch."""
    names = _on(args, "dynamic_sampling", "labels_column")
    for name in names + ["advantages"] * (args.advantages == "remax"):
        raise ConfigError(
            f"{name}={getattr(args, name)!r} scores some texts alone, but {reward} scores whole "
            "batches. Remove one of them."
        )
