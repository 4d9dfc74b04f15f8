"""CUDA graphs: capture, what a captured run depends on, and decoding by the same operations."""

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rlhf_lab.models.device import autocast, total_memory
from rlhf_lab.models.forward import StaticWeights
from rlhf_lab.models.hooked_model import HOOK_STATE, TokenMask, has_hooks
from rlhf_lab.models.hooked_transformer import AttentionContext, HookedTransformer
from rlhf_lab.models.kv_cache import Keys, KVCache, LayerCache, NewKeys
from rlhf_lab.models.value_head import TransformerWithValueHead, has_standard_forward

Results = TypeVar("Results")
Key = tuple[list[Any], tuple]  # objects, compared by identity, and values
WARM_UPS = 2  # runs before the capture, in which libraries initialize themselves
Outputs = tuple[Tensor, Tensor, Tensor]  # logits, values, residuals; see `decode.State`
MIN_TOKENS = 8  # capturing takes longer than it saves for fewer
SPAN = 64  # attention reads the cache up to a multiple of this: one graph for each
KEPT = 16  # a sampler of more than this fraction of the memory is not kept
TOKENS_UNREAD = 16  # tokens between two checks whether all rows have stopped


def capture(run: Callable[[], Results], state: Sequence[Tensor] = ()) -> Callable[[], Results]:
    """Record `run`, which changes the tensors of `state`, and return a function that replays it."""
    before = [x.clone() for x in state]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            run()
            for x, value in zip(state, before, strict=True):
                x.copy_(value)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()

    def replay() -> Results:
        graph.replay()
        return results

    return replay


def snapshot(*models: nn.Module) -> Key:
    """Return what a captured run depends on: attributes, methods and addresses of weights."""
    parts = [part for model in models for part in model.modules()]
    objects: list[Any] = [p for model in models for p in model.parameters()]
    addresses = [(p.data_ptr(), p.requires_grad) for p in objects]
    for part in parts:
        objects += [part, *part._buffers.values()]
        objects += [x for name, x in vars(part).items() if name not in HOOK_STATE]
    for kind in dict.fromkeys(kind for part in parts for kind in type(part).__mro__):
        objects += [kind, *vars(kind).values()]
    for cfg in {id(part.cfg): part.cfg for part in parts if "cfg" in vars(part)}.values():
        objects += vars(cfg).values()
    return objects, (addresses,)


def is_unchanged(key: Key, captured: Key) -> bool:
    """Return True if a capture is still valid."""
    (objects, values), (captured_objects, captured_values) = key, captured
    is_same = values == captured_values and len(objects) == len(captured_objects)
    return is_same and all(map(operator.is_, objects, captured_objects))


class StaticLayerCache(LayerCache):
    """Keys and values with room for all tokens. A tensor holds the index to write to."""

    def __init__(self, cache: LayerCache, index: Int[Tensor, "1"], n_keys: int) -> None:
        super().__init__()
        self.index, self.span, keys = index, n_keys, cache.past_keys
        self.past_keys, self.past_values = keys.new_zeros(2, len(keys), n_keys, *keys.shape[2:])
        self.qkv_projection = tuple(map(torch.empty_like, cache.qkv_projection))

    def append(self, keys: NewKeys, values: NewKeys) -> tuple[Keys, Keys]:
        """Write the keys and values of one token and return those of the span."""
        self.past_keys.index_copy_(1, self.index, keys)
        self.past_values.index_copy_(1, self.index, values)
        return self.past_keys[:, : self.span], self.past_values[:, : self.span]

    def restart(self, cache: LayerCache) -> None:
        """Copy the keys and values of prompts, and the projection."""
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
        self.step: Callable[[], Outputs] = self.advance
        self.restart(cache, prompt_mask)

    def restart(self, cache: KVCache, prompt_mask: TokenMask) -> None:
        """Start after these prompts, with the current weights."""
        self.index.fill_(self.prefix_len)
        self.position.copy_(prompt_mask.sum(1, keepdim=True))
        self.mask.zero_()[:, 0, 0, : self.prefix_len] = prompt_mask
        for static, entry in zip(self.caches, cache.entries, strict=True):
            static.restart(entry)
        self.weights.refresh()

    def __call__(self, token: Int[Tensor, " batch"]) -> Outputs:
        """Append one token to every row and return logits, values and residuals."""
        self.token.copy_(token)
        logits, values, residual = self.step()
        return logits, values.clone(), residual.clone()  # the next step overwrites its results

    def captured(self) -> "StaticStep":
        """Return the step as one that replays a CUDA graph of itself."""
        self.step = capture(self.advance, self.state)
        return self

    def advance(self) -> Outputs:
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
        return logits[:, 0], values[:, 0], residual[:, 0]


class StaticSampler:
    """Draws all tokens of a batch but the first; the host starts one graph per token."""

    def __init__(
        self, step: StaticStep, draw: Callable[..., tuple], first: tuple, noise: Tensor, key: Key
    ) -> None:
        self.step, self.draw, self.key = step, draw, key
        self.noise = torch.zeros_like(noise)
        self.place = torch.zeros(1, dtype=torch.long, device=noise.device)
        self.columns = [None if x is None else x.new_zeros(len(noise), *x.shape) for x in first]
        self.replays: dict[int, Callable[[], None]] = {}

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
        for n in range(1, len(noise)):
            if n % TOKENS_UNREAD == 0 and len(stop_ids):
                if bool(torch.isin(self.columns[0][:n], stop_ids).any(0).all()):
                    break
            self.replay(self.step.prefix_len + n)
        form = {"memory_format": torch.contiguous_format}
        return [None if x is None else x.transpose(0, 1).clone(**form) for x in self.columns]

    def replay(self, n_keys: int) -> None:
        """Feed the last token and draw the next one; attention reads `n_keys` tokens."""
        span = -(-n_keys // SPAN) * SPAN
        if span not in self.replays:
            for cache in self.step.caches:
                cache.span = span
            self.replays[span] = capture(self.advance, [*self.step.state, self.place])
        self.replays[span]()

    def advance(self) -> None:
        """Run one step, all in place."""
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
    """Return True if decoding can be replayed: on CUDA, without hooks, windows or a critic."""
    model = policy.base_model
    return (
        policy.device.type == "cuda"
        and gen_len >= MIN_TOKENS
        and has_standard_forward(policy)
        and type(policy) is TransformerWithValueHead
        and isinstance(model, HookedTransformer)
        and model.cfg.window_size is None
        and not has_hooks(policy)
        and sys.gettrace() is None
    )
