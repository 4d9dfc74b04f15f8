"""Training: rollouts, minibatches, the objective, the optimizer, the trainer and its files."""

from rlhf_lab.training.callbacks import Context, Event
from rlhf_lab.training.kl_control import AdaptiveKLController, FixedKLController
from rlhf_lab.training.objective import Objective
from rlhf_lab.training.optim import get_optimizer, get_optimizer_and_scheduler, lr_scale
from rlhf_lab.training.overrides import Overrides
from rlhf_lab.training.ppo import ObjectiveTerms, objective_terms
from rlhf_lab.training.report import Cost, LearningStats, PhaseReport, RolloutStats
from rlhf_lab.training.rollout import ReplayMemory, ReplayMinibatch, Rollout
from rlhf_lab.training.run_dir import RunDir
from rlhf_lab.training.trainer import RLHFTrainer
