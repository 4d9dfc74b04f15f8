"""Rewards on token ids: one number per text, or one per token."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_lab.errors import ConfigError
from rlhf_lab.models.padding import pad_rows
from rlhf_lab.rewards.model import OfRewardModel
from rlhf_lab.torch_modes import torch_modes_kept


class TokenReward:
    """A reward function that reads token ids rather than texts; hand it in as `reward_fn`.

    Args:
        function: from token ids `[batch seq]` and attention mask `[batch seq]` (False on padding,
            which is on either side of a text) to one number per text `[batch]`, or one per token
            `[batch seq]`: what the run earns by writing it. Numbers at the prompt's tokens are not
            paid. Such as a `RewardModel`, or a method of one.
        tokenizer: the one whose ids it reads; a policy with other tokens is refused then.

    Attributes:
        model: the module behind the function, if there is one.
    """

    def __init__(
        self,
        function: Callable[[Int[Tensor, "batch seq"], Bool[Tensor, "batch seq"]], Tensor],
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.function, self.tokenizer = function, tokenizer
        is_module = isinstance(function, nn.Module)
        self.model: Any = function if is_module else getattr(function, "model", None)

    def __call__(
        self, input_ids: Int[Tensor, "batch seq"], attention_mask: Bool[Tensor, "batch seq"]
    ) -> Float[Tensor, " batch"] | Float[Tensor, "batch seq"]:
        """What the function returns, in float32.

        Raises:
            ConfigError: it returned something else than one finite number per text, or one per
                token.
        """
        with torch.no_grad(), torch_modes_kept():
            returned = self.function(input_ids.clone(), attention_mask.clone())
        shape, fits = tuple(input_ids.shape), (tuple(input_ids.shape[:1]), tuple(input_ids.shape))
        if not isinstance(returned, Tensor) or returned.is_complex():
            raise ConfigError(
                f"reward_fn returned {type(returned).__name__} for token ids; return a tensor of "
                "one number per text, or of one per token."
            )
        if tuple(returned.shape) not in fits:
            raise ConfigError(
                f"reward_fn returned shape {tuple(returned.shape)} for token ids of shape {shape}; "
                "return one number per text, or one per token."
            )
        rewards = returned.detach().clone().float().to(input_ids.device)
        looked_at = rewards if rewards.ndim == 1 else rewards[attention_mask]
        if not looked_at.isfinite().all():
            raise ConfigError(
                f"reward_fn returned {looked_at[~looked_at.isfinite()][0]} for token ids; return "
                "finite numbers."
            )
        return rewards

    def refuse_other_tokens(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Refuse a policy whose token ids stand for other tokens.

        Raises:
            ConfigError: they do.
        """
        if self.tokenizer is not None and self.tokenizer.get_vocab() != tokenizer.get_vocab():
            raise ConfigError(
                "reward_fn reads other tokens than the policy writes; train a reward model on the "
                "policy's base_model, or set reward_per_token=False, which reads texts."
            )


class ScoreGains(OfRewardModel):
    """What each token adds to the score of a reward model; a function for `TokenReward`.

    1. Score the text as it stands after each of its tokens; after the last one, at the EOS behind
       it, where the model was trained to be read, unless the text fills its context.
    2. Pay each token the difference.

    The gains of a response add up to the score of the whole text less that of its prompt. With
    gamma = 1, the best policy is therefore the one that the score at the end has (potential-based
    shaping: Ng, Harada and Russell 1999), and credit is assigned sooner. For the model that it is
    made from, see `OfRewardModel`.
    """

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The one whose ids the model reads."""
        return self.model.base_model.tokenizer

    def __call__(
        self, input_ids: Int[Tensor, "batch seq"], attention_mask: Bool[Tensor, "batch seq"]
    ) -> Float[Tensor, "batch seq"]:
        """The gain at each real token, in standard deviations of the texts trained on; else 0.

        The first token of a text gains what it scores by itself.
        """
        rows = [ids[real].tolist() for ids, real in zip(input_ids, attention_mask, strict=True)]
        parts = [rows[at : at + self.batch_size] for at in range(0, len(rows), self.batch_size)]
        gains = torch.cat([gain for part in parts for gain in self._gains(part)])
        paid = torch.zeros(input_ids.shape, device=input_ids.device)
        return paid.masked_scatter(attention_mask, gains.to(input_ids.device))

    def _gains(self, rows: list[list[int]]) -> list[Float[Tensor, " row"]]:
        """The gains of the tokens of each row; BOS and EOS are added where they are missing."""
        cfg, tokenizer = self.model.base_model.cfg, self.tokenizer
        bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        before = [
            [] if bos is None or row[:1] == [bos] or len(row) >= cfg.n_ctx else [bos]
            for row in rows
        ]
        read = [[*first, *row] for first, row in zip(before, rows, strict=True)]
        after = [
            [] if eos is None or row[-1:] == [eos] or len(row) >= cfg.n_ctx else [eos]
            for row in read
        ]
        read = [[*row, *last] for row, last in zip(read, after, strict=True)]
        with torch.no_grad():
            ids, real = pad_rows(read, next(self.model.parameters()).device)
            scores = self.model.normalize(self.model.token_scores(ids, real))
        gains = []
        for row, score, first, last in zip(rows, scores, before, after, strict=True):
            score = score[len(first) : len(first) + len(row) + len(last)]
            if last:  # the text is read to its end behind the last token
                score = torch.cat([score[:-2], score[-1:]])
            gains.append(score.diff(prepend=score.new_zeros(1)))
        return gains
