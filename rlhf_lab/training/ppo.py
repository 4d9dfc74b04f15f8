"""PPO on a language model, whole: a phase is `rollout_phase`, then `learning_phase`.

    y ~ pi_old(. | x)                                  sample           rollout_phase
    r = R(x, y)                                        score            score_samples
    A, G from r and V_old                              assign credit    assign_credit
    for each pass over the batch, for each minibatch:                   learning_phase
        step up the gradient of                                         objective_terms
            E[min(ratio A, clip(ratio, 1 - eps, 1 + eps) A)]            clipped surrogate
            - vf_coef / 2 E[(V - G)^2]                                  value loss
            + ent_coef E[H(pi)]                                         entropy bonus
            - kl_coef E[KL(pi || pi_ref)]                               KL penalty

Schulman et al. 2017 (PPO), algorithm 1 and equation 9; the KL penalty: Ziegler et al. 2019.
Elsewhere: shaped rewards (`rewards/pipeline.py`), other objectives and KL estimates
(`objective.py`), outputs of the model (`models/outputs.py`), micro-batches (`optimization.py`).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.samples import Samples
from rlhf_lab.training.objective import Objective
from rlhf_lab.training.optimization import PolicyUpdate
from rlhf_lab.training.overrides import validate_terms
from rlhf_lab.training.phase_stats import PhaseStats
from rlhf_lab.training.random_streams import phase_generator
from rlhf_lab.training.report import LearningStats
from rlhf_lab.training.rollout import ReplayMemory, ReplayMinibatch, Rollout

if TYPE_CHECKING:
    from rlhf_lab.training.trainer import RLHFTrainer


def rollout_phase(trainer: "RLHFTrainer") -> Rollout:
    """Sample a batch, score it, and compute everything that learning needs.

    1. Let the policy continue this phase's prompts, with the phase's "sampling" random numbers.
    2. Score the samples (`score_samples`).
    """
    generator = phase_generator(trainer.args.seed, trainer.phase, "sampling")
    samples = trainer.sample(trainer.next_prompts(), generator)
    trainer.emit("after_rollout", samples=samples)
    rollout = score_samples(trainer, samples)
    trainer.emit("after_score", samples=samples, rollout=rollout)
    return rollout


def score_samples(
    trainer: "RLHFTrainer", samples: Samples, raw_rewards: Float[Tensor, " batch"] | None = None
) -> Rollout:
    """Score finished samples, compare them with the reference, and assign credit.

    1. Rewards: the reward function's, or `raw_rewards`, shaped (`trainer.rewards.score`).
    2. Exact KL and entropy of each token (`trainer.compare_with_reference`); reference log-probs,
       if the KL is estimated from them (`trainer.objective.reference_logprobs`).
    3. The KL that is in the rewards, if any (`trainer.objective.kl_in_reward`), and the rewards
       of greedy responses, for ReMax (`trainer.rewards.greedy_rewards`).
    4. Advantages and returns (`assign_credit`).
    """
    scores = trainer.rewards.score(samples, raw_rewards)
    compared = trainer.compare_with_reference(samples)
    ref_logprobs = trainer.objective.reference_logprobs(
        trainer.reference, samples, compared.ref_residuals
    )
    kl_to_pay = trainer.objective.kl_in_reward(samples, compared.kl, ref_logprobs)
    greedy_rewards = trainer.rewards.greedy_rewards(samples, scores.reward_moments)
    advantages, returns = assign_credit(
        trainer, samples, scores.credit_rewards, kl_to_pay, greedy_rewards
    )
    return Rollout(
        samples=samples,
        advantages=advantages,
        returns=returns,
        ref_logprobs=ref_logprobs,
        **compared._asdict(),  # kl, entropy, ref_residuals
        **vars(scores),  # texts, true_rewards and the rewards with all that was done to them
    )


def assign_credit(
    trainer: "RLHFTrainer",
    samples: Samples,
    rewards: Float[Tensor, " batch"] | Float[Tensor, "batch gen"],
    kl_to_pay: Float[Tensor, "batch gen"] | None = None,
    greedy_rewards: Float[Tensor, " batch"] | None = None,
) -> tuple[Float[Tensor, "batch gen"], Float[Tensor, "batch gen"]]:
    """Advantages of each generated token, and the returns that the value head learns.

    1. The last real token gets the reward; each token's KL is subtracted if the rewards have it.
    2. The estimator (GAE by default) computes advantages from rewards and values.
    3. The returns are advantages plus values; without values, the rewards to go.

    Args:
        kl_to_pay: KL to subtract from each token's reward; None if the loss has the KL.
        greedy_rewards: rewards of greedy responses, for ReMax.
    """
    args, overrides, mask = trainer.args, trainer.overrides, samples.mask
    kl_coef = 0.0 if kl_to_pay is None else trainer.kl_controller.kl_coef
    token_rewards = F.token_rewards(rewards, mask, kl_to_pay, kl_coef)
    if args.whiten_rewards:
        token_rewards = F.whiten(token_rewards, mask, shift_mean=False)
    group = F.prompt_groups(len(rewards), args.samples_per_prompt).to(rewards.device)
    advantages = overrides.estimate_advantages(
        args, samples.values, rewards, mask, token_rewards, group, greedy_rewards
    )
    returns = overrides.estimate_returns(args, advantages, samples.values, token_rewards, mask)
    return advantages, returns


def learning_phase(trainer: "RLHFTrainer", rollout: Rollout) -> LearningStats:
    """Improve the policy on a rollout: several passes over it, in shuffled minibatches.

    1. Split the rollout into minibatches, with the phase's "minibatches" random numbers.
    2. On each, take the gradient of the objective, clip its norm to `max_grad_norm`, and step;
       but skip it above `ratio_threshold`, and end the phase beyond `target_kl`.
    3. Step the learning-rate schedule, once per phase.
    """
    args, objective, kl_coef = trainer.args, trainer.objective, trainer.kl_controller.kl_coef
    policy, reference = trainer.policy, trainer.reference
    is_split = args.micro_batch_size is not None or trainer.world is not None
    memory = ReplayMemory(rollout, args.num_minibatches, args.batches_per_learning_phase)
    generator = phase_generator(args.seed, trainer.phase, "minibatches")
    update, stats = PolicyUpdate(trainer), PhaseStats(trainer)
    graph = trainer.step_graph  # on CUDA, replays the objective and its gradient
    compute_terms = objective_terms if graph is None else graph.replayed(objective_terms)
    for step, minibatch in enumerate(memory.get_minibatches(generator)):
        shown = {"rollout": rollout, "minibatch": minibatch, "step": step}
        trainer.emit("before_minibatch", **shown)
        trainer.optimizer.zero_grad()
        if is_split:  # into micro-batches or over processes
            terms = update.accumulate(objective_terms, minibatch, kl_coef)
        else:
            terms = compute_terms(policy, reference, minibatch, objective, kl_coef)
        verdict = stats.judge(terms, minibatch)
        if verdict == "stop":
            break
        if verdict == "skip":
            continue
        trainer.emit("after_loss", terms=terms, **shown)
        update.backward(terms.objective)
        trainer.emit("after_backward", terms=terms, **shown)
        grad_norm = update.clip(args.max_grad_norm)
        update.step()  # upwards: the optimizer maximizes
        stats.add(terms, minibatch, grad_norm)
        trainer.emit("after_step", terms=terms, grad_norm=grad_norm, **shown)
    learned = stats.learning_stats(memory)
    trainer.scheduler.step()
    if rollout.reward_moments is not None:
        trainer.rewards.remember(rollout.reward_moments)
    return learned


@dataclass(frozen=True)
class ObjectiveTerms:
    """The objective of a minibatch and its terms.

    Args:
        objective: clipped_surrogate - value_loss + entropy_bonus - kl_penalty, to be maximized.
        clipped_surrogate: the policy objective that `args.policy_loss` names.
        logprobs, values: of the generated tokens, by the policy as it is now.
    """

    objective: Float[Tensor, ""]
    clipped_surrogate: Float[Tensor, ""]
    value_loss: Float[Tensor, ""]
    entropy_bonus: Float[Tensor, ""]
    kl_penalty: Float[Tensor, ""]
    logprobs: Float[Tensor, "minibatch gen"]
    values: Float[Tensor, "minibatch gen"]


def objective_terms(
    policy: TransformerWithValueHead,
    reference: HookedModel,
    minibatch: ReplayMinibatch,
    objective: Objective,
    kl_coef: float | Float[Tensor, ""] | None = None,
) -> ObjectiveTerms:
    """Compute the objective of one minibatch, with gradients.

    1. Run the policy once, for log-probs and values of the generated tokens.
    2. Weigh the four terms. Entropy and the exact KL are of the whole next-token distribution.
    """
    out = objective.run_policy(minibatch, policy, reference)
    overrides, args, old, mask = objective.overrides, objective.args, minibatch, minibatch.mask
    surrogate = objective.surrogate(out.logprobs, minibatch)
    values = out.values, old.returns, args.vf_coef, mask, old.values, args.vf_clip
    value_loss = overrides.value_loss(*values)
    entropy_bonus = overrides.entropy_bonus(out.entropy, args.ent_coef, mask)
    kl_penalty = objective.kl_penalty(out, minibatch, kl_coef)
    terms = surrogate, value_loss, entropy_bonus, kl_penalty
    if objective.is_custom:
        validate_terms(*terms)
    total = surrogate - value_loss + entropy_bonus - kl_penalty
    return ObjectiveTerms(total, *terms, out.logprobs.detach(), out.values.detach())
