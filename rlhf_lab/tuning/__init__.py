"""Fine-tuning without a reward in the loop: supervised fine-tuning (SFT) and DPO."""

from rlhf_lab.fitting import DPOLoss, Fitting, OwnTexts
from rlhf_lab.tuning.dpo import DPOFit, text_logprobs, tune_on_pairs
from rlhf_lab.tuning.drift import Drift, DriftMeter
from rlhf_lab.tuning.examples import Examples, encode_examples, example_logprobs, load_examples
from rlhf_lab.tuning.sft import SFTFit, fine_tune, held_out_loss

__all__ = [
    "DPOFit",
    "DPOLoss",
    "Drift",
    "DriftMeter",
    "Examples",
    "Fitting",
    "OwnTexts",
    "SFTFit",
    "encode_examples",
    "example_logprobs",
    "fine_tune",
    "held_out_loss",
    "load_examples",
    "text_logprobs",
    "tune_on_pairs",
]
