"""Rotary embeddings and sliding windows of a transformers configuration, as a hooked model's."""

from typing import Any

from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rlhf_lab.errors import LoadError
from rlhf_lab.models.transformer_lens.families.table import refuse

LOCAL, GLOBAL = "sliding_attention", "full_attention"


def head_size(config: PreTrainedConfig) -> int:
    """The size of an attention head, which need not be d_model / heads."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def windows(config: PreTrainedConfig) -> dict[str, Any]:
    """Which layers see how many tokens; nothing where none sees fewer than all.

    Raises:
        LoadError: a layer is of another type, or has a window without a size.
    """
    size = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        types = [GLOBAL if size is None else LOCAL] * config.num_hidden_layers
    if set(types) - {LOCAL, GLOBAL} or len(types) != config.num_hidden_layers:
        refuse(config, "layer_types", f"{LOCAL} or {GLOBAL} for each layer")
    if LOCAL not in types:
        return {}
    if not isinstance(size, int) or size < 1:
        refuse(config, "sliding_window", f"a number of tokens, as its {LOCAL} needs")
    if size >= config.max_position_embeddings and not _by_layer(config):
        return {}
    attn_types = ["local" if kind == LOCAL else "global" for kind in types]
    return {"use_local_attn": True, "window_size": size, "attn_types": attn_types}


def _by_layer(config: PreTrainedConfig) -> bool:
    """Whether layers of each type have rotary embeddings of their own."""
    return GLOBAL in (config.rope_parameters or {}) or LOCAL in (config.rope_parameters or {})


def rotary(config: PreTrainedConfig, partial: bool = False) -> dict[str, Any]:
    """The rotary embeddings, with the windows that they may depend on, and the context.

    Args:
        partial: whether the architecture can leave a share of each head unturned.

    Raises:
        LoadError: their scaling is not converted.
    """
    local = windows(config)
    d_head = head_size(config)
    given = config.rope_parameters
    by_layer = _by_layer(config)
    found = {"positional_embedding_type": "rotary", "n_ctx": config.max_position_embeddings}
    if by_layer:
        sliding = given.get(LOCAL) or {}
        if sliding.get("rope_type", "default") != "default":
            refuse(config, "rope_parameters", f"rope_type='default' in its {LOCAL}")
        found["rotary_base_local"] = sliding.get("rope_theta")
        given = given[GLOBAL]
    share = given.get("partial_rotary_factor") or 1.0
    if share != 1 and not partial:
        refuse(config, "rope_parameters", "partial_rotary_factor=1.0")
    size = int(d_head * share)
    if size % 2 or size < 2:
        raise LoadError(
            f"rope_parameters turn {size} numbers of each head of {d_head}, which is not even; "
            "choose a model with another partial_rotary_factor or head_dim."
        )
    found |= {"rotary_dim": size, "rotary_base": given["rope_theta"]}
    return local | found | _scaling(config, given, bool(local), by_layer)


def _scaling(
    config: PreTrainedConfig, given: dict[str, Any], has_windows: bool, by_layer: bool
) -> dict[str, Any]:
    """The scaling of the rotary embeddings.

    The linear one is not of layers with a window in a hooked model; Llama 3's is of all layers; a
    dynamic one changes nothing before the context's end, which a hooked model does not pass.
    """
    kind = given.get("rope_type", "default")
    if kind in ("default", "dynamic"):
        return {}
    if kind == "linear" and (by_layer or not has_windows):
        return {"rotary_scaling_factor": float(given["factor"])}
    if kind == "llama3" and not by_layer:
        return {
            "use_NTK_by_parts_rope": True,
            "NTK_by_parts_factor": given["factor"],
            "NTK_by_parts_low_freq_factor": given["low_freq_factor"],
            "NTK_by_parts_high_freq_factor": given["high_freq_factor"],
            "NTK_original_ctx_len": given["original_max_position_embeddings"],
        }
    if kind == "yarn":
        return _yarn(config, given, by_layer)
    if kind == "longrope" and not by_layer:
        return _longrope(config, given)
    what = " beside a sliding window" if has_windows else ""
    refuse(config, "rope_parameters", f"another rope_type than {kind!r}{what}, such as 'default'")
    return {}


def _yarn(config: PreTrainedConfig, given: dict[str, Any], by_layer: bool) -> dict[str, Any]:
    """YaRN (Peng et al. 2023)."""
    return {
        "use_yarn_rope": True,
        "yarn_factor": float(given["factor"]),
        "yarn_attention_factor": _attention_factor(config, given["rope_type"], by_layer),
        "yarn_beta_fast": float(given.get("beta_fast") or 32),
        "yarn_beta_slow": float(given.get("beta_slow") or 1),
        "yarn_truncate": config.rope_parameters.get("truncate", True),
        "yarn_original_max_position_embeddings": given["original_max_position_embeddings"],
        "yarn_global_attn_only": by_layer,
    }


def _longrope(config: PreTrainedConfig, given: dict[str, Any]) -> dict[str, Any]:
    """LongRoPE (Ding et al. 2024) as far as its short factors go, where all of them are 1.

    There it multiplies queries and keys by a number, which is YaRN by a factor of 1. Longer texts
    are turned otherwise from their first token on; the context ends before them.
    """
    if set(given["short_factor"]) != {1}:
        refuse(config, "rope_parameters", "another rope_type than 'longrope', or short_factor 1")
    short = given["original_max_position_embeddings"]
    return {
        "use_yarn_rope": True,
        "yarn_attention_factor": _attention_factor(config, "longrope", by_layer=False),
        "yarn_original_max_position_embeddings": short,
        "n_ctx": min(short, config.max_position_embeddings),
    }


def _attention_factor(config: PreTrainedConfig, kind: str, by_layer: bool) -> float:
    """What cosines and sines are multiplied with, as transformers works it out."""
    layer_type = {"layer_type": GLOBAL} if by_layer else {}
    return float(ROPE_INIT_FUNCTIONS[kind](config, None, **layer_type)[1])
