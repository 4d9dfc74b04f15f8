"""SamplingSpec: temperature, top-k and top-p in one, for the sampler and the scorer."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_lab.chat import template_stops
from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError


@dataclass(frozen=True)
class SamplingSpec:
    """Everything that decides which token comes next, given logits.

    The same object filters the logits that a token is drawn from and, through `Support`, the
    logits that its log-probability is read from, so that the policy that samples is the policy
    that is trained.

    Args:
        gen_len: tokens to generate.
        temperature: logits are divided by it.
        top_k: keep the k likeliest tokens; all when None.
        top_p: keep the smallest set of tokens whose probability reaches it; all when None.
        stop_at_eos: the tokenizer's end-of-sequence token ends a sequence.
        stop_tokens: further token ids that end a sequence.

    Raises:
        ConfigError: a value out of range.
    """

    gen_len: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    stop_at_eos: bool = False
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.gen_len < 1:
            raise ConfigError(f"gen_len={self.gen_len} is too small; generate at least 1 token.")
        if not 1e-6 <= self.temperature < math.inf:
            raise ConfigError(
                f"temperature={self.temperature} must be finite and 1e-6 or greater; top_k=1 takes "
                "the likeliest token."
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k={self.top_k} must be 1 or greater, or None for all tokens.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} must be greater than 0 and at most 1, or None.")

    @classmethod
    def from_args(
        cls, args: RLHFArgs, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> "SamplingSpec":
        """The spec that a run's arguments describe; their stop tokens are the tokenizer's.

        In a chat, what its template puts behind an answer is a stop token, too.

        Raises:
            ConfigError: stop tokens that are not one token each, or ids that the tokenizer lacks.
            LoadError: a chat without a template.
        """
        settings = (args.gen_len, args.temperature, args.top_k, args.top_p, args.stop_at_eos)
        given = stop_ids(tokenizer, args.stop_tokens)
        given += given_stop_ids(tokenizer, args.stop_token_ids)
        if args.chat:
            given += chat_stop_ids(tokenizer, bool(given) or args.stop_at_eos)
        return cls(*settings, given)

    @property
    def truncates(self) -> bool:
        """Whether some tokens can never be drawn."""
        return self.top_k is not None or (self.top_p is not None and self.top_p < 1)

    def filter(self, logits: Float[Tensor, "*batch d_vocab"]) -> Float[Tensor, "*batch d_vocab"]:
        """Logits at this temperature, with -inf at every token that top-k or top-p removes."""
        kept, tokens = self.candidates(logits)
        if tokens is None:
            return kept
        return torch.full_like(logits, -torch.inf).scatter(-1, tokens, kept)

    def candidates(
        self, logits: Float[Tensor, "*batch d_vocab"]
    ) -> tuple[Float[Tensor, "*batch width"], Int[Tensor, "*batch width"] | None]:
        """What `filter` leaves, likeliest first, and its token ids; None for the whole vocabulary.

        1. Take the k largest logits; of equal ones, exactly k stay in all (Fan et al. 2018, arXiv
           1805.04833).
        2. Of these, keep a token while the probability before it is below p: the token that crosses
           p stays (Holtzman et al. 2020).
        """
        logits = logits / self.temperature
        if not self.truncates:
            return logits, None
        d_vocab = logits.shape[-1]
        values, tokens = logits.topk(min(self.top_k or d_vocab, d_vocab), dim=-1)
        if self.top_p is not None:
            probs = values.softmax(-1)
            before = probs.cumsum(-1) - probs
            values = values.masked_fill(before >= self.top_p, -torch.inf)
        return values, tokens

    def stops(self, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
        """All token ids that end a sequence."""
        if not self.stop_at_eos:
            return self.stop_tokens
        if tokenizer is None or tokenizer.eos_token_id is None:
            raise ConfigError(
                "stop_at_eos=True needs a tokenizer with an end-of-sequence token; "
                "name the tokens in stop_tokens instead."
            )
        return (*self.stop_tokens, tokenizer.eos_token_id)


def chat_stop_ids(tokenizer: PreTrainedTokenizerBase | None, others: bool) -> tuple[int, ...]:
    """The token that the chat template puts behind an answer.

    Args:
        others: there are other stop tokens, so that there need not be one.

    Raises:
        ConfigError: no tokenizer, or no end of an answer.
    """
    if tokenizer is None:
        raise ConfigError("chat=True needs a tokenizer; give the policy one.")
    found = template_stops(tokenizer)
    if not found and not others:
        raise ConfigError(
            "chat=True, but the chat template puts no token behind an answer, so that none would "
            "end; set stop_at_eos=True, or name stop_tokens."
        )
    return found


def stop_ids(tokenizer: PreTrainedTokenizerBase | None, texts: str | None) -> tuple[int, ...]:
    """The token ids of texts with commas between.

    Raises:
        ConfigError: no tokenizer, or a text that is not one token of it.
    """
    if texts is None:
        return ()
    if tokenizer is None:
        raise ConfigError(f"stop_tokens={texts!r} needs a tokenizer; give the policy one.")
    found = []
    for text in texts.split(","):
        try:
            (token,) = tokenizer.encode(text, add_special_tokens=False)
        except Exception:
            token = None
        if token is None or token == tokenizer.unk_token_id:
            raise ConfigError(
                f"stop_tokens={texts!r} has {text!r}, which is not one token of the policy's "
                "tokenizer; name texts that are."
            )
        found.append(token)
    return tuple(found)


def given_stop_ids(
    tokenizer: PreTrainedTokenizerBase | None, numbers: str | None
) -> tuple[int, ...]:
    """Token ids as they are written, with commas between.

    Raises:
        ConfigError: one that the tokenizer has no token for.
    """
    found = tuple(int(number) for number in numbers.split(",")) if numbers else ()
    for token in found:
        if tokenizer is not None and token >= len(tokenizer):
            raise ConfigError(
                f"stop_token_ids={numbers!r} has {token}, but the policy's tokenizer has "
                f"{len(tokenizer)} tokens; give ids below that."
            )
    return found


def top_k_filter(
    logits: Float[Tensor, "*batch d_vocab"], k: int
) -> Float[Tensor, "*batch d_vocab"]:
    """Set all but the k largest logits to -inf (Fan et al. 2018, arXiv 1805.04833)."""
    return SamplingSpec(1, top_k=k).filter(logits)
