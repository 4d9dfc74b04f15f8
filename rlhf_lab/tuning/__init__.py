"""Fine-tuning without a reward in the loop: supervised (SFT), DPO, KTO and ORPO."""

from rlhf_lab.fitting import DPOLoss, Fitting, KTOLoss, ORPOLoss, OwnTexts
from rlhf_lab.tuning.conversations import read_conversations, render_examples
from rlhf_lab.tuning.drift import Drift, DriftMeter
from rlhf_lab.tuning.examples import (
    Examples,
    encode_examples,
    example_logprobs,
    load_examples,
    text_logprobs,
)
from rlhf_lab.tuning.judged import Judged, load_judged, split_pairs
from rlhf_lab.tuning.on_judged import KTOFit, tune_on_judged
from rlhf_lab.tuning.on_pairs import PolicyFit, tune_on_pairs
from rlhf_lab.tuning.sft import SFTFit, fine_tune, held_out_loss

__all__ = [
    "DPOLoss",
    "Drift",
    "DriftMeter",
    "Examples",
    "Fitting",
    "Judged",
    "KTOFit",
    "KTOLoss",
    "ORPOLoss",
    "OwnTexts",
    "PolicyFit",
    "SFTFit",
    "encode_examples",
    "example_logprobs",
    "fine_tune",
    "held_out_loss",
    "load_examples",
    "load_judged",
    "read_conversations",
    "render_examples",
    "split_pairs",
    "text_logprobs",
    "tune_on_judged",
    "tune_on_pairs",
]
