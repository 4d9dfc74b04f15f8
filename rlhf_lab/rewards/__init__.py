"""Rewards: functions from a list of texts to one number each, and reward models to train."""

from rlhf_lab.rewards.critic import load_policy_and_critic, with_critic_from
from rlhf_lab.rewards.load import RewardFn, load_reward, score_texts
from rlhf_lab.rewards.model import LearnedReward, RewardModel
from rlhf_lab.rewards.pairs import Pairs, load_pairs, read_pairs, reel_pairs
from rlhf_lab.rewards.pipeline import RewardPipeline, Scores
from rlhf_lab.rewards.preference_fit import PreferenceFit, train_reward_model
from rlhf_lab.rewards.rules import CountReward, zero
from rlhf_lab.rewards.sentiment import SentimentReward
from rlhf_lab.rewards.tokens import ScoreGains, TokenReward

__all__ = [
    "CountReward",
    "LearnedReward",
    "Pairs",
    "PreferenceFit",
    "RewardFn",
    "RewardModel",
    "RewardPipeline",
    "ScoreGains",
    "Scores",
    "SentimentReward",
    "TokenReward",
    "load_pairs",
    "load_policy_and_critic",
    "load_reward",
    "read_pairs",
    "reel_pairs",
    "score_texts",
    "train_reward_model",
    "with_critic_from",
    "zero",
]
