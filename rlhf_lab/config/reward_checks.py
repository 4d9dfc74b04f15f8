"""Checks of the rewards in a configuration, and the names that `reward_fn` may hold."""

import re
from collections.abc import Iterator
from types import MappingProxyType

from rlhf_lab.config.groups import AllFields
from rlhf_lab.errors import ConfigError

REEL_REWARDS = ("gold", "soft", "soft_popcorn", "negblind", "bagsum", "length")
"""The names of `organism.REWARDS`, which this room does not import."""
PLAIN_REWARDS = ("sentiment", "learned", "zero", "exact_match", *REEL_REWARDS)
NEEDED_VALUES = MappingProxyType(
    {
        "count": "names no text; write for example count:great",
        "regex": "names no pattern; write for example regex:[0-9]+",
        "json_schema": "names no file; write for example json_schema:schema.json",
        "diversity": "names no length; write for example diversity:2",
    }
)
"""Rewards that are followed by a colon and a value, and what to say where it is missing."""
MATCH_OPTIONS = ("ignore_case", "ignore_punctuation", "last_number")
"""What may follow `exact_match:`, with + between."""
_NEXT_REWARD = re.compile(rf",\s*(?=(?:{'|'.join((*PLAIN_REWARDS, *NEEDED_VALUES))})(?:[,:]|$))")


def reward_names(reward_fn: str) -> list[str]:
    """The rewards that `reward_fn` names: a comma parts two where the name of a reward follows.

    A comma within a pattern, a text or a file's name stays, as in regex:[0-9]{1,3}.
    """
    return _NEXT_REWARD.split(reward_fn)


FOR_TEXTS = MappingProxyType(
    {"normalize_reward": False, "reward_scaling": "off", "reward_clip": None}
    | {"dynamic_sampling": None}
)
"""What is for one reward per text, and its value where each token is paid."""


def refuse_with_token_rewards(args: AllFields) -> None:
    """Refuse the settings that are for one reward per text, where each token is paid.

    Raises:
        ConfigError: one of them is set.
    """
    for name, off in FOR_TEXTS.items():
        value = getattr(args, name)
        if value != off:
            raise ConfigError(
                f"{name}={value!r} is for one reward per text, and reward_fn pays each token; set "
                f"{name}={off!r} (whiten_rewards=True scales the rewards of tokens)."
            )


def refuse_parts_of_batch(args: AllFields, name: str) -> None:
    """Refuse the settings that ask about part of a batch, where a reward needs all of it.

    Args:
        name: the reward's, in words.

    Raises:
        ConfigError: one of them is set.
    """
    asked_of_part = {
        "dynamic_sampling": (args.dynamic_sampling is not None, "the answers drawn in its place"),
        "advantages": (args.advantages == "remax", "the greedy answers"),
        "labels_column": (args.labels_column is not None, "the labels"),
    }
    for field, (is_set, part) in asked_of_part.items():
        if is_set:
            raise ConfigError(
                f"{field}={getattr(args, field)!r} asks what {part} earn by themselves, and {name} "
                "pays a text by its whole batch; leave one of the two out."
            )


def of_rewards(args: AllFields) -> Iterator[str]:
    """What is wrong with the settings of rewards, a sentence each."""
    yield from _of_names(args)
    if args.reward_per_token and "learned" not in reward_names(args.reward_fn):
        yield (
            f"reward_per_token=True needs a reward model, but reward_fn={args.reward_fn!r}; set "
            "reward_fn='learned', or hand in a TokenReward."
        )
    if args.reward_per_token:
        refuse_with_token_rewards(args)
    if args.answers_column is not None and args.prompts is None:
        yield (
            f"answers_column={args.answers_column!r} is a column of prompts, and there are none; "
            "set prompts to a file that has it."
        )
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
        stops = args.stop_at_eos or args.stop_tokens or args.stop_token_ids or args.chat
        if value and not stops:
            yield (
                f"{name}={value!r} needs responses of different lengths, but "
                "stop_at_eos=False; set it True, or name stop_tokens or stop_token_ids."
            )


def _of_names(args: AllFields) -> Iterator[str]:
    """What is wrong with the names in `reward_fn` and with what follows them."""
    names = reward_names(args.reward_fn)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        yield f"reward_fn={args.reward_fn!r} names {twice!r} twice; give it once, with its weight."
    for name in names:
        kind, colon, value = name.partition(":")
        if colon and not value and kind in NEEDED_VALUES:
            yield f"reward_fn={name!r} {NEEDED_VALUES[kind]}."
        if kind == "diversity":
            if value and not (value.isascii() and value.isdigit() and 0 < int(value) < 1000):
                yield (
                    f"reward_fn={name!r} counts n-grams of {value!r} words; write a whole number "
                    "from 1 to 999, as in diversity:2."
                )
            refuse_parts_of_batch(args, f"reward_fn={name!r}")
        if kind == "exact_match":
            options = value.split("+") if colon else []
            unknown = next((option for option in options if option not in MATCH_OPTIONS), None)
            if unknown is not None:
                yield (
                    f"reward_fn={name!r} has the option {unknown!r}, which is none of "
                    f"{', '.join(MATCH_OPTIONS)}; several have + between."
                )
            if args.answers_column is None:
                yield (
                    f"reward_fn={name!r} compares with answers, and answers_column is not set; set "
                    "it to a column of the file of prompts."
                )
