"""Decoding through the hooked modules: one token at a time, with a KV cache."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rlhf_lab.models.critic import init_cache
from rlhf_lab.models.device import autocast
from rlhf_lab.models.transformer_lens import final_residual, pick_rows
from rlhf_lab.models.value_head import TransformerWithValueHead


class State(NamedTuple):
    """What the policy thinks before it writes its next token.

    Args:
        logits: over the whole vocabulary.
        value: the value head's estimate of the state.
        residual: after the last block; None where the policy's own forward does not show it.
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


def is_plain(policy: nn.Module) -> bool:
    """Whether the policy's forward is the package's own, and not one that a learner wrote."""
    return getattr(type(policy), "forward", None) is TransformerWithValueHead.forward


class HookedDecoder:
    """Runs the hooked modules, so that everything that is hooked on them sees every token.

    Prompts are read once per distinct prompt; TransformerLens's cache holds keys and values.
    """

    def __init__(
        self,
        policy: TransformerWithValueHead,
        prompts: Int[Tensor, "batch prefix"],
        prompt_mask: Bool[Tensor, "batch prefix"],
        dtype: torch.dtype | None = None,
    ) -> None:
        self.policy, self.dtype = policy, dtype
        tokens, mask, row_of = distinct_rows(prompts, prompt_mask)
        self.cache = init_cache(policy, len(tokens))
        state = self._run(tokens, mask)
        pick_rows(self.cache, row_of)
        self.state = State(*(None if part is None else part[row_of] for part in state))

    def feed(self, token: Int[Tensor, " batch"]) -> State:
        """The state of every row after one more token."""
        token = token[:, None]
        self.state = self._run(token, torch.ones_like(token, dtype=torch.bool))
        return self.state

    def _run(self, tokens: Int[Tensor, "batch seq"], mask: Bool[Tensor, "batch seq"]) -> State:
        with autocast(self.policy.device, self.dtype):
            return self._run_modules(tokens, mask)

    def _run_modules(
        self, tokens: Int[Tensor, "batch seq"], mask: Bool[Tensor, "batch seq"]
    ) -> State:
        from rlhf_lab.models.readout import read_policy_state

        if not is_plain(self.policy):
            logits, values = self.policy(tokens, attention_mask=mask, past_kv_cache=self.cache)
            return State(logits[:, -1], values[:, -1], None)
        residual = final_residual(self.policy.base_model, tokens, mask.long(), self.cache)
        logits, values = read_policy_state(self.policy, residual)
        return State(logits[:, -1], values[:, -1], residual[:, -1])
