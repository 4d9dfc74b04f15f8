"""The policy: a hooked transformer whose final normalised residual feeds a small value head."""

from collections.abc import Callable

import einops
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rlhf_lab.models.padding import run_left_padded
from rlhf_lab.models.transformer_lens import HookedTransformer, HookPoint, KVCache

VALUE_HOOK = "ln_final.hook_normalized"


def make_value_head(d_model: int, seed: int = 0) -> nn.Sequential:
    """Linear d -> 4d, ReLU, Linear 4d -> 1, the last so small that first values are near 0.

    A full-sized random last layer makes the first advantages noise; a small one makes them the
    reward (Huang et al. 2024, "The N Implementation Details of RLHF with PPO", section on value
    head initialisation).
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.ReLU(), nn.Linear(4 * d_model, 1))
        nn.init.normal_(head[2].weight, std=1e-2 / (4 * d_model) ** 0.5)
        nn.init.zeros_(head[2].bias)
    return head


class TransformerWithValueHead(nn.Module):
    """A `HookedTransformer` and a value head hooked to `ln_final.hook_normalized`.

    `base_model` stays an ordinary HookedTransformer: hooks attached to it fire as ever, in
    sampling and training. The value head's gradient flows into the trunk.

    Args:
        base_model: the language model.
        value_head: any module `[batch seq d_model] -> [batch seq 1]`; a fresh `make_value_head`
            when None.
        seed: seeds the fresh value head, and touches no other random state.
    """

    def __init__(
        self, base_model: HookedTransformer, value_head: nn.Module | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        self.base_model = base_model
        parameter = next(base_model.parameters())
        fresh = value_head is None
        head = make_value_head(base_model.cfg.d_model, seed) if fresh else value_head
        self.value_head = head.to(device=parameter.device, dtype=parameter.dtype)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device

    def forward(
        self,
        input_ids: Int[Tensor, "batch seq"],
        attention_mask: Bool[Tensor, "batch seq"] | None = None,
        past_kv_cache: KVCache | None = None,
    ) -> tuple[Float[Tensor, "batch seq d_vocab"], Float[Tensor, "batch seq"]]:
        """Logits and value estimates at every position.

        1. Hang a hook on `ln_final.hook_normalized` that hands the activation to the value head.
        2. Run the transformer once; all other hooks fire too.
        3. Take the hook off again.

        Args:
            input_ids: tokens.
            attention_mask: False on padding to the left of a prompt; all other tokens True.
            past_kv_cache: keys and values of earlier tokens (sampling); `attention_mask` is then
                needed.
        """
        values: list[Float[Tensor, "batch seq"]] = []

        def read_value(normalized: Float[Tensor, "batch seq d_model"], hook: HookPoint) -> None:
            values.append(einops.rearrange(self.value_head(normalized), "batch seq 1 -> batch seq"))

        def run(
            tokens: Int[Tensor, "batch seq"], mask: Tensor | None = None
        ) -> tuple[Float[Tensor, "batch seq d_vocab"], Float[Tensor, "batch seq"]]:
            mask = torch.ones_like(tokens) if mask is None else mask.long()
            logits = self.base_model(tokens, attention_mask=mask, past_kv_cache=past_kv_cache)
            return logits, values[0]

        with self.base_model.hooks(fwd_hooks=[(VALUE_HOOK, read_value)]):
            if past_kv_cache is not None:
                return run(input_ids, attention_mask)
            return run_left_padded(run, input_ids, attention_mask)

    def _apply(self, fn: Callable, recurse: bool = True) -> nn.Module:
        """Move or cast everything; `.to`, `.cuda`, `.half` and the rest all come through here."""
        super()._apply(fn, recurse)
        parameter = next(self.base_model.parameters())
        self.base_model.cfg.device = str(parameter.device)
        self.base_model.cfg.dtype = parameter.dtype
        return self
