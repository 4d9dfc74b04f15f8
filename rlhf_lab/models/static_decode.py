"""A decode step in which every run is the same operations on tensors, as a CUDA graph needs."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.models.device import autocast
from rlhf_lab.models.hooked_model import has_hooks
from rlhf_lab.models.hooked_transformer import AttentionContext, HookedTransformer
from rlhf_lab.models.kv_cache import Keys, KVCache, LayerCache, NewKeys
from rlhf_lab.models.value_head import TransformerWithValueHead, has_standard_forward

Outputs = tuple[Tensor, Tensor, Tensor]  # logits, values, residuals; see `decode.State`
WARM_UPS = 2  # runs before the capture, in which libraries initialize themselves
MIN_TOKENS = 8  # capturing takes longer than it saves for fewer


class StaticLayerCache(LayerCache):
    """Keys and values with room for all tokens. A tensor holds the index to write to."""

    def __init__(self, cache: LayerCache, index: Int[Tensor, "1"], room: int) -> None:
        super().__init__()
        self.index, self.qkv_projection = index, cache.qkv_projection
        pad = (0, 0, 0, 0, 0, room)
        self.past_keys = F.pad(cache.past_keys[:, : cache.n_tokens], pad)
        self.past_values = F.pad(cache.past_values[:, : cache.n_tokens], pad)

    def append(self, keys: NewKeys, values: NewKeys) -> tuple[Keys, Keys]:
        """Write the keys and values of one token and return the complete tensors."""
        self.past_keys.index_copy_(1, self.index, keys)
        self.past_values.index_copy_(1, self.index, values)
        return self.past_keys, self.past_values


class StaticStep:
    """One decode step without any number from the host; attention reads the complete cache."""

    def __init__(
        self,
        policy: TransformerWithValueHead,
        cache: KVCache,
        prompt_mask: Bool[Tensor, "batch prefix"],
        gen_len: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.policy, self.dtype = policy, dtype
        batch, prefix_len = prompt_mask.shape
        self.token = torch.zeros(batch, dtype=torch.long, device=prompt_mask.device)
        self.index = torch.full((1,), prefix_len, device=prompt_mask.device)
        self.position = prompt_mask.sum(1, keepdim=True)
        self.mask = F.pad(prompt_mask, (0, gen_len))[:, None, None]
        self.caches = [StaticLayerCache(entry, self.index, gen_len) for entry in cache.entries]
        self.run: Callable[[], Outputs] = self.advance

    def __call__(self, token: Int[Tensor, " batch"]) -> Outputs:
        """Append one token to every row and return logits, values and residuals."""
        self.token.copy_(token)
        logits, values, residual = self.run()
        return logits, values.clone(), residual.clone()  # the next step overwrites its results

    def advance(self) -> Outputs:
        """Run the model on `token` and increment index and positions, all in place."""
        model = self.policy.base_model
        self.mask.index_fill_(-1, self.index, True)
        with autocast(self.policy.device, self.dtype):
            context = AttentionContext(self.mask, *model.rotary_angles(self.position, "global"))
            residual = model.embed_tokens(self.token[:, None], self.position)
            for block, cache in zip(model.blocks, self.caches, strict=True):
                residual = block(residual, context, cache)
            hidden, values = self.policy.hidden_and_values(residual)
            logits = self.policy.unembed(hidden)
        self.index += 1
        self.position += 1
        return logits[:, 0], values[:, 0], residual[:, 0]

    def captured(self) -> "StaticStep":
        """Return the step as one that replays a CUDA graph of itself."""
        self.run = capture(self.advance, [self.index, self.position, self.mask])
        return self


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
    )


def capture(run: Callable[[], Outputs], state: list[Float[Tensor, "..."]]) -> Callable[[], Outputs]:
    """Record `run`, which changes the tensors of `state`, and return a function that replays it."""
    before = [x.clone() for x in state]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    for x, value in zip(state, before, strict=True):
        x.copy_(value)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()

    def replay() -> Outputs:
        graph.replay()
        return outputs

    return replay
