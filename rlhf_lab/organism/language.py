"""The bundled languages, Reel and sums, as a run sees them, and which one a tokenizer has."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_lab.errors import ConfigError
from rlhf_lab.files import expand_home
from rlhf_lab.organism.bundled import LANGUAGE_MODELS, SUMS_MODELS
from rlhf_lab.organism.grammar import Grammar
from rlhf_lab.organism.lexicon import WORD_IDS
from rlhf_lab.organism.rewards import Reward, grammatical, true_reward
from rlhf_lab.organism.sums import SUMS_IDS, SUMS_REWARDS, SumsGrammar, text_metrics
from rlhf_lab.organism.sums.rewards import parse_texts


@dataclass(frozen=True)
class Language:
    """A bundled language: its models, its token ids, its true reward, and numbers about each text.

    read_metrics returns one number per text by name, nan where a text is not counted. After each of
    the `contexts` (n of them, as token ids), `contrast` is two words with different consequences.
    """

    models: Sequence[str]
    word_ids: Mapping[str, int]
    true_reward: Callable[[list[str]], Float[Tensor, " batch"]]
    read_metrics: Callable[[list[str]], dict[str, Float[Tensor, " batch"]]]
    contrast: tuple[str, str]
    contexts: Callable[[int], Int[np.ndarray, "n seq"]]
    contexts_name: str


def _reviews_to_the_verdict(n: int) -> Int[np.ndarray, "n seq"]:
    grammar = Grammar()
    return grammar.sample(n, np.random.default_rng(0)).tokens[:, : grammar.slot("VERB")]


def _sums_to_the_opener(n: int) -> Int[np.ndarray, "n seq"]:
    grammar = SumsGrammar()
    return grammar.prompt_tokens(grammar.problems(n, np.random.default_rng(0), (2, 3)))


REEL_LANGUAGE = Language(
    models=LANGUAGE_MODELS,
    word_ids=WORD_IDS,
    true_reward=true_reward,
    read_metrics=lambda texts: {"grammatical": grammatical(texts).to(torch.float32)},
    contrast=("loved", "hated"),
    contexts=_reviews_to_the_verdict,
    contexts_name="reviews up to the verdict",
)
SUMS_LANGUAGE = Language(
    models=SUMS_MODELS[:3],  # the grammar of the last is another one
    word_ids=SUMS_IDS,
    true_reward=SUMS_REWARDS["sums:exact"],
    read_metrics=text_metrics,
    contrast=("so", "hm"),  # the openers of careful and of blurt
    contexts=_sums_to_the_opener,
    contexts_name="prompts of 2 and 3 digits",
)


def find_language(model: str, directory: str = "") -> Language:
    """Return the language of a model's name or files, as seen from a run's directory; or Reel."""
    file, words = Path(directory) / expand_home(model) / "tokenizer.json", None  # of an export
    with suppress(OSError, LookupError, TypeError, ValueError):  # another file
        words = json.loads(file.read_bytes())["model"]["vocab"]
    is_sums = model in SUMS_MODELS or words == dict(SUMS_IDS)
    return SUMS_LANGUAGE if is_sums else REEL_LANGUAGE


def read_language(tokenizer: PreTrainedTokenizerBase) -> Language | None:
    """Return the language with exactly the words and ids of a tokenizer; None for other words."""
    words, known = tokenizer.get_vocab(), (REEL_LANGUAGE, SUMS_LANGUAGE)
    return next((language for language in known if words == dict(language.word_ids)), None)


def validate_rewards(
    language: Language | None, rewards: Mapping[str, object], prompts: list[str], source: str
) -> None:
    """Raise ConfigError if a reward is of another language, or a prompt is not of its language."""
    for reward in rewards.values():
        name = getattr(reward, "name", None)  # also of a classifier
        if language is SUMS_LANGUAGE and (isinstance(reward, Reward) or name == "reel-sentiment"):
            raise ConfigError(f"{name!r} scores reviews, not sums. Use 'sums:exact'.")
        if isinstance(grammar := getattr(reward, "grammar", None), SumsGrammar):
            parse_texts(prompts, grammar, source)
