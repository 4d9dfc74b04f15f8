"""TransformerLens internals: the only room of the package that imports the library and knows them.

Elsewhere only `HookedTransformer`, `HookPoint` and their documented methods appear. Names of
weights and hook points are HookedTransformer's, here and in every file that is written.
"""

from transformer_lens import ActivationCache, HookedTransformer
from transformer_lens.hook_points import HookPoint

from rlhf_lab.models.transformer_lens.convert import (
    FAMILIES,
    family_of,
    from_hugging_face,
    places_of,
    to_hugging_face_weights,
)
from rlhf_lab.models.transformer_lens.families import Place
from rlhf_lab.models.transformer_lens.kinds import (
    blocks_of,
    is_centered,
    is_gated,
    key_value_weights,
    odd_part,
    why_not_additive,
)
from rlhf_lab.models.transformer_lens.kv_cache import (
    KVCache,
    empty_cache,
    join_caches,
    pick_rows,
    share_mask,
    split_cache,
)
from rlhf_lab.models.transformer_lens.library import (
    HOOK_STATE,
    final_logits,
    final_residual,
    has_own_forward,
    hook_level,
    make_model,
)
from rlhf_lab.models.transformer_lens.rotary import make_room_for, rotate

__all__ = [
    "ActivationCache",
    "FAMILIES",
    "HOOK_STATE",
    "HookPoint",
    "HookedTransformer",
    "KVCache",
    "Place",
    "blocks_of",
    "empty_cache",
    "family_of",
    "final_logits",
    "final_residual",
    "from_hugging_face",
    "has_own_forward",
    "hook_level",
    "is_centered",
    "is_gated",
    "join_caches",
    "key_value_weights",
    "make_model",
    "make_room_for",
    "odd_part",
    "pick_rows",
    "places_of",
    "rotate",
    "share_mask",
    "split_cache",
    "to_hugging_face_weights",
    "why_not_additive",
]
