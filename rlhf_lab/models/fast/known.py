"""The allow-list of the packed form: models it is right for, and hook points it passes."""

from collections.abc import Callable
from functools import partial
from operator import is_
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F

from rlhf_lab.models.hooks import hooked_parts
from rlhf_lab.models.transformer_lens import HookedTransformer, odd_part

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
PLAIN_ARCHITECTURES = (
    "GPT2LMHeadModel",
    "GPTNeoXForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
)
"""Those of which the other fields say everything; the package's loader writes all of them."""
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


def _any(value: Any) -> bool:
    return True


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number_or_none(value: Any) -> bool:
    return value is None or _number(value)


def _off(value: Any) -> bool:
    """A soft cap that caps nothing."""
    return value is None or (_number(value) and value <= 0)


def _one_of(*known: Any) -> Callable[[Any], bool]:
    """One of these values and of its type: True is not 1."""
    return lambda value: any(type(value) is type(each) and value == each for each in known)


_flag, _no, _none = _one_of(True, False), _one_of(False), _one_of(None)
KNOWN_VALUES: MappingProxyType[str, Callable[[Any], bool]] = MappingProxyType(
    {
        # names, and how the weights came about
        **dict.fromkeys(("model_name", "tokenizer_name", "from_checkpoint", "init_mode"), _any),
        **dict.fromkeys(("checkpoint_index", "checkpoint_label_type", "checkpoint_value"), _any),
        **dict.fromkeys(("seed", "initializer_range", "init_weights", "n_params"), _any),
        **dict.fromkeys(("default_prepend_bos", "tokenizer_prepends_bos"), _any),
        **dict.fromkeys(("trust_remote_code", "device"), _any),
        "original_architecture": _one_of(None, *PLAIN_ARCHITECTURES),
        # sizes
        **dict.fromkeys(("d_model", "d_head", "n_layers", "n_ctx", "n_heads"), _number),
        **dict.fromkeys(("d_mlp", "d_vocab", "d_vocab_out"), _number),
        "n_key_value_heads": _number_or_none,
        "n_devices": _one_of(1),
        "dtype": _one_of(torch.float32, torch.float64, torch.bfloat16, torch.float16),
        # what the packed form reads where it lies: scales, rotary tables, the modules themselves
        **dict.fromkeys(("eps", "attn_scale", "rotary_base", "rotary_scaling_factor"), _number),
        **dict.fromkeys(("rotary_dim", "rotary_base_local"), _number_or_none),
        **dict.fromkeys(("use_attn_scale", "scale_attn_by_inverse_layer_idx"), _flag),
        **dict.fromkeys(("rotary_adjacent_pairs", "gated_mlp", "final_rms"), _flag),
        **dict.fromkeys(("use_NTK_by_parts_rope", "use_yarn_rope"), _flag),
        **dict.fromkeys(("yarn_truncate", "yarn_global_attn_only"), _flag),
        **dict.fromkeys(("NTK_by_parts_low_freq_factor", "NTK_by_parts_high_freq_factor"), _number),
        **dict.fromkeys(("NTK_by_parts_factor", "NTK_original_ctx_len", "yarn_factor"), _number),
        **dict.fromkeys(("yarn_attention_factor", "yarn_beta_fast", "yarn_beta_slow"), _number),
        "yarn_original_max_position_embeddings": _number,
        # hook points that are there or not; the same numbers in larger or smaller pieces
        **dict.fromkeys(("use_attn_result", "use_hook_mlp_in"), _flag),
        "ungroup_grouped_query_attention": _flag,
        # the equations of a block
        "normalization_type": _one_of("LN", "LNPre", "RMS", "RMSPre"),
        "positional_embedding_type": _one_of("standard", "rotary"),
        "attention_dir": _one_of("causal"),
        "act_fn": _one_of(*ACTIVATIONS),
        **dict.fromkeys(("attn_scores_soft_cap", "output_logits_soft_cap"), _off),
        **dict.fromkeys(("attn_only", "parallel_attn_mlp", "use_qk_norm", "use_local_attn"), _no),
        **dict.fromkeys(("use_normalization_before_and_after", "post_embedding_ln"), _no),
        **dict.fromkeys(("use_split_qkv_input", "use_attn_in", "use_hook_tokens"), _no),
        **dict.fromkeys(("use_attention_sinks", "use_logn_attn", "use_dynamic_ntk_rope"), _no),
        **dict.fromkeys(("load_in_4bit", "norm_topk_prob", "tie_word_embeddings"), _no),
        **dict.fromkeys(("uses_rms_norm", "layer_norm_folding"), _no),
        **dict.fromkeys(("clip_qkv", "window_size", "attn_types", "train_seq_length"), _none),
        **dict.fromkeys(("num_experts", "experts_per_token", "quantization_method"), _none),
        **dict.fromkeys(
            ("relative_attention_max_distance", "relative_attention_num_buckets"), _none
        ),
        "decoder_start_token_id": _none,
    }
)
"""For each field of a model's configuration, the values for which the packed form is right.

Each was held against the hooked modules, in values and gradients. A field that is not here, or
another value, sends the model to the modules.
"""
_KNOWN: WeakKeyDictionary[HookedTransformer, dict[str, Any]] = WeakKeyDictionary()
"""The configurations that were found to be known, as they were then."""


def why_unknown(model: HookedTransformer) -> str | None:
    """What of a model the packed form does not know, in words; None if it knows all of it."""
    settings, known = vars(model.cfg), _KNOWN.get(model, {})
    # numbers, names and flags do not change in place: the same objects are the same settings
    if settings.keys() != known.keys() or not all(map(is_, settings.values(), known.values())):
        for field, value in settings.items():
            if field not in KNOWN_VALUES or not KNOWN_VALUES[field](value):
                return f"the packed form does not know cfg.{field}={value!r}"
        _KNOWN[model] = dict(settings)
    odd = odd_part(model)
    return None if odd is None else f"the packed form does not know this model: {odd}"


def why_not_passed(model: HookedTransformer) -> str | None:
    """Which hook the packed form does not pass, in words; None if it passes all there are.

    It passes the embedding and, in every block, what `PASSED` lists.
    """
    hooked = list(hooked_parts(model))
    if not hooked:
        return None
    passed = {model.hook_embed}
    passed.update(block.get_submodule(name) for block in model.blocks for name in PASSED)
    odd = next((part for part in hooked if part not in passed), None)
    if odd is None:
        return None
    name = next(name for name, module in model.named_modules() if module is odd)
    return f"a hook is on {name or 'the model'}, which the packed form does not pass"
