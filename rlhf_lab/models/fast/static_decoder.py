"""Decoding with a static KV cache: every step is the same operations, which a CUDA graph needs."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.models.decode import State
from rlhf_lab.models.fast.attention import Attend, Qkv
from rlhf_lab.models.fast.decoder import PackedDecoder
from rlhf_lab.models.hooks import has_hooks
from rlhf_lab.models.transformer_lens import rotate
from rlhf_lab.models.value_head import TransformerWithValueHead

Step = Callable[[], State]
WARM_UPS = 2
LEAST_TO_CAPTURE = 8
"""Tokens from which on a graph is captured: before that, capturing takes longer than it saves."""


class StaticDecoder(PackedDecoder):
    """`PackedDecoder`, with the whole cache in every step and a mask over what is not written yet.

    Where to write and what to see are tensors that a step moves on itself, so that no number of
    the host's goes into it, and a step can be captured once and replayed. Attention over the whole
    cache costs more than over its written part, but on a GPU the host's calls are what takes time:
    hundreds per token.

    Args:
        capture: makes of a step one that does the same with less work for the host; not used where
            hooks are in the model, which a replay would not call.
    """

    def __init__(
        self,
        policy: TransformerWithValueHead,
        prompts: Int[Tensor, "batch prefix"],
        prompt_mask: Bool[Tensor, "batch prefix"],
        gen_len: int,
        dtype: torch.dtype | None = None,
        capture: Callable[[Step, list[Tensor]], Step] | None = None,
    ) -> None:
        super().__init__(policy, prompts, prompt_mask, gen_len, dtype)
        self.token = prompts[:, -1].clone()
        self.place = torch.full((1,), self.length, device=prompts.device)
        self.visible = F.pad(prompt_mask, (0, gen_len))[:, None, None]
        self.step: Step = self._advance
        if capture and gen_len >= LEAST_TO_CAPTURE and not has_hooks(self.model):
            self.step = capture(self._advance, [self.place, self.n_real, self.visible])

    def feed(self, token: Int[Tensor, " batch"]) -> None:
        """Go on to the state of every row after one more token."""
        self.token.copy_(token)
        state = self.step()
        # the next step writes over its own results, and these two are kept for the samples
        self.state = state._replace(value=state.value.clone(), residual=state.residual.clone())

    def _advance(self) -> State:
        """One step, of tensors alone: read `token`, write at `place`, and move on."""
        self.visible.index_fill_(-1, self.place, True)
        state = self._see(self._through_blocks(self.token))
        self.place += 1
        self.n_real += 1
        return state

    def _attend(
        self, attend: Attend, cache: tuple[Tensor, Tensor], qkv: Qkv
    ) -> Float[Tensor, "batch head 1 d_head"]:
        q, k, v = qkv
        if attend.rotate is not None:
            q, k = (rotate(attend.rotate, x, self.n_real) for x in (q, k))
        for room, new in zip(cache, (k, v), strict=True):
            room.index_copy_(2, self.place, new)
        grouped = attend.n_heads != attend.n_kv_heads
        return F.scaled_dot_product_attention(
            q, *cache, attn_mask=self.visible, scale=attend.scale, enable_gqa=grouped
        )


def cuda_graph(step: Step, moved: list[Tensor]) -> Step:
    """Capture a step as a CUDA graph, whose replay is one call of the host.

    1. Run it a few times on a stream of its own, so that libraries set themselves up.
    2. Put back what these runs moved.
    3. Capture: the operations are recorded, and not run.

    Args:
        moved: the tensors that a step moves on.
    """
    before = [x.clone() for x in moved]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    for x, value in zip(moved, before, strict=True):
        x.copy_(value)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state = step()

    def replay() -> State:
        graph.replay()
        return state

    return replay
