"""TransformerLens internals: the only room of the package that imports the library and knows them.

Elsewhere only `HookedTransformer`, `HookPoint` and their documented methods appear. Names of
weights and hook points are HookedTransformer's, here and in every file that is written.
"""

from transformer_lens import ActivationCache, HookedTransformer
from transformer_lens.hook_points import HookPoint

from rlhf_lab.models.transformer_lens.convert import from_hugging_face, is_bias
from rlhf_lab.models.transformer_lens.kinds import (
    blocks_of,
    is_centered,
    is_gated,
    key_value_weights,
    make_room_for,
    odd_part,
)
from rlhf_lab.models.transformer_lens.kv_cache import (
    KVCache,
    empty_cache,
    join_caches,
    pick_rows,
    split_cache,
)
from rlhf_lab.models.transformer_lens.library import (
    final_logits,
    final_residual,
    has_own_forward,
    make_model,
)

__all__ = [
    "ActivationCache",
    "HookPoint",
    "HookedTransformer",
    "KVCache",
    "blocks_of",
    "empty_cache",
    "final_residual",
    "from_hugging_face",
    "odd_part",
    "is_bias",
    "is_centered",
    "is_gated",
    "join_caches",
    "key_value_weights",
    "final_logits",
    "has_own_forward",
    "make_model",
    "make_room_for",
    "pick_rows",
    "split_cache",
]
