"""Probes: metrics and tensors recorded during training, with checks, and how to read them back."""

from rlhf_lab.identity import Check
from rlhf_lab.organism.sums import SumsTruth
from rlhf_lab.probes.attachment import Attachment
from rlhf_lab.probes.attention_drift import AttentionDrift
from rlhf_lab.probes.defaults import attach_default_suite, default_suite, had_default_suite
from rlhf_lab.probes.direction import control_labels
from rlhf_lab.probes.direction_probe import Direction
from rlhf_lab.probes.eval_text import EvalText
from rlhf_lab.probes.false_steps import (
    FalseStepAnswers,
    answers_after_false_step,
    write_false_step,
)
from rlhf_lab.probes.frozen_probe import FrozenProbe
from rlhf_lab.probes.hack_watch import HackWatch
from rlhf_lab.probes.kl_by_position import KLByPosition
from rlhf_lab.probes.logit_shift import LogitShift, attribute_logits
from rlhf_lab.probes.moved_words import find_moved_words, parts_over_phases, shift_parts
from rlhf_lab.probes.neuron_rank import NeuronRank
from rlhf_lab.probes.probe import Observation, Probe, Record
from rlhf_lab.probes.reel_truth import ReelTruth
from rlhf_lab.probes.run import Run
from rlhf_lab.probes.run_health import RunHealth
from rlhf_lab.probes.seeds import runs
from rlhf_lab.probes.spread import Runs, Spread
from rlhf_lab.probes.step_influence_probe import StepInfluence
from rlhf_lab.probes.step_ledger import StepLedger
from rlhf_lab.probes.suite import Suite, attach
from rlhf_lab.probes.text_heatmap import TextHeatmap
from rlhf_lab.probes.value_lens import value_lens
from rlhf_lab.probes.value_lens_probe import ValueLens
from rlhf_lab.probes.weight_delta import WeightDelta
from rlhf_lab.probes.words_moved import WordsMoved
