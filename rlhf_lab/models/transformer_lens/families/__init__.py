"""Families of architectures that are loaded and exported, one table for each."""

from rlhf_lab.models.transformer_lens.families.gemma import GEMMA2, GEMMA3
from rlhf_lab.models.transformer_lens.families.gpt2 import GPT2
from rlhf_lab.models.transformer_lens.families.llama import LLAMA, MISTRAL, PHI3, QWEN2, QWEN3
from rlhf_lab.models.transformer_lens.families.neox import NEOX
from rlhf_lab.models.transformer_lens.families.olmo2 import OLMO2
from rlhf_lab.models.transformer_lens.families.table import Family, Place

__all__ = [
    "Family",
    "GEMMA2",
    "GEMMA3",
    "GPT2",
    "LLAMA",
    "MISTRAL",
    "NEOX",
    "OLMO2",
    "PHI3",
    "Place",
    "QWEN2",
    "QWEN3",
]
