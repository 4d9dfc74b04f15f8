"""SamplingSpec: temperature, top-k and top-p in one, for the sampler and the scorer."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_lab.chat import template_stops
from rlhf_lab.config import RLHFArgs
from rlhf_lab.config.checks import AT_LEAST_1, TEMPERATURE, TOP_P, check_range
from rlhf_lab.errors import ConfigError
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.models.tokenization import single_token


@dataclass(frozen=True)
class SamplingSpec:
    """All settings that determine the next token from logits.

    The same object filters the logits that a token is sampled from and, through `Support`, the
    logits that its log-probability is read from, so the policy that samples is the policy that is
    trained.

    Args:
        gen_len: tokens to generate.
        temperature: divisor of the logits.
        top_k: number of most likely tokens to keep; all when None.
        top_p: probability that the smallest kept set of tokens reaches; all tokens when None.
        stop_at_eos: True if the tokenizer's end-of-sequence token ends a sequence.
        stop_tokens: other token ids that end a sequence.

    Raises:
        ConfigError: If a value is out of range.
    """

    gen_len: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    stop_at_eos: bool = False
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_range(AT_LEAST_1, gen_len=self.gen_len, top_k=self.top_k)
        if isinstance(self.stop_tokens, int) or any(isinstance(x, str) for x in self.stop_tokens):
            raise ConfigError(f"stop_tokens={self.stop_tokens!r} must be a tuple of token ids.")
        check_range(TEMPERATURE, temperature=self.temperature)
        check_range(TOP_P, top_p=self.top_p)

    @classmethod
    def from_args(
        cls, args: RLHFArgs, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> "SamplingSpec":
        """Return the spec of a run's arguments, with stop tokens as the tokenizer's ids.

        In a chat, the token that the template puts after a response is also a stop token.
        """
        texts = args.stop_tokens.split(",") if args.stop_tokens else []
        where = f"stop_tokens={args.stop_tokens!r}: "
        stops = [single_token(tokenizer, text, where) for text in texts]
        ids = list(map(int, args.stop_token_ids.split(","))) if args.stop_token_ids else []
        turn_ends = template_stops(tokenizer) if args.chat else ()
        if args.chat and not (args.stop_at_eos or stops or ids or turn_ends):
            problem = "chat=True, but the chat template has no token after a response"
            raise ConfigError(f"{problem}. Set stop_at_eos=True or stop_tokens.")
        settings = (args.gen_len, args.temperature, args.top_k, args.top_p, args.stop_at_eos)
        return cls(*settings, (*stops, *ids, *turn_ends))

    @property
    def truncates(self) -> bool:
        """True if some tokens can never be sampled."""
        return self.top_k is not None or (self.top_p is not None and self.top_p < 1)

    def candidates(
        self, logits: Float[Tensor, "*batch d_vocab"]
    ) -> tuple[Float[Tensor, "*batch width"], Int[Tensor, "*batch width"] | None]:
        """Return the kept logits, largest first, and their ids; None for the whole vocabulary.

        1. Take the k largest logits; exactly k, also with ties (Fan et al. 2018, arXiv
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
        """Return all token ids that end a sequence."""
        if tokenizer is not None and any(not 0 <= x < len(tokenizer) for x in self.stop_tokens):
            ids = f"The stop token ids {self.stop_tokens}"
            raise ConfigError(f"{ids} must be from 0 to {len(tokenizer) - 1}.")
        if not self.stop_at_eos:
            return self.stop_tokens
        if tokenizer is None or tokenizer.eos_token_id is None:
            raise ConfigError("stop_at_eos=True requires an EOS token. Set stop_tokens instead.")
        return (*self.stop_tokens, tokenizer.eos_token_id)


def check_context(
    model: HookedModel, prefix_len: int, gen_len: int, of: str = "model", prompt: str = "the prompt"
) -> None:
    """Raise ConfigError if prompt and response together exceed the model's context."""
    room = model.cfg.n_ctx - prefix_len
    if gen_len > room:
        remedy = f"Set gen_len to at most {room}" if room > 0 else f"Shorten {prompt}"
        raise ConfigError(
            f"gen_len={gen_len} after a prompt of {prefix_len} tokens exceeds the {of}'s context "
            f"of {model.cfg.n_ctx}. {remedy}."
        )
