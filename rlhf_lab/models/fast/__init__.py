"""The fast path: packed forward, chunked read-out, CPU tuning; no result depends on it.

`models/outputs.py` decides where they run in place of the hooked modules.
"""

from rlhf_lab.models.fast.blocks import PackedBlock, pack, packed_residuals, run_block
from rlhf_lab.models.fast.cpu_tuning import Tuning, tune_cpu, tune_for
from rlhf_lab.models.fast.decoder import PackedDecoder
from rlhf_lab.models.fast.known import PASSED, why_not_passed, why_unknown
from rlhf_lab.models.fast.outputs import (
    packed_comparison,
    packed_outputs,
    packed_reference_logprobs,
    packed_token_stats,
)
from rlhf_lab.models.fast.readout import final_norm, read_state, read_token_stats, unembed
from rlhf_lab.models.fast.token_scan import Readout
from rlhf_lab.models.fast.token_stats import TokenStats, token_stats_chunked

__all__ = [
    "PASSED",
    "PackedBlock",
    "PackedDecoder",
    "Readout",
    "TokenStats",
    "Tuning",
    "final_norm",
    "pack",
    "packed_comparison",
    "packed_outputs",
    "packed_reference_logprobs",
    "packed_residuals",
    "packed_token_stats",
    "read_state",
    "read_token_stats",
    "run_block",
    "token_stats_chunked",
    "tune_cpu",
    "tune_for",
    "unembed",
    "why_not_passed",
    "why_unknown",
]
