"""Rewards: functions from a list of texts to one number each."""

from rlhf_lab.rewards.load import RewardFn, load_reward, score_texts
from rlhf_lab.rewards.rules import CountReward, zero
from rlhf_lab.rewards.sentiment import SentimentReward

__all__ = ["CountReward", "RewardFn", "SentimentReward", "load_reward", "score_texts", "zero"]
