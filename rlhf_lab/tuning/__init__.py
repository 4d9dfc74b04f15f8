"""Fine-tuning without a reward in the loop: supervised (SFT), DPO, IPO, KTO and ORPO."""

from rlhf_lab.fitting import DPOLoss, DriftEvalConfig, FitConfig, KTOLoss, ORPOLoss
from rlhf_lab.tuning.conversations import read_conversations, render_examples
from rlhf_lab.tuning.examples import (
    Examples,
    encode_examples,
    example_logprobs,
    load_examples,
    text_logprobs,
)
from rlhf_lab.tuning.fit import fine_tune, held_out_loss, train_on_labels, train_on_pairs
from rlhf_lab.tuning.kl_meter import KLEstimate, KLMeter
from rlhf_lab.tuning.labels import LabeledExamples, load_labeled_examples, split_pairs
from rlhf_lab.tuning.results import KTOFitResult, PolicyFitResult, SFTFitResult

__all__ = [
    "DPOLoss",
    "Examples",
    "FitConfig",
    "KLEstimate",
    "KLMeter",
    "KTOFitResult",
    "KTOLoss",
    "LabeledExamples",
    "ORPOLoss",
    "DriftEvalConfig",
    "PolicyFitResult",
    "SFTFitResult",
    "encode_examples",
    "example_logprobs",
    "fine_tune",
    "held_out_loss",
    "load_examples",
    "load_labeled_examples",
    "read_conversations",
    "render_examples",
    "split_pairs",
    "text_logprobs",
    "train_on_labels",
    "train_on_pairs",
]
