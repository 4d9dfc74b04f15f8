"""Exercises of the lesson on PPO: the whole algorithm in one function, and a look inside a run."""

import copy
import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rlhf_lab.config import RLHFArgs
from rlhf_lab.course.cases import Cases
from rlhf_lab.course.exercise import Answer, exercise, make_exercise
from rlhf_lab.course.exercises.objective import whole_objective
from rlhf_lab.course.exercises.toys import toy_trainer
from rlhf_lab.diffing import logit_lens
from rlhf_lab.functional import (
    compute_gae,
    compute_returns,
    entropy_per_token,
    generated_logits,
    generated_values,
    get_logprobs,
    kl_per_token,
    log_probs,
    normalize_reward,
    token_rewards,
)
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.organism import WORD_IDS
from rlhf_lab.sampling import SamplingSpec, sample, tokenize_prompts
from rlhf_lab.training import RLHFTrainer, get_optimizer_and_scheduler
from rlhf_lab.training.random_streams import phase_generator


def ppo(
    args: RLHFArgs,
    policy: TransformerWithValueHead,
    reference: HookedModel,
    reward_fn: Callable[[list[str]], Float[Tensor, " batch"]],
) -> list[float]:
    """Train the policy with PPO, and return the mean reward of each phase.

    Each phase has two halves:

    1. Rollout: sample with the phase's "sampling" generator, score the texts, and compute an
       advantage for each token.
    2. Learning: make the phase's "minibatches" generator. In each pass, draw a `torch.randperm` of
       the rows from it, cut the rows into `args.num_minibatches` minibatches, and take a gradient
       step on each. After the last pass, step the scheduler.
    """
    optimizer, scheduler = get_optimizer_and_scheduler(args, policy)
    tokenizer, mean_rewards = policy.base_model.tokenizer, []
    prompts = tokenize_prompts(tokenizer, [args.prefix] * args.batch_size, prepend_bos=True)
    spec, prefix_len = SamplingSpec.from_args(args, tokenizer), len(prompts[0])
    for phase in range(args.total_phases):
        # 1. Rollout: sample, score, assign credit.
        generator = phase_generator(args.seed, phase, "sampling")
        samples = sample(policy, prompts, spec, generator)
        rewards = reward_fn(samples.texts(tokenizer))
        mean_rewards.append(rewards.mean().item())
        per_token = token_rewards(normalize_reward(rewards), samples.mask)
        advantages = compute_gae(
            samples.values, per_token, args.gamma, args.gae_lambda, samples.mask
        )
        returns = compute_returns(advantages, samples.values)
        with torch.no_grad():
            ref_logprobs = log_probs(generated_logits(reference(samples.tokens), prefix_len))

        # 2. Learning: several passes over the batch, a gradient step per minibatch.
        generator = phase_generator(args.seed, phase, "minibatches")
        for _ in range(args.batches_per_learning_phase):
            order = torch.randperm(args.batch_size, generator=generator)
            for rows in order.chunk(args.num_minibatches):
                tokens, mask = samples.tokens[rows], samples.mask[rows]
                logits, values = policy(tokens)
                logprobs = log_probs(generated_logits(logits, prefix_len))
                entropy, kl = (
                    entropy_per_token(logprobs),
                    kl_per_token(logprobs, ref_logprobs[rows]),
                )
                objective = whole_objective(
                    get_logprobs(logits, tokens, prefix_len),
                    samples.logprobs[rows],
                    advantages[rows],
                    generated_values(values, prefix_len),
                    returns[rows],
                    *(entropy, kl, mask),
                    *(args.clip_coef, args.vf_coef, args.ent_coef, args.kl_coef),
                )
                optimizer.zero_grad()
                objective.backward()
                torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
                optimizer.step()
        scheduler.step()
    return mean_rewards


def look(
    trainer: RLHFTrainer,
    reviews: Int[Tensor, "batch seq"],
    hook_names: Sequence[str],
    praise: Sequence[int],
    blame: Sequence[int],
) -> dict[str, list[float]]:
    """Record how likely praise is after the reviews, at each hook point and in each phase.

    Register a callback and return at once, with an empty list for each hook point. Later, in each
    phase of the run and before its first gradient step, the callback appends one number to each
    list: P(praise) / (P(praise) + P(blame)) at the last position, according to the logit lens,
    averaged over the reviews.
    """
    seen = {name: [] for name in hook_names}

    @trainer.capture(hook_names, pos=-1, at="after_score", tokens=reviews)
    def record(ctx: Any, acts: dict[str, Tensor]) -> None:
        for name in hook_names:
            probs = logit_lens(ctx.policy.base_model, acts[name]).exp()
            good, bad = probs[:, praise].sum(dim=-1), probs[:, blame].sum(dim=-1)
            seen[name].append((good / (good + bad)).mean().item())

    return seen


