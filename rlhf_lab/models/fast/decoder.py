"""Decoding in packed form: one token at a time, with a KV cache of fixed size."""

from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.models.decode import State, distinct_rows
from rlhf_lab.models.fast.attention import Attend, Qkv, attend_causally
from rlhf_lab.models.fast.blocks import embed, pack, run_block
from rlhf_lab.models.fast.readout import read_state
from rlhf_lab.models.padding import rotate_padding
from rlhf_lab.models.transformer_lens import make_room_for, rotate
from rlhf_lab.models.value_head import TransformerWithValueHead


class PackedDecoder:
    """Runs the packed form, with keys and values in a cache of fixed size.

    Each distinct prompt is read once. Rows with shorter prompts are read without their padding and
    moved to the right end of it, where a mask hides the gap.

    Args:
        gen_len: how many tokens will be fed at most.
        dtype: of matrix products and cache; the model's own when None.
    """

    def __init__(
        self,
        policy: TransformerWithValueHead,
        prompts: Int[Tensor, "batch prefix"],
        prompt_mask: Bool[Tensor, "batch prefix"],
        gen_len: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.policy, self.model = policy, policy.base_model
        make_room_for(self.model, prompts.shape[1] + gen_len)
        self.blocks = pack(self.model, dtype)
        self.W_U = self.model.W_U.to(dtype or self.model.cfg.dtype)
        self.length = prompts.shape[1]
        self.n_real = prompt_mask.sum(1, keepdim=True)
        tokens, mask, row_of = distinct_rows(prompts, prompt_mask)
        padded = not bool(prompt_mask.all())
        last, caches = self._read(tokens, mask, padded)
        room = (0, 0, 0, gen_len)
        self.caches = [tuple(F.pad(x[row_of], room) for x in cache) for cache in caches]
        written = torch.ones(len(prompts), gen_len, dtype=torch.bool, device=prompts.device)
        self.mask = torch.cat([prompt_mask, written], 1)[:, None, None] if padded else None
        self.state = self._see(last[row_of])

    def feed(self, token: Int[Tensor, " batch"]) -> None:
        """Go on to the state of every row after one more token."""
        residual = self._through_blocks(token)
        self.length += 1
        self.n_real = self.n_real + 1
        self.state = self._see(residual)

    def _through_blocks(self, token: Int[Tensor, " batch"]) -> Float[Tensor, "batch 1 d_model"]:
        """The last residual of one more token, whose keys and values go into the cache."""
        residual = embed(self.model, token[:, None], self.n_real)
        for packed, cache in zip(self.blocks, self.caches, strict=True):
            residual = run_block(packed, residual, partial(self._attend, packed.attend, cache))
        return residual

    def _read(
        self,
        tokens: Int[Tensor, "distinct prefix"],
        mask: Bool[Tensor, "distinct prefix"],
        padded: bool,
    ) -> tuple[Float[Tensor, "distinct 1 d_model"], list[tuple[Tensor, Tensor]]]:
        """The last residual of each prompt, and its keys and values at every layer."""
        caches: list[tuple[Tensor, Tensor]] = []
        if padded:
            tokens = rotate_padding(tokens, mask, "right")
        residual = embed(self.model, tokens, slice(0, tokens.shape[1]))
        for packed in self.blocks:
            attention = partial(attend_causally, packed.attend, keep=caches.append)
            residual = run_block(packed, residual, attention)
        if padded:
            residual = rotate_padding(residual, mask, "left")
            caches = [tuple(_to_left(x, mask) for x in cache) for cache in caches]
        return residual[:, -1:], caches

    def _attend(
        self, attend: Attend, cache: tuple[Tensor, Tensor], qkv: Qkv
    ) -> Float[Tensor, "batch head 1 d_head"]:
        q, k, v = qkv
        if attend.rotate is not None:
            q, k = (rotate(attend.rotate, x, self.n_real) for x in (q, k))
        end = self.length + 1
        for room, new in zip(cache, (k, v), strict=True):
            room[:, :, self.length : end] = new
        keys, values = (room[:, :, :end] for room in cache)
        mask = None if self.mask is None else self.mask[..., :end]
        grouped = attend.n_heads != attend.n_kv_heads
        return F.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, scale=attend.scale, enable_gqa=grouped
        )

    def _see(self, residual: Float[Tensor, "batch 1 d_model"]) -> State:
        logits, values = read_state(self.policy, residual, self.W_U)
        return State(logits[:, 0], values[:, 0], residual[:, 0])


def _to_left(
    x: Float[Tensor, "batch kv_head seq d_head"], mask: Bool[Tensor, "batch seq"]
) -> Float[Tensor, "batch kv_head seq d_head"]:
    return rotate_padding(x.transpose(1, 2), mask, "left").transpose(1, 2)
