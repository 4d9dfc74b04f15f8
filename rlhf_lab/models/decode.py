"""Decoding: one token at a time, with a KV cache, through the policy and all hooks on it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab.models.cuda_graphs import (
    StaticSampler,
    StaticStep,
    can_capture,
    is_unchanged,
    snapshot,
)
from rlhf_lab.models.device import autocast
from rlhf_lab.models.forward import Forward, StaticWeights
from rlhf_lab.models.hooked_model import TokenIds, TokenMask, select_cache_rows
from rlhf_lab.models.value_head import (
    TransformerWithValueHead,
    has_standard_forward,
    init_cache,
)


class State(NamedTuple):
    """Outputs of the policy before it generates its next token."""

    logits: Float[Tensor, "batch d_vocab"]
    value: Float[Tensor, " batch"]
    residual: Float[Tensor, "batch d_model"] | None  # None if the policy's forward was replaced


class Decoder:
    """Reads left-padded prompts, each distinct one once, then one token per row and `feed`.

    `state` has the outputs after the tokens so far. See `can_capture` for replays of CUDA graphs.
    """

    def __init__(
        self,
        policy: TransformerWithValueHead,
        prompts: TokenIds,
        prompt_mask: TokenMask,
        gen_len: int,
        forward: Forward | None = None,
    ) -> None:
        self.policy, self.forward = policy, forward or Forward()
        self.gen_len, self.dtype, self.step = gen_len, self.forward.dtype, None
        prompts, prompt_mask = (x.to(policy.device) for x in (prompts, prompt_mask))
        self.weights = StaticWeights(policy.base_model, self.dtype, pads=False)
        tokens, mask, row_of = distinct_rows(prompts, prompt_mask)
        self.cache = init_cache(policy, len(tokens))
        state = self.run(tokens, None if bool(mask.all()) else mask)
        for cache in self.cache if isinstance(self.cache, tuple) else (self.cache,):
            select_cache_rows(cache, row_of)
        self.state = State(*(None if x is None else x[row_of] for x in state))
        self.prompt_mask = prompt_mask
        self.is_static = self.forward.graphs and can_capture(policy, gen_len)

    def feed(self, token: Int[Tensor, " batch"]) -> None:
        """Append one token to every row and update `state`."""
        if self.is_static and self.step is None:
            self.step = self.static_step().captured()
        if self.step is None:
            self.state = self.run(token[:, None], None)
        else:
            self.state = State(*self.step(token))

    def static_step(self) -> StaticStep:
        """Return a step with a cache of fixed size that continues the prompts."""
        return StaticStep(self.policy, self.cache, self.prompt_mask, self.gen_len, self.dtype)

    def draw_all(
        self,
        draw: Callable[[State, Tensor], tuple],
        key: Any,
        noise: Float[Tensor, "gen batch"],
        stop_ids: Int[Tensor, " stops"],
    ) -> list[Tensor | None]:
        """Return all results of `draw`, each `[batch gen ...]`; `key` is what `draw` depends on."""
        first, forward = draw(self.state, noise[0]), self.forward
        objects, values = snapshot(self.policy)
        settings = key, self.prompt_mask.shape, self.gen_len, self.dtype, forward.tf32
        key = objects, (*values, *settings)
        sampler, forward.sampler = forward.sampler, None
        if sampler is not None and is_unchanged(key, sampler.key):
            sampler.step.restart(self.cache, self.prompt_mask)
        else:
            sampler = None  # free its memory
            draw_from = lambda outputs, noise: draw(State(*outputs), noise)
            sampler = StaticSampler(self.static_step(), draw_from, first, noise, key)
        columns = sampler.run(first, noise, stop_ids)
        forward.sampler = sampler if sampler.is_small() else None
        return columns

    def run(self, tokens: Int[Tensor, "batch new"], mask: Tensor | None) -> State:
        """Run the policy on new tokens and return its outputs at the last one."""
        policy = self.policy
        with autocast(policy.device, self.dtype), self.weights.applied():
            if has_standard_forward(policy):
                states = policy.states(tokens, mask, self.cache)
                residual, hidden, values = (x[:, -1:] for x in states)
                return State(policy.unembed(hidden)[:, 0], values[:, 0], residual[:, 0])
            logits, values = policy(tokens, attention_mask=mask, past_kv_cache=self.cache)
            return State(logits[:, -1], values[:, -1], None)


def distinct_rows(prompts: TokenIds, prompt_mask: TokenMask) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct prompts, their masks, and the index of each row's prompt."""
    labeled = torch.stack([prompts, prompt_mask.long()], dim=1)
    # on the CPU: torch 2.9 has no such kernel for MPS
    distinct, row_of = labeled.cpu().unique(dim=0, return_inverse=True)
    distinct, row_of = distinct.to(prompts.device), row_of.to(prompts.device)
    return distinct[:, 0], distinct[:, 1].bool(), row_of
