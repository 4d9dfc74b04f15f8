"""Names in `reward_fn`, and settings that some rewards cannot be combined with."""

import re
from collections.abc import Iterator
from types import MappingProxyType

from rlhf_lab.config.groups import AllFields
from rlhf_lab.errors import ConfigError

REEL_REWARDS = (
    "true_reward",
    "smoothed",
    "smoothed_popcorn",
    "ignore_negation",
    "bag_of_adjectives",
    "length",
)  # organism.REWARDS
PLAIN_REWARDS = ("sentiment", "learned", "zero", "exact_match", *REEL_REWARDS)
EXAMPLES = MappingProxyType(  # rewards that need a value after a colon
    {
        "count": "count:great",
        "regex": "regex:[0-9]+",
        "json_schema": "json_schema:schema.json",
        "diversity": "diversity:2",
    }
)
MATCH_OPTIONS = ("ignore_case", "ignore_punctuation", "last_number")  # after exact_match:, with +
PER_TEXT = MappingProxyType(  # settings for one reward per text, and their value when off
    {"normalize_reward": False, "reward_scaling": "off", "reward_clip": None}
    | {"dynamic_sampling": None}
)
_NEXT_REWARD = re.compile(rf",\s*(?=(?:{'|'.join((*PLAIN_REWARDS, *EXAMPLES))})(?:[,:]|$))")


def reward_names(reward_fn: str) -> list[str]:
    """Split `reward_fn` at the commas that precede the name of a reward.

    Other commas belong to a pattern, a text or a file name, as in regex:[0-9]{1,3}.
    """
    return _NEXT_REWARD.split(reward_fn)


def validate_token_rewards(args: AllFields) -> None:
    """Raise ConfigError if a setting for one reward per text is on, with rewards per token."""
    for name, off in PER_TEXT.items():
        value = getattr(args, name)
        if value != off:
            raise ConfigError(
                f"{name}={value!r} is for one reward per text, but reward_fn scores each token. "
                f"Set {name}={off!r} (whiten_rewards=True scales the rewards of tokens)."
            )


def validate_whole_batch(args: AllFields, reward: str) -> None:
    """Raise ConfigError if a setting scores part of a batch, with a reward of the whole batch."""
    settings = {
        "dynamic_sampling": (args.dynamic_sampling is not None, "the resampled responses"),
        "advantages": (args.advantages == "remax", "the greedy responses"),
        "labels_column": (args.labels_column is not None, "the labels"),
    }
    for name, (is_on, part) in settings.items():
        if is_on:
            raise ConfigError(
                f"{name}={getattr(args, name)!r} scores {part} alone, but {reward} scores whole "
                "batches. Remove one of them."
            )


def reward_conflicts(args: AllFields) -> Iterator[str]:
    """Yield a sentence for each problem in the settings of rewards."""
    names = reward_names(args.reward_fn)
    for name in names:
        kind, colon, value = name.partition(":")
        if names.count(name) > 1:
            yield f"reward_fn={args.reward_fn!r} has {name!r} twice. Remove one."
        if colon and not value and kind in EXAMPLES:
            yield f"reward_fn={name!r} has no value. Use for example {EXAMPLES[kind]}."
        if kind == "diversity":
            validate_whole_batch(args, f"reward_fn={name!r}")
        if kind == "exact_match" and args.answers_column is None:
            yield (
                f"reward_fn={name!r} compares with answers, but answers_column is not set. "
                "Set it to a column of the prompts file."
            )
    if args.reward_per_token and "learned" not in names:
        yield (
            f"reward_per_token=True requires a reward model, but reward_fn={args.reward_fn!r}. "
            "Set reward_fn='learned', or pass a TokenReward to the trainer."
        )
    if args.reward_per_token:
        validate_token_rewards(args)
    if args.normalize_reward and args.batch_size == 1:
        yield (
            "normalize_reward=True with batch_size=1 turns every reward into 0. "
            "Raise batch_size or set normalize_reward=False."
        )
    if args.normalize_reward and args.reward_scaling != "off":
        yield (
            f"reward_scaling={args.reward_scaling!r} is undone by normalize_reward=True. "
            "Set normalize_reward=False."
        )
    stops = args.stop_at_eos or args.stop_tokens or args.stop_token_ids or args.chat
    for name in ("penalize_no_eos", "min_response_length", "overlong_buffer"):
        if getattr(args, name) and not stops:
            yield (
                f"{name}={getattr(args, name)!r} requires responses of different lengths, but "
                "stop_at_eos=False. Set it to True, or set stop_tokens or stop_token_ids."
            )
