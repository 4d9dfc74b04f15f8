"""Direct logit attribution: a logit difference as an exact sum over the parts of a model."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.models import has_hooks
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.models.residual_parts import SITES, residual_components, validate_additive
from rlhf_lab.models.tokenization import single_token

__all__ = [
    "SITES",
    "Attribution",
    "attribute_logits",
    "attribute_with_hooks",
    "validate_additive",
    "residual_components",
    "single_token",
]


@dataclass(frozen=True)
class Attribution:
    """A logit difference as a sum over the parts of the model.

    Args:
        components: embed, pos_embed, each head (L0H1), each attention bias (L0 b_O), each MLP
            (L0 mlp), and the two constants: norm bias and b_U.
        rows: what each component adds.
        logit_difference: what the model's own logits say; the rows sum to it.
    """

    components: list[str]
    rows: Float[Tensor, "component batch"]
    logit_difference: Float[Tensor, " batch"]

    @property
    def error(self) -> float:
        """The largest difference between the sum of the rows and the model's logits."""
        return (self.rows.sum(0) - self.logit_difference).abs().max().item()


@torch.no_grad()
def attribute_logits(
    model: HookedModel, acts: dict[str, Tensor], word: int, other: int
) -> Attribution:
    """Split logit(word) - logit(other) at one position exactly over the parts of the model.

    1. Take the vectors that sum to the last residual.
    2. LayerNorm is linear once its scale is known: subtract each vector's mean (RMSNorm: do not),
       divide by the scale that the forward used, multiply by the gain.
    3. Project on u = W_U[:, word] - W_U[:, other].
    4. Add the two constants as last rows: "norm bias", the norm's bias along u (0 where it has
       none), and "b_U", the difference of b_U.
    5. Read the logit difference off `acts["logits"]`. That the rows sum to it is then a proof.

    With a trainable norm the gain and the bias are part of the answer; attributions that take them
    as folded away are wrong after the first optimiser step.

    Args:
        acts: at `SITES`, at one position: `[batch ...]`.

    row_c = <g * (c - mean c) / sigma, u>;  constants <b, u> and b_U[word] - b_U[other]
    (Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits", extended by the norm)
    """
    names, parts = residual_components(model, acts)
    norm, unembed = model.ln_final, model.unembed
    u = (unembed.W_U[:, word] - unembed.W_U[:, other]).double()
    if model.cfg.normalization_type in ("LN", "LNPre"):
        parts = parts - parts.mean(-1, keepdim=True)
    gain = norm.w.double() if hasattr(norm, "w") else torch.ones_like(u)
    rows = parts @ (gain * u) / acts["ln_final.hook_scale"].double()[:, 0]
    norm_bias = (norm.b.double() @ u) if hasattr(norm, "b") else torch.zeros_like(u[0])
    b_u = (unembed.b_U[word] - unembed.b_U[other]).double()
    constants = torch.stack([norm_bias, b_u])[:, None].expand(-1, rows.shape[1])
    logits = acts["logits"].double()
    difference = logits[:, word] - logits[:, other]
    return Attribution([*names, "norm bias", "b_U"], torch.cat([rows, constants]), difference)


@torch.no_grad()
def attribute_with_hooks(
    model: HookedModel, acts: dict[str, Tensor], word: int, other: int
) -> Attribution:
    """`attribute_logits` with one part more: what hooks changed behind the other parts.

    It is the normalized residual along u, times the gain, less the rows of the parts; 0 for a model
    without hooks, whose rows are to sum to its logits by themselves.

    Args:
        acts: also at ln_final.hook_normalized.
    """
    found = attribute_logits(model, acts, word, other)
    changed = torch.zeros_like(found.rows[0])
    if has_hooks(model):
        u = (model.unembed.W_U[:, word] - model.unembed.W_U[:, other]).double()
        gain = getattr(model.ln_final, "w", torch.ones_like(u)).double()
        *_, norm_bias, b_u = found.rows
        parts = found.rows.sum(0) - norm_bias - b_u
        changed = acts["ln_final.hook_normalized"].double() @ (gain * u) - parts
    rows = torch.cat([found.rows, changed[None]])
    return Attribution([*found.components, "hooks"], rows, found.logit_difference)
