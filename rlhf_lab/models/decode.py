"""Decoding through the hooked modules: one token at a time, with a KV cache."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.models.critic import init_cache
from rlhf_lab.models.device import autocast
from rlhf_lab.models.transformer_lens import final_residual, pick_rows
from rlhf_lab.models.value_head import TransformerWithValueHead


class State(NamedTuple):
    """What the policy thinks before it writes its next token.

    `residual` is that after the last block; None where the modules ran, which do not show it.
    """

    logits: Float[Tensor, "batch d_vocab"]
    value: Float[Tensor, " batch"]
    residual: Float[Tensor, "batch d_model"] | None


def distinct_rows(
    prompts: Int[Tensor, "batch prefix"], prompt_mask: Bool[Tensor, "batch prefix"]
) -> tuple[Int[Tensor, "distinct prefix"], Bool[Tensor, "distinct prefix"], Int[Tensor, " batch"]]:
    """The distinct ones of left-padded prompts, their masks, and which of them each row is."""
    labeled = torch.stack([prompts, prompt_mask.long()], dim=1)
    distinct, row_of = labeled.unique(dim=0, return_inverse=True)
    return distinct[:, 0], distinct[:, 1].bool(), row_of


class HookedDecoder:
    """Calls the policy, so that everything that is hooked on it sees every token.

    Prompts are read once per distinct prompt; TransformerLens's cache holds keys and values.

    Args:
        dtype: of the matrix products; the policy's own when None.
        read: makes logits and values of last residuals, in place of the policy's forward; the
            modules run as far as there.
    """

    def __init__(
        self,
        policy: TransformerWithValueHead,
        prompts: Int[Tensor, "batch prefix"],
        prompt_mask: Bool[Tensor, "batch prefix"],
        dtype: torch.dtype | None = None,
        read: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        self.policy, self.dtype, self.read = policy, dtype, read
        tokens, mask, row_of = distinct_rows(prompts, prompt_mask)
        self.cache = init_cache(policy, len(tokens))
        state = self._run(tokens, mask)
        pick_rows(self.cache, row_of)
        self.state = State(*(None if part is None else part[row_of] for part in state))

    def feed(self, token: Int[Tensor, " batch"]) -> None:
        """Go on to the state of every row after one more token."""
        token = token[:, None]
        self.state = self._run(token, torch.ones_like(token, dtype=torch.bool))

    def _run(self, tokens: Int[Tensor, "batch seq"], mask: Bool[Tensor, "batch seq"]) -> State:
        with autocast(self.policy.device, self.dtype):
            if self.read is None:
                logits, values = self.policy(tokens, attention_mask=mask, past_kv_cache=self.cache)
                return State(logits[:, -1], values[:, -1], None)
            residual = final_residual(self.policy.base_model, tokens, mask.long(), self.cache)
            logits, values = self.read(residual)
        return State(logits[:, -1], values[:, -1], residual[:, -1])
