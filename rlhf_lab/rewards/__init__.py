"""Rewards: functions from a list of texts to one number each, and reward models to train."""

from rlhf_lab.rewards.conversation import ConversationReward, ResponseReward
from rlhf_lab.rewards.critic import add_critic_from_reward_model, load_policy_and_critic
from rlhf_lab.rewards.json_schema import JsonSchemaReward
from rlhf_lab.rewards.load import load_reward, resolve_custom_reward
from rlhf_lab.rewards.logit import LogitReward
from rlhf_lab.rewards.model import LearnedReward, RewardModel
from rlhf_lab.rewards.pairs import Pairs, load_pairs, read_pairs, reel_pairs
from rlhf_lab.rewards.pipeline import RewardPipeline
from rlhf_lab.rewards.preference_fit import PreferenceFit, train_reward_model
from rlhf_lab.rewards.rules import CountReward, Diversity, ExactMatch, RegexReward, zero
from rlhf_lab.rewards.scoring import (
    RewardFn,
    RewardOutput,
    Scores,
    TextBatch,
    WeightedRewards,
    requires_answers,
    score_batch,
    score_texts,
    split_rewards,
)
from rlhf_lab.rewards.sentiment import SentimentReward, sentiment_reward
from rlhf_lab.rewards.tokens import ScoreGains, TokenReward

__all__ = [
    "ConversationReward",
    "CountReward",
    "Diversity",
    "ExactMatch",
    "JsonSchemaReward",
    "LearnedReward",
    "LogitReward",
    "Pairs",
    "PreferenceFit",
    "RegexReward",
    "ResponseReward",
    "RewardFn",
    "RewardModel",
    "RewardOutput",
    "RewardPipeline",
    "ScoreGains",
    "Scores",
    "SentimentReward",
    "TextBatch",
    "TokenReward",
    "WeightedRewards",
    "add_critic_from_reward_model",
    "load_pairs",
    "load_policy_and_critic",
    "load_reward",
    "read_pairs",
    "reel_pairs",
    "requires_answers",
    "resolve_custom_reward",
    "score_batch",
    "score_texts",
    "sentiment_reward",
    "split_rewards",
    "train_reward_model",
    "zero",
]
