"""Rewards: functions from a list of texts to one number each, and reward models to train."""

from rlhf_lab.rewards.conversation import ConversationReward
from rlhf_lab.rewards.critic import add_critic_from_reward_model, load_policy_and_critic
from rlhf_lab.rewards.diversity import Diversity
from rlhf_lab.rewards.json_schema import JsonSchemaReward
from rlhf_lab.rewards.load import load_reward, resolve_custom_reward
from rlhf_lab.rewards.logit import LogitReward
from rlhf_lab.rewards.model import LearnedReward, RewardModel
from rlhf_lab.rewards.pairs import Pairs, load_pairs, read_pairs, reel_pairs
from rlhf_lab.rewards.pipeline import RewardPipeline, Scores
from rlhf_lab.rewards.preference_fit import PreferenceFit, train_reward_model
from rlhf_lab.rewards.responses import ResponseReward
from rlhf_lab.rewards.rules import CountReward, zero
from rlhf_lab.rewards.scoring import RewardFn, RewardOutput, TextBatch, score_batch, score_texts
from rlhf_lab.rewards.sentiment import SentimentReward, sentiment_reward
from rlhf_lab.rewards.tokens import ScoreGains, TokenReward
from rlhf_lab.rewards.verifiable import ExactMatch, RegexReward
from rlhf_lab.rewards.weighted import WeightedRewards, requires_answers, split_rewards

__all__ = [
    "CountReward",
    "Diversity",
    "ExactMatch",
    "JsonSchemaReward",
    "LearnedReward",
    "LogitReward",
    "RewardOutput",
    "Pairs",
    "PreferenceFit",
    "RegexReward",
    "ResponseReward",
    "RewardFn",
    "RewardModel",
    "RewardPipeline",
    "ScoreGains",
    "Scores",
    "SentimentReward",
    "TokenReward",
    "ConversationReward",
    "WeightedRewards",
    "TextBatch",
    "requires_answers",
    "load_pairs",
    "load_policy_and_critic",
    "load_reward",
    "resolve_custom_reward",
    "read_pairs",
    "score_batch",
    "reel_pairs",
    "split_rewards",
    "score_texts",
    "sentiment_reward",
    "train_reward_model",
    "add_critic_from_reward_model",
    "zero",
]
