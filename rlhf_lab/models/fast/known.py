"""The allow-list of the packed form: models it is right for, and hook points it passes."""

from functools import partial
from types import MappingProxyType

import torch.nn.functional as F

from rlhf_lab.models.hooks import hooked_parts
from rlhf_lab.models.transformer_lens import HookedTransformer, has_known_parts

GELU_TANH = partial(F.gelu, approximate="tanh")
ACTIVATIONS = MappingProxyType(
    {
        "gelu_new": GELU_TANH,
        "gelu_pytorch_tanh": GELU_TANH,
        "gelu": F.gelu,
        "silu": F.silu,
        "relu": F.relu,
    }
)
UNUSUAL = (
    "attn_only",
    "parallel_attn_mlp",
    "use_qk_norm",
    "use_local_attn",
    "use_normalization_before_and_after",
    "use_split_qkv_input",
    "use_attn_in",
    "use_hook_tokens",
    "use_attention_sinks",
    "use_logn_attn",
    "use_dynamic_ntk_rope",
    "post_embedding_ln",
    "load_in_4bit",
    "clip_qkv",
)
PASSED = (
    "hook_resid_pre",
    "attn.hook_q",
    "attn.hook_k",
    "attn.hook_v",
    "attn.hook_z",
    "hook_attn_out",
    "hook_resid_mid",
    "mlp.hook_pre",
    "mlp.hook_post",
    "hook_mlp_out",
    "hook_resid_post",
)
"""The hook points of a block that its packed form passes, with the shapes of the modules."""


def can_pack(model: HookedTransformer) -> bool:
    """Whether the packed form knows every part of this model: GPT-2 and Llama shapes do.

    Anything unusual, a block that was replaced or a setting that is not listed here, runs as the
    hooked modules instead.
    """
    cfg = model.cfg
    return (
        cfg.normalization_type in ("LN", "LNPre", "RMS", "RMSPre")
        and cfg.positional_embedding_type in ("standard", "rotary")
        and cfg.attention_dir == "causal"
        and cfg.act_fn in ACTIVATIONS
        and cfg.n_devices == 1
        and cfg.attn_scores_soft_cap <= 0
        and cfg.output_logits_soft_cap <= 0
        and not any(getattr(cfg, name, None) for name in UNUSUAL)
        and has_known_parts(model)
    )


def runs_packed(*models: HookedTransformer) -> bool:
    """Whether these models may run in packed form: it knows them, and passes whatever is hooked.

    It passes the embedding and, in every block, what `PASSED` lists. A hook elsewhere, on the
    attention pattern say, sends the run to the hooked modules.
    """
    return all(can_pack(model) and _passes_hooks(model) for model in models)


def _passes_hooks(model: HookedTransformer) -> bool:
    hooked = list(hooked_parts(model))
    if not hooked:
        return True
    passed = {model.hook_embed}
    passed.update(block.get_submodule(name) for block in model.blocks for name in PASSED)
    return passed.issuperset(hooked)
