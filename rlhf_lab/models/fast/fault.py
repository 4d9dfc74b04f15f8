"""The first of a policy's parts whose packed form differs from its modules."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.models.fast.blocks import packed_residuals
from rlhf_lab.models.fast.readout import final_norm, unembed
from rlhf_lab.models.reference import final_residuals
from rlhf_lab.models.transformer_lens import HookedTransformer, final_logits, has_own_forward
from rlhf_lab.models.value_head import VALUE_HOOK, TransformerWithValueHead


@torch.no_grad()
def first_difference(
    policy: TransformerWithValueHead,
    tokens: Int[Tensor, "rows seq"],
    mask: Bool[Tensor, "rows seq"] | None,
    tolerance: float,
) -> str:
    """The first part of the policy that the packed form and the modules disagree about, in words.

    The parts are embedding, attention and MLP of each block, final norm, unembedding, value head,
    and the policy's forward, which puts them together. `tolerance` is of a difference, as a share
    of the largest entry where that is above 1.
    """
    model = policy.base_model
    if has_own_forward(model):
        return "the model's forward"
    sites = [
        f"blocks.{layer}.{site}"
        for layer in range(len(model.blocks))
        for site in ("hook_resid_pre", "hook_attn_out", "hook_mlp_out")
        if f"blocks.{layer}.{site}" in model.hook_dict
    ]
    end = f"blocks.{len(model.blocks)}.hook_resid_pre"  # what one more block would read
    heard: list[dict[str, Tensor]] = []
    for run in (packed_residuals, final_residuals):
        heard.append({})
        keep = lambda x, hook, to=heard[-1]: to.update({hook.name: x})
        with model.hooks(fwd_hooks=[(site, keep) for site in sites]):
            heard[-1][end] = run(model, tokens, mask)
    for site in (*sites, end):
        packed, modules = (found.get(site) for found in heard)
        if packed is None or modules is None or _differ(packed, modules, tolerance):
            return _in_words(site, heard)
    part = _difference_at_the_end(model, heard[1][end], tolerance)
    if part is not None:
        return part
    values: list[Tensor] = []
    row = tokens[:1] if mask is None else tokens[:1, mask[0]]
    handle = policy.value_head.register_forward_hook(lambda *seen: values.append(seen[-1]))
    policy(row)
    handle.remove()
    expected = policy.value_head(final_norm(model, packed_residuals(model, row))[0])
    same = bool(values) and not _differ(values[0], expected, tolerance)
    return "the policy's forward" if same else "the value head"


def _difference_at_the_end(
    model: HookedTransformer, residual: Float[Tensor, "rows seq d_model"], tolerance: float
) -> str | None:
    heard: list[Tensor] = []
    normalized, hidden = final_norm(model, residual)
    with model.hooks(fwd_hooks=[(VALUE_HOOK, lambda x, hook: heard.append(x))]):
        expected = model.ln_final(residual)
    same = bool(heard) and not _differ(normalized, heard[0], tolerance)
    if not same or _differ(hidden, expected, tolerance):
        return "the final norm"
    if _differ(unembed(model, hidden), final_logits(model, residual), tolerance):
        return "the unembedding"
    return None


def _in_words(site: str, heard: list[dict[str, Tensor]]) -> str:
    """The part that wrote what is read at a site; the block itself, if one form never ran it."""
    _, layer, name = site.split(".")
    if name == "hook_resid_pre":
        if (site in heard[0]) != (site in heard[1]):
            return f"block {layer}"
        return "the embedding" if layer == "0" else f"block {int(layer) - 1}"
    return f"block {layer}'s {'attention' if name == 'hook_attn_out' else 'MLP'}"


def _differ(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    scale = expected.float().abs().max().clamp(min=1)
    return not ((found.float() - expected.float()).abs().max() / scale).item() <= tolerance
