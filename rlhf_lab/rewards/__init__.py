"""Rewards: functions from a list of texts to one number each, and reward models to train."""

from rlhf_lab.rewards.critic import load_policy_and_critic, with_critic_from
from rlhf_lab.rewards.diversity import Diversity
from rlhf_lab.rewards.json_schema import JsonSchemaReward
from rlhf_lab.rewards.load import load_reward, own_reward
from rlhf_lab.rewards.logit import LogitReward
from rlhf_lab.rewards.model import LearnedReward, RewardModel
from rlhf_lab.rewards.pairs import Pairs, load_pairs, read_pairs, reel_pairs
from rlhf_lab.rewards.pipeline import RewardPipeline, Scores
from rlhf_lab.rewards.preference_fit import PreferenceFit, train_reward_model
from rlhf_lab.rewards.reading import Paid, RewardFn, Written, read_reward, score_texts
from rlhf_lab.rewards.responses import ResponseReward
from rlhf_lab.rewards.rules import CountReward, zero
from rlhf_lab.rewards.sentiment import SentimentReward, sentiment_reward
from rlhf_lab.rewards.tokens import ScoreGains, TokenReward
from rlhf_lab.rewards.turns import TurnReward
from rlhf_lab.rewards.verifiable import ExactMatch, RegexReward
from rlhf_lab.rewards.weighted import WeightedRewards, asks_for_answers, rewards_in

__all__ = [
    "CountReward",
    "Diversity",
    "ExactMatch",
    "JsonSchemaReward",
    "LearnedReward",
    "LogitReward",
    "Paid",
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
    "TurnReward",
    "WeightedRewards",
    "Written",
    "asks_for_answers",
    "load_pairs",
    "load_policy_and_critic",
    "load_reward",
    "own_reward",
    "read_pairs",
    "read_reward",
    "reel_pairs",
    "rewards_in",
    "score_texts",
    "sentiment_reward",
    "train_reward_model",
    "with_critic_from",
    "zero",
]
