"""What is done to rewards, in what order, between the reward function and the advantages."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.config import RLHFArgs
from rlhf_lab.sampling import Samples


def penalized(
    rewards: Float[Tensor, " batch"], samples: Samples, stops: Sequence[int], args: RLHFArgs
) -> Float[Tensor, " batch"]:
    """Rewards in the reward function's own unit, less what the responses' lengths cost.

    1. Put `args.reward_penalty` in place of the reward of responses that are too short, or did not
       end by themselves, if so asked.
    2. Take up to 1 off responses that go into the last `args.overlong_buffer` tokens.
    """
    mask = samples.mask
    if args.penalize_no_eos or args.min_response_length:
        finished = None
        if args.penalize_no_eos:
            finished = F.has_stop(samples.tokens[:, samples.prefix_len :], stops, mask)
        flawed = F.flawed_responses(mask, finished, args.min_response_length)
        rewards = F.penalize_responses(rewards, flawed, args.reward_penalty)
    if args.overlong_buffer:
        rewards = rewards + F.overlong_penalty(mask, args.gen_len, args.overlong_buffer)
    return rewards


def rescaled(
    rewards: Float[Tensor, " batch"], moments: F.RunningMoments | None, args: RLHFArgs
) -> Float[Tensor, " batch"]:
    """Rewards on the scale of all that were seen so far, and clipped, as far as so asked.

    Args:
        moments: of all rewards so far, these included; None where nothing is scaled.
    """
    if args.reward_scaling != "off":
        rewards = F.scale_rewards(rewards, moments, args.reward_scaling == "scale_and_shift")
    if args.reward_clip is not None:
        rewards = F.clip_rewards(rewards, args.reward_clip)
    return rewards
