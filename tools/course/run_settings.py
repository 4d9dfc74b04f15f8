"""The settings that the stored runs of several lessons share."""

from types import MappingProxyType
from typing import Any

RUN_SETTINGS: MappingProxyType[str, Any] = MappingProxyType(
    {
        "preset": "reel",
        "warmup_steps": 2,
        "batch_size": 128,
        "num_minibatches": 4,
        "gen_len": 26,
        "top_k": None,
        "advantages": "gae",
    }
)
