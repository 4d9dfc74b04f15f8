"""The fast path: packed forward, chunked read-out, CPU tuning; no result depends on it.

`models/outputs.py` decides where they run in place of the hooked modules.
"""

from rlhf_lab.models.fast.blocks import packed_residuals, run_block
from rlhf_lab.models.fast.cpu_tuning import tune_for
from rlhf_lab.models.fast.decoder import PackedDecoder
from rlhf_lab.models.fast.known import PASSED, why_unknown
from rlhf_lab.models.fast.token_scan import Readout
from rlhf_lab.models.fast.token_stats import token_stats_chunked

__all__ = [
    "PASSED",
    "PackedDecoder",
    "Readout",
    "packed_residuals",
    "run_block",
    "token_stats_chunked",
    "tune_for",
    "why_unknown",
]
