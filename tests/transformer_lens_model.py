"""TransformerLens's own `HookedTransformer` with the configuration and weights of ours."""

import dataclasses
import warnings

import torch

from rlhf_lab.models.hooked_transformer import HookedTransformer


def to_transformer_lens(model: HookedTransformer) -> torch.nn.Module:
    """Import the class here because TransformerLens 4 has removed it."""
    from transformer_lens import HookedTransformer as TransformerLensModel
    from transformer_lens import HookedTransformerConfig

    cfg = model.cfg
    shared = {field.name for field in dataclasses.fields(HookedTransformerConfig)}
    settings = {name: value for name, value in vars(cfg).items() if name in shared}
    is_rotary = cfg.positional_embedding_type == "rotary"
    settings |= {
        "final_rms": cfg.normalization_type == "RMS",
        "device": "cpu",
        "init_weights": False,
        "rotary_dim": cfg.rotary_dim if is_rotary else None,
        "use_attn_result": True,
        "use_local_attn": cfg.attn_types is not None,
        "use_qk_norm": cfg.qk_norm == "head",
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "HookedTransformer is deprecated", DeprecationWarning)
        theirs = TransformerLensModel(HookedTransformerConfig(**settings))
    parameters = dict(model.named_parameters())
    assert dict(theirs.named_parameters()).keys() == parameters.keys()
    theirs.load_state_dict(parameters, strict=False)
    for layer, block in enumerate(theirs.blocks if is_rotary else ()):
        frequencies, scale = model.rotary[cfg.layer_type(layer)]
        angles = (torch.arange(cfg.n_ctx)[:, None] * frequencies).repeat(1, 2)
        block.attn.rotary_cos, block.attn.rotary_sin = angles.cos() * scale, angles.sin() * scale
    return theirs.eval()
