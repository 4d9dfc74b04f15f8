"""Rewards on token ids: one number per text, or one per token."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_lab.errors import ConfigError
from rlhf_lab.models.padding import pad_rows
from rlhf_lab.rewards.model import RewardModel
from rlhf_lab.torch_modes import torch_modes_kept


class TokenReward:
    """A `reward_fn` that reads token ids instead of texts.

    Args:
        function: from token ids `[batch seq]` and attention mask `[batch seq]` (False at padding,
            on either side of a text) to one number per text `[batch]` or per token `[batch seq]`,
            such as a `RewardModel` or one of its methods. Numbers at prompt tokens are ignored.
        tokenizer: of the function, to reject a policy with another vocabulary.

    Attributes:
        model: the module that the function calls, or None.
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
        """Call the function and return its numbers in float32.

        Raises:
            ConfigError: If it does not return one finite number per text, or one per token.
        """
        with torch.no_grad(), torch_modes_kept():
            returned = self.function(input_ids.clone(), attention_mask.clone())
        is_real = isinstance(returned, Tensor) and not returned.is_complex()
        if not is_real or returned.shape not in (input_ids.shape[:1], input_ids.shape):
            got = f"shape {tuple(returned.shape)}" if is_real else type(returned).__name__
            raise ConfigError(
                f"reward_fn returned {got} for token ids of shape {tuple(input_ids.shape)}. Return "
                "a tensor of one real number per text, or of one per token."
            )
        rewards = returned.detach().clone().float().to(input_ids.device)
        real = rewards if rewards.ndim == 1 else rewards[attention_mask.bool()]
        if not real.isfinite().all():
            raise ConfigError(
                f"reward_fn returned {real[~real.isfinite()][0]} for token ids. Use finite numbers."
            )
        return rewards

    def validate_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise ConfigError if the policy has another vocabulary."""
        if self.tokenizer is not None and self.tokenizer.get_vocab() != tokenizer.get_vocab():
            raise ConfigError(
                "reward_fn reads other tokens than the policy writes. Train a reward model on the "
                "policy's base_model, or set reward_per_token=False, which reads texts."
            )


class ScoreGains:
    """The change of a reward model's score at each token; a function for `TokenReward`.

    1. Score the text up to each token, in standard deviations of the training texts. The last score
       is read at the EOS after the text, as in training, if it fits into the context.
    2. Return the differences; the gain of the first token is its own score.

    The gains of a response sum to the score of the whole text minus that of its prompt. With
    gamma = 1, the optimal policy is therefore that of the score at the end (potential-based
    shaping: Ng, Harada and Russell 1999), and credit is assigned earlier.
    """

    def __init__(self, model: RewardModel, batch_size: int = 128) -> None:
        self.model, self.batch_size = model, batch_size
        self.tokenizer = model.base_model.tokenizer

    def __call__(
        self, input_ids: Int[Tensor, "batch seq"], attention_mask: Bool[Tensor, "batch seq"]
    ) -> Float[Tensor, "batch seq"]:
        """Return the gain at each real token, and 0 at padding."""
        rows = [ids[real].tolist() for ids, real in zip(input_ids, attention_mask, strict=True)]
        parts = [rows[at : at + self.batch_size] for at in range(0, len(rows), self.batch_size)]
        gains = torch.cat([gain for part in parts for gain in self._gains(part)])
        rewards = torch.zeros(input_ids.shape, device=input_ids.device)
        return rewards.masked_scatter(attention_mask, gains.to(input_ids.device))

    @torch.no_grad()
    def _gains(self, rows: list[list[int]]) -> list[Float[Tensor, " row"]]:
        n_ctx = self.model.base_model.cfg.n_ctx
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        full, starts = [], []
        for row in rows:  # add a missing BOS and EOS
            start = [] if bos is None or row[:1] == [bos] or len(row) >= n_ctx else [bos]
            whole = [*start, *row]
            fits = eos is not None and whole[-1:] != [eos] and len(whole) < n_ctx
            full.append([*whole, eos] if fits else whole)
            starts.append(len(start))
        scores = self.model.token_scores(*pad_rows(full, self.model.mean.device))
        gains = []
        for row, whole, start, score in zip(rows, full, starts, scores, strict=True):
            score = self.model.normalize(score[start : len(whole)])
            score[len(row) - 1] = score[-1]  # the text is scored at the EOS after it
            gains.append(score[: len(row)].diff(prepend=score.new_zeros(1)))
        return gains
