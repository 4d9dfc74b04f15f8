"""Read-out: final norm, unembedding and value head, through the hooked modules."""

from jaxtyping import Float
from torch import Tensor

from rlhf_lab.models.fast.readout import final_norm, read_state, unembed
from rlhf_lab.models.hooks import has_hooks
from rlhf_lab.models.transformer_lens import HookedTransformer
from rlhf_lab.models.value_head import VALUE_HOOK, TransformerWithValueHead


def read_out(
    model: HookedTransformer, residuals: Float[Tensor, "batch gen d_model"]
) -> Float[Tensor, "batch gen d_vocab"]:
    """Logits of the residuals that `final_residuals` gave: the final norm, then the unembedding."""
    if has_hooks(model.ln_final) or has_hooks(model.unembed):
        return model.unembed(model.ln_final(residuals))
    return unembed(model, final_norm(model, residuals)[1])


def read_policy_state(
    policy: TransformerWithValueHead, residual: Float[Tensor, "batch seq d_model"]
) -> tuple[Float[Tensor, "batch seq d_vocab"], Float[Tensor, "batch seq"]]:
    """Logits and value estimates of last residuals: what the policy's forward does at its end."""
    model = policy.base_model
    if not (has_hooks(model.ln_final) or has_hooks(model.unembed)):
        return read_state(policy, residual)
    values: list[Tensor] = []

    def read_value(normalized: Tensor, hook: object) -> None:
        values.append(policy.value_head(normalized)[..., 0])

    with model.hooks(fwd_hooks=[(VALUE_HOOK, read_value)]):
        return model.unembed(model.ln_final(residual)), values[0]
