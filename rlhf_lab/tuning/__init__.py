"""Training on data, without a reward in the loop: SFT, reward models, DPO, IPO, KTO and ORPO."""

from rlhf_lab.fitting import DPOLoss, DriftEvalConfig, FitConfig, KTOLoss, ORPOLoss, RewardLoss
from rlhf_lab.tuning.examples import (
    Examples,
    encode_examples,
    example_logprobs,
    load_examples,
    read_conversations,
    render_examples,
    text_logprobs,
)
from rlhf_lab.tuning.fit import fine_tune, train_on_labels, train_on_pairs, train_reward_model
from rlhf_lab.tuning.labels import LabeledExamples, load_labeled_examples, split_pairs
from rlhf_lab.tuning.results import FitResult
