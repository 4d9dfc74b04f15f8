"""Decoding: one token at a time, with a KV cache, through the policy and all hooks on it.

On CUDA, a decode step or a step with its draw is replayed from CUDA graphs, cut at hooks.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rlhf_lab.models.cuda_graphs import Key, capture, is_unchanged, snapshot
from rlhf_lab.models.device import autocast, total_memory
from rlhf_lab.models.forward import Forward, StaticWeights
from rlhf_lab.models.hooked_model import TokenIds, TokenMask, has_hooks, select_cache_rows
from rlhf_lab.models.hooked_transformer import (
    AttentionContext,
    HookedTransformer,
    HookPoint,
    is_hooked,
)
from rlhf_lab.models.kv_cache import Keys, KVCache, LayerCache, NewKeys
from rlhf_lab.models.padding import move_to
from rlhf_lab.models.value_head import TransformerWithValueHead, has_standard_forward, init_cache

MIN_TOKENS = 8  # capturing takes longer than it saves for fewer
SPAN = 64  # attention reads the cache up to a multiple of this: one graph for each
KEPT = 16  # a sampler of more than this fraction of the memory is not kept
# of activations with padded keys or a padded vocabulary in a static step
PADDED_HOOK_POINTS = ("hook_attn_scores", "hook_pattern", "unembed.hook_out")
TOKENS_UNREAD = 16  # tokens between two checks whether all rows have stopped


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
        self.weights = StaticWeights(policy.base_model, self.dtype, pads=False)
        rows = distinct_rows(prompts, prompt_mask)
        is_padded = not bool(rows[1].all())  # read on the CPU
        tokens, mask, row_of = (move_to(policy.device, x) for x in rows)
        self.prompts, self.prompt_mask = tokens[row_of], mask[row_of]
        self.cache = init_cache(policy, len(tokens))
        state = self.run(tokens, mask if is_padded else None)
        for cache in self.cache if isinstance(self.cache, tuple) else (self.cache,):
            select_cache_rows(cache, row_of)
        self.state = State(*(None if x is None else x[row_of] for x in state))
        self.is_static = self.forward.graphs and can_capture(policy, gen_len)

    def feed(self, token: Int[Tensor, " batch"]) -> None:
        self.state = self.run(token[:, None], None) if self.step is None else self.step(token)

    def static_step(self) -> "StaticStep":
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
            sampler = StaticSampler(self.static_step(), draw, first, noise, key)
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


class StaticLayerCache(LayerCache):
    """Keys and values, each in its dtype, with room for all tokens, and the index to write to."""

    def __init__(self, cache: LayerCache, index: Int[Tensor, "1"], n_keys: int) -> None:
        super().__init__()
        self.index, self.span, past = index, n_keys, (cache.past_keys, cache.past_values)
        self.past_keys, self.past_values = (x.new_zeros(len(x), n_keys, *x.shape[2:]) for x in past)
        self.qkv_projection = tuple(map(torch.empty_like, cache.qkv_projection))

    def append(self, keys: NewKeys, values: NewKeys) -> tuple[Keys, Keys]:
        """Write the keys and values of one token and return those of the span."""
        self.past_keys.index_copy_(1, self.index, keys)
        self.past_values.index_copy_(1, self.index, values)
        return self.past_keys[:, : self.span], self.past_values[:, : self.span]

    def restart(self, cache: LayerCache) -> None:
        self.past_keys[:, : cache.n_tokens] = cache.past_keys[:, : cache.n_tokens]
        self.past_values[:, : cache.n_tokens] = cache.past_values[:, : cache.n_tokens]
        torch._foreach_copy_(list(self.qkv_projection), list(cache.qkv_projection))


class StaticStep:
    """One decode step without any number from the host."""

    def __init__(
        self,
        policy: TransformerWithValueHead,
        cache: KVCache,
        prompt_mask: TokenMask,
        gen_len: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.policy, self.dtype = policy, dtype
        batch, self.prefix_len = prompt_mask.shape
        n_keys = -(-(self.prefix_len + gen_len) // SPAN) * SPAN
        self.position = prompt_mask.sum(1, keepdim=True)
        self.token, self.index = self.position.new_zeros(batch), self.position.new_zeros(1)
        self.mask = prompt_mask.new_zeros(batch, 1, 1, n_keys)
        self.state = [self.index, self.position, self.mask, self.token]
        self.caches = [StaticLayerCache(x, self.index, n_keys) for x in cache.entries]
        self.weights = StaticWeights(policy.base_model, dtype)
        self.step: Callable[[], State] = self.advance
        self.restart(cache, prompt_mask)

    def restart(self, cache: KVCache, prompt_mask: TokenMask) -> None:
        """Start after these prompts, with the current weights."""
        self.index.fill_(self.prefix_len)
        self.position.copy_(prompt_mask.sum(1, keepdim=True))
        self.mask.zero_()[:, 0, 0, : self.prefix_len] = prompt_mask
        for static, entry in zip(self.caches, cache.entries, strict=True):
            static.restart(entry)
        self.weights.refresh()

    def __call__(self, token: Int[Tensor, " batch"]) -> State:
        """Append one token to every row and return the outputs."""
        self.token.copy_(token)
        logits, value, residual = self.step()
        return State(logits, value.clone(), residual.clone())  # the next step overwrites them

    def captured(self) -> "StaticStep":
        """Return the step as one that replays a CUDA graph of itself."""
        self.step = capture(self.advance, self.state)
        return self

    def advance(self) -> State:
        """Run the model on `token` and increment index and positions, all in place."""
        model, span = self.policy.base_model, self.caches[0].span
        self.mask.index_fill_(-1, self.index, True)
        with autocast(self.policy.device, self.dtype), self.weights.applied():
            angles = model.rotary_angles(self.position, "global")
            context = AttentionContext(self.mask[..., :span], *angles)
            residual = model.embed_tokens(self.token[:, None], self.position)
            for block, cache in zip(model.blocks, self.caches, strict=True):
                residual = block(residual, context, cache)
            hidden, values = self.policy.hidden_and_values(residual)
            logits = self.policy.unembed(hidden)[..., : model.cfg.d_vocab]
        self.index += 1
        self.position += 1
        return State(logits[:, 0], values[:, 0], residual[:, 0])


class StaticSampler:
    """Draws all tokens of a batch but the first; the host starts one graph per token."""

    def __init__(
        self, step: StaticStep, draw: Callable[..., tuple], first: tuple, noise: Tensor, key: Key
    ) -> None:
        self.step, self.draw, self.key = step, draw, key
        self.noise = torch.zeros_like(noise)
        self.place = torch.zeros(1, dtype=torch.long, device=noise.device)
        self.columns = [None if x is None else x.new_zeros(len(noise), *x.shape) for x in first]
        self.points: tuple[HookPoint, ...] = ()
        self.replays: dict[int, Callable[[], None]] = {}  # by span, for these hooked points

    def run(
        self, first: tuple, noise: Float[Tensor, "gen batch"], stop_ids: Int[Tensor, " stops"]
    ) -> list[Tensor | None]:
        """Return the columns of all draws, `[batch gen ...]`, with 0 after the last one."""
        self.place.zero_()
        self.noise.copy_(noise)
        self.step.token.copy_(first[0])
        for column, x in zip(self.columns, first, strict=True):
            if column is not None:
                column.zero_()[0] = x
        with_hooks = has_hooks(self.step.policy)  # read once: only a hook adds hooks in a batch
        for n in range(1, len(noise)):
            if len(stop_ids) and (with_hooks or n % TOKENS_UNREAD == 0):  # hooks see no later token
                if bool(torch.isin(self.columns[0][:n], stop_ids).any(0).all()):
                    break
            points = self.step.policy.hook_dict.values() if with_hooks else ()
            self.replay(self.step.prefix_len + n, tuple(filter(is_hooked, points)))
        form = {"memory_format": torch.contiguous_format}
        return [None if x is None else x.transpose(0, 1).clone(**form) for x in self.columns]

    def replay(self, n_keys: int, points: tuple[HookPoint, ...]) -> None:
        """Feed the last token, with hooks at `points`, and draw; attention reads `n_keys`."""
        policy, span = self.step.policy, -(-n_keys // SPAN) * SPAN
        if points != self.points:
            self.points, self.replays = points, {}
        if span not in self.replays:
            for cache in self.step.caches:
                cache.span = span
            self.replays[span] = capture(self.advance, [*self.step.state, self.place], points)
        with autocast(policy.device, self.step.dtype):
            self.replays[span]()

    def advance(self) -> None:
        outputs = self.step.advance()
        self.place += 1
        results = self.draw(outputs, self.noise.index_select(0, self.place)[0])
        for column, x in zip(self.columns, results, strict=True):
            if column is not None:
                column.index_copy_(0, self.place, x[None])
        self.step.token.copy_(results[0])

    def is_small(self) -> bool:
        """Return True if the memory of cache and columns can be kept between two batches."""
        tensors = [x for cache in self.step.caches for x in (cache.past_keys, cache.past_values)]
        n_bytes = sum(x.nbytes for x in (*tensors, *self.columns) if x is not None)
        return n_bytes <= (total_memory(self.noise.device) or n_bytes * KEPT) // KEPT


def can_capture(policy: TransformerWithValueHead, gen_len: int) -> bool:
    """Return True if graphs can replay decoding: only hooks run, which see no padding."""
    model = policy.base_model
    return (
        policy.device.type == "cuda"
        and gen_len >= MIN_TOKENS
        and has_standard_forward(policy)
        and type(policy) is TransformerWithValueHead
        and isinstance(model, HookedTransformer)
        and model.cfg.window_size is None
        and not any(is_hooked(x) for x in policy.modules() if not has_fixed_shape(x))
        and sys.gettrace() is None
    )


def has_fixed_shape(module: nn.Module) -> bool:
    name = str(getattr(module, "name", ""))
    return isinstance(module, HookPoint) and not name.endswith(PADDED_HOOK_POINTS)


def distinct_rows(prompts: TokenIds, prompt_mask: TokenMask) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct prompts, their masks, and the index of each row's prompt, on the CPU."""
    labeled = torch.stack([prompts, prompt_mask.to(prompts)], dim=1)
    # torch 2.9 has no such kernel for MPS
    distinct, row_of = labeled.cpu().unique(dim=0, return_inverse=True)
    return distinct[:, 0], distinct[:, 1].bool(), row_of
