"""Rewards: functions from a list of texts to one number each, and reward models to train."""

from rlhf_lab.rewards.classifiers import LogitReward, SentimentReward, sentiment_reward
from rlhf_lab.rewards.conversation import ConversationReward, ResponseReward, TextBatch
from rlhf_lab.rewards.load import load_reward, resolve_custom_reward
from rlhf_lab.rewards.model import (
    LearnedReward,
    RewardModel,
    add_critic_from_reward_model,
    load_policy_and_critic,
)
from rlhf_lab.rewards.pairs import Pairs, load_pairs, reel_pairs
from rlhf_lab.rewards.pipeline import RewardPipeline
from rlhf_lab.rewards.rules import CountReward, Diversity, ExactMatch, JsonSchemaReward, RegexReward
from rlhf_lab.rewards.scoring import (
    RewardFn,
    WeightedRewards,
    requires_answers,
    score_batch,
    score_texts,
    split_rewards,
)
from rlhf_lab.rewards.tokens import ScoreGains, TokenReward