_SMALL = {"total_phases": 2, "ent_coef": 0.05, "kl_coef": 0.3, "vf_coef": 0.4, "stop_tokens": "."}


_LOOKED_AT = {"total_phases": 2, "base_lr": 1e-2}


def _observe_ppo(fn: Answer, **fields: Any) -> dict[str, Any]:
    """Run a function on 12 short reviews; its policy does not equal its reference at the start."""
    sizes = {"batch_size": 12, "gen_len": 10, "prefix": "this movie was so good", "gamma": 0.9}
    trainer = toy_trainer(**_SMALL | sizes | fields)
    args, policy, scored, rates = trainer.args, trainer.policy, [], []
    norms = {policy.value_head: [], policy.base_model: []}
    reference = copy.deepcopy(policy.base_model)
    reference.unembed.W_U.data.mul_(0.5)

    def note(optimizer: Any, *_: Any) -> None:
        rates.append([group["lr"] for group in optimizer.param_groups])
        for part, norm in norms.items():
            gradients = [p.grad.norm().item() for p in part.parameters() if p.grad is not None]
            norm.append(sum(x**2 for x in gradients) ** 0.5)

    handle = register_optimizer_step_pre_hook(note)
    try:
        score = lambda texts: scored.append(len(texts)) or trainer.reward_fn(texts)
        rewards = fn(args, policy, reference, score)
    finally:
        handle.remove()
    with torch.no_grad():
        logits, values = policy(torch.arange(24).reshape(2, 12))
    return {
        "numbers of texts scored": scored,
        "optimizer steps": len(rates),
        "mean reward of phase 0": rewards[:1] if isinstance(rewards, list) else rewards,
        "gradient norm of the value head by step": norms[policy.value_head],
        "gradient norm of the transformer by step": norms[policy.base_model],
        "learning rates by step": rates,
        "mean rewards of all phases": rewards,
        "log-probabilities after training, / 20": logits.log_softmax(-1) / 20,
        "values after training": values,
    }


@functools.cache
def _twin() -> list[Tensor]:
    """Train the run of `look` without a callback, and return its weights."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = toy_trainer(**_LOOKED_AT, out=Path(folder) / "run")
        trainer.train()
    return [*trainer.policy.state_dict().values()]


def _observe_look(fn: Answer, **arguments: Any) -> dict[str, Any]:
    """Attach a function to a run of two phases, and compare the run with a twin without it."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = toy_trainer(**_LOOKED_AT, out=Path(folder) / "run")
        seen = fn(trainer, **arguments)
        early = any(seen.values())
        trainer.train()
    for _, problem in trainer.callbacks.dropped.values():
        raise RuntimeError(problem)
    counts = list(map(len, seen.values()))
    kinds = sorted({type(number).__name__ for numbers in seen.values() for number in numbers})
    weights = trainer.policy.state_dict().values()
    return {
        "hook points": sorted(map(str, seen)),
        "something is recorded before the run": early,
        "numbers per hook point": counts,
        "types of the numbers": kinds,
        "weights equal those of the run without it": all(map(torch.equal, weights, _twin())),
        **({f"at {n}": seen[n] for n in seen} if kinds == ["float"] and set(counts) == {2} else {}),
    }


_ppo = make_exercise(ppo, observe=_observe_ppo)


@exercise(look, _observe_look)
def _look_cases() -> Cases:
    ids = lambda text: [WORD_IDS[word] for word in text.split()]
    reviews = torch.randint(5, 40, (6, 7), generator=torch.Generator().manual_seed(2))
    names = ["blocks.0.hook_resid_mid", "blocks.1.hook_resid_post"]
    two = {"praise": ids("liked loved"), "blame": ids("hated disliked despised")}
    two |= {"reviews": reviews, "hook_names": names}
    one = two | {"reviews": reviews[:2, :4], "hook_names": names[1:]}
    return {"two hook points": two, "one hook point, shorter reviews": one}
