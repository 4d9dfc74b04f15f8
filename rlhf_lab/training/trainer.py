"""The trainer: rollout phase, learning phase, and an event after each thing that happens."""

import dataclasses
import math
import platform
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.models import (
    TransformerWithValueHead,
    build_policy,
    compare_with_reference,
    make_reference,
    merged_lora,
    reference_logprobs,
    refuse_hooked_blocks,
)
from rlhf_lab.models.device import pick_device
from rlhf_lab.models.transformer_lens import HookedTransformer
from rlhf_lab.organism.bundled import BUNDLED
from rlhf_lab.organism.rewards import REWARDS, grammatical
from rlhf_lab.organism.tokenizer import speaks_reel
from rlhf_lab.rewards import RewardFn, load_reward, score_texts, with_critic_from
from rlhf_lab.sampling import (
    Samples,
    SamplingSpec,
    check_context,
    sample_in_parts,
    tokenize_prompts,
)
from rlhf_lab.training import checkpoint
from rlhf_lab.training.callbacks import Callbacks, Context, Event
from rlhf_lab.training.capture import capturing, check_request
from rlhf_lab.training.given import Texts, as_masks, as_tokens, note_given
from rlhf_lab.training.kl_control import KLController, get_kl_controller
from rlhf_lab.training.model_card import keep_run_card
from rlhf_lab.training.objective import (
    Functions,
    ObjectiveTerms,
    Verdict,
    climb_in_parts,
    furthest_ratio,
    judge_step,
    minibatch_stats,
    objective_terms,
    run_forward,
)
from rlhf_lab.training.optim import (
    StepInBackward,
    add_critic,
    clip_gradients,
    get_optimizer_and_scheduler,
    step_if,
)
from rlhf_lab.training.prompts import choose_prompts, deal, load_labels
from rlhf_lab.training.random_streams import phase_generator
from rlhf_lab.training.replay import ReplayMemory, ReplayMinibatch
from rlhf_lab.training.report import (
    Cost,
    LearningStats,
    PhaseReport,
    RolloutStats,
    peak_memory_bytes,
)
from rlhf_lab.training.rollout import Rollout, summarize
from rlhf_lab.training.run_dir import METRICS, SAMPLES, RunDir
from rlhf_lab.training.shaping import penalized, rescaled
from rlhf_lab.training.sinks import attach_sinks
from rlhf_lab.training.tally import Tally

EVALUATION_BATCHES = 4
RATIO_TOLERANCE = MappingProxyType({"fp32": 1e-3, "bf16": 0.25})


class RLHFTrainer:
    """Trains a policy with PPO against a reward, under a KL leash, and shows everything on the way.

    Iterate over it for one `PhaseReport` per phase, or call `train()`. `rollout_phase()` and
    `learning_phase()` work on their own, too; `generate()` and `step()` leave the loop to you.

    Args:
        args: the settings.
        out: the run's directory, which must not hold a run yet; `runs/PRESET-seedN`, numbered on,
            when None. It is made when the first phase begins.
        policy: the model to train; the one that `args.base_model` names when None.
        reference: what the KL is measured from; a frozen copy of the policy when None.
        prompts: texts to continue; those of `args.prompts`, or `args.prefix` alone, when None.
        reward_fn: from texts to rewards; the one that `args.reward_fn` names when None.
        gold_fn: a known truth to show beside the reward; for a model that was loaded and has Reel's
            words, its gold reward.
        kl_controller: what sets the weight of the KL penalty; the one that `args.kl_controller`
            names when None.
        functions: the caller's own functions by name, such as `kl_penalty=my_kl`; see `Functions`.

    Raises:
        ConfigError, LoadError: see there; before anything is written.
        RunError: `out` holds a run already.
    """

    def __init__(
        self,
        args: RLHFArgs,
        *,
        out: str | Path | None = None,
        policy: TransformerWithValueHead | None = None,
        reference: HookedTransformer | None = None,
        prompts: Sequence[str] | None = None,
        reward_fn: RewardFn | None = None,
        gold_fn: RewardFn | None = None,
        kl_controller: KLController | None = None,
        **functions: Callable[..., Any],
    ) -> None:
        if out is not None:
            RunDir(Path(out)).refuse_occupied()
        self.args = args
        self.functions = Functions.choose(functions)
        self.functions.check(args)
        self.device = pick_device(args.device)
        self.forward = run_forward(args)
        given = {"policy": policy, "reference": reference, "reward_fn": reward_fn}
        given |= {
            "prompts": prompts,
            "gold_fn": gold_fn,
            "kl_controller": kl_controller,
            **functions,
        }
        self.own_parts = sorted(name for name, part in given.items() if part is not None)
        if policy is None:
            policy = build_policy(args, self.device)
            if args.critic_from is not None:
                policy = with_critic_from(policy, args.critic_from)
        self.policy = policy.to(self.device)
        self.reference = reference or make_reference(self.policy.base_model)
        self.reward_fn = reward_fn or load_reward(args, self.device)
        texts = choose_prompts(args, prompts)
        score_texts(self.reward_fn, [texts[0], texts[0]])
        self.speaks_reel = speaks_reel(self.tokenizer) and "policy" not in self.own_parts
        self.starts_as_grammar = self.speaks_reel and args.base_model in BUNDLED
        self.gold_fn = gold_fn or (REWARDS["gold"] if self.speaks_reel else None)
        self.sampling_spec = SamplingSpec.from_args(args, self.tokenizer)
        self.prompts = self._tokenize_prompts(texts)
        self.prompt = max(self.prompts, key=len)
        self._label_rewards = self._score_labels(texts)
        self.optimizer, self.scheduler = get_optimizer_and_scheduler(args, self.policy)
        add_critic(self.optimizer, self.policy)
        self.stepper = StepInBackward(self.optimizer) if args.optimizer_in_backward else None
        self.kl_controller = kl_controller or get_kl_controller(args)
        self.reward_moments = F.RunningMoments()
        self.callbacks = Callbacks()
        attach_sinks(args, self.callbacks)
        for event in ("checkpoint", "run_end"):
            self.callbacks.on(event)(keep_run_card)
        self.phase = 0
        self.run: RunDir | None = None
        self.best: dict[str, float] | None = None
        self._out = out
        self._generated = 0
        self._started = False
        self._stop_requested = False

    def _tokenize_prompts(self, texts: list[str]) -> list[list[int]]:
        model, args = self.policy.base_model, self.args
        if model.tokenizer is None:
            raise ConfigError("the policy has no tokenizer; give base_model one (set_tokenizer).")
        prompts = tokenize_prompts(model.tokenizer, texts, args.prepend_bos)
        if not all(prompts):
            raise ConfigError(
                "prefix='' leaves an empty prompt; write a prefix or set prepend_bos."
            )
        check_context(model, max(map(len, prompts)), args.gen_len)
        return prompts

    def _score_labels(self, texts: list[str]) -> dict[tuple[int, ...], float]:
        """What the label of each prompt earns behind it; the mean, if a prompt has several."""
        column = self.args.labels_column
        if column is None:
            return {}
        if "prompts" in self.own_parts:
            raise ConfigError(
                f"labels_column={column!r} is a column of the file of prompts, but prompts were "
                "handed in; leave one of them out."
            )
        labels = load_labels(self.args)
        whole = [f"{text} {label}" for text, label in zip(texts, labels, strict=True)]
        earned: dict[tuple[int, ...], list[float]] = {}
        rewards = score_texts(self.reward_fn, whole).tolist()
        for prompt, reward in zip(self.prompts, rewards, strict=True):
            earned.setdefault(tuple(prompt), []).append(reward)
        return {prompt: statistics.mean(rewards) for prompt, rewards in earned.items()}

    def _over_labels(
        self, samples: Samples, rewards: Float[Tensor, " batch"]
    ) -> Float[Tensor, " batch"]:
        """Rewards less what the labels of the same prompts earn, where there are labels."""
        if not self._label_rewards:
            return rewards
        prompts = [tuple(prompt) for prompt in samples.prompts()]
        unknown = next((p for p in prompts if p not in self._label_rewards), None)
        if unknown is not None:
            raise ConfigError(
                f"the prompt {self.tokenizer.decode(unknown)!r} has no label under "
                f"labels_column={self.args.labels_column!r}; leave labels_column out."
            )
        labels = [self._label_rewards[prompt] for prompt in prompts]
        return F.rewards_over_labels(rewards, rewards.new_tensor(labels))

    def _deal_prompts(self, batch: int) -> list[list[int]]:
        """The prompt of each row of a run's batch, counted from 0; answers to one stand together.

        Where there is one prompt only, it is the same in every batch.
        """
        each = self.args.samples_per_prompt
        n = self.args.batch_size // each
        chosen = deal(len(self.prompts), batch * n, n, self.args.seed)
        return [self.prompts[i] for i in chosen for _ in range(each)]

    def _phase_spec(self) -> SamplingSpec:
        """The sampling spec, with this phase's number of tokens."""
        shortest, longest = self.args.gen_len_min, self.sampling_spec.gen_len
        if shortest is None:
            return self.sampling_spec
        generator = phase_generator(self.args.seed, self.phase, "lengths")
        drawn = torch.randint(shortest, longest + 1, (), generator=generator)
        return dataclasses.replace(self.sampling_spec, gen_len=int(drawn))

    @property
    def tokenizer(self) -> Any:
        """The policy's tokenizer."""
        return self.policy.base_model.tokenizer

    def on(
        self, event: Event, every: int = 1
    ) -> Callable[[Callable[[Context], Any]], Callable[[Context], Any]]:
        """Register the decorated callable for an event of each `every`-th phase."""
        return self.callbacks.on(event, every)

    def capture(
        self,
        hook_names: str | Sequence[str],
        pos: int | None = None,
        at: Event = "after_phase",
        every: int = 1,
        tokens: Int[Tensor, "batch seq"] | None = None,
    ) -> Callable[[Callable[[Context, Any], Any]], Callable[[Context, Any], Any]]:
        """Register the decorated `function(ctx, acts)` to look at activations of the policy.

        The activations come from a forward made for nothing else, never from sampling: over the
        phase's own sequences, or over `tokens`. One site gives a tensor `[batch seq d_model]`, or
        `[batch d_model]` at a `pos`; several, or a name with wildcards, a dict of these by name.

        Args:
            hook_names: such as "blocks.1.hook_resid_post" or "blocks.*.hook_mlp_out", "logits" or
                "values".
            at, every: see `on`; after_phase comes after learning.
        """
        check_request(self.policy, hook_names, at, tokens)

        def register(function: Callable[[Context, Any], Any]) -> Callable[[Context, Any], Any]:
            self.on(at, every)(capturing(function, hook_names, pos, tokens))
            return function

        return register

    def _emit(self, event: Event, **fields: Any) -> None:
        always = {
            "args": self.args,
            "policy": self.policy,
            "reference": self.reference,
            "kl_coef": self.kl_controller.kl_coef,
            "run": self.run,
        }
        self.callbacks.emit(event, self.phase, **always, **fields)

    def rollout_phase(self) -> Rollout:
        """Sample a batch, score it, and compute everything that learning needs.

        1. Let the policy continue the prompts.
        2. Let the reward function read the texts; penalise, scale, clip and standardise the rewards
           as far as so asked.
        3. Compare policy and reference on the finished sequences.
        4. Estimate advantages and returns.
        """
        generator = phase_generator(self.args.seed, self.phase, "sampling", self.device)
        samples = self._sample(self._deal_prompts(self.phase), generator, self._phase_spec())
        self._emit("after_rollout", samples=samples)
        rollout = self._score(samples)
        self._emit("after_score", samples=samples, rollout=rollout)
        return rollout

    def _sample(
        self,
        prompts: Sequence[Sequence[int]],
        generator: torch.Generator,
        spec: SamplingSpec | None = None,
    ) -> Samples:
        with merged_lora(self.policy):
            return sample_in_parts(
                self.policy,
                prompts,
                spec or self.sampling_spec,
                generator,
                self.forward,
                self.args.generation_batch_size,
            )

    def _score(self, samples: Samples, reward_fn: RewardFn | None = None) -> Rollout:
        texts = samples.texts(self.tokenizer)
        raw_rewards = score_texts(reward_fn or self.reward_fn, texts).to(self.device)
        moments, rewards = self._shape_rewards(samples, raw_rewards)
        if self.args.normalize_reward:
            rewards = self.functions.normalize_reward(rewards)
        kl, entropy, ref_residuals = compare_with_reference(
            self.policy.base_model,
            self.reference,
            samples,
            self.args.temperature,
            self.args.micro_batch_size or self.args.minibatch_size,
            self.forward,
        )
        ref_logprobs = self._reference_logprobs(samples, ref_residuals)
        advantages, returns = self._assign_credit(samples, rewards, kl, ref_logprobs, moments)
        return Rollout(
            samples=samples,
            texts=texts,
            raw_rewards=raw_rewards,
            rewards=rewards,
            gold_rewards=score_texts(self.gold_fn, texts) if self.gold_fn else None,
            grammatical=grammatical(texts) if self.speaks_reel else None,
            kl=kl,
            entropy=entropy,
            ref_residuals=ref_residuals,
            advantages=advantages,
            returns=returns,
            ref_logprobs=ref_logprobs,
            reward_moments=moments,
        )

    def _shape_rewards(
        self,
        samples: Samples,
        raw_rewards: Float[Tensor, " batch"],
        moments: F.RunningMoments | None = None,
    ) -> tuple[F.RunningMoments | None, Float[Tensor, " batch"]]:
        """Take labels off, penalise, scale and clip rewards; also returns the moments for it.

        Args:
            moments: to scale by; the run's with these rewards taken in, when None.
        """
        stops = self.sampling_spec.stops(self.tokenizer)
        over_labels = self._over_labels(samples, raw_rewards)
        rewards = penalized(over_labels, samples, stops, self.args)
        if self.args.reward_scaling != "off" and moments is None:
            moments = self.reward_moments.update(rewards)
        return moments, rescaled(rewards, moments, self.args)

    def _reference_logprobs(
        self, samples: Samples, ref_residuals: Float[Tensor, "batch gen d_model"]
    ) -> Float[Tensor, "batch gen"] | None:
        """The reference's log-probabilities of the samples, if the KL is estimated from them."""
        if self.functions.sampled_kl(self.args) is None:
            return None
        return reference_logprobs(
            self.reference,
            samples,
            ref_residuals,
            self.args.temperature,
            self.args.micro_batch_size or self.args.minibatch_size,
            self.forward,
        )

    def _assign_credit(
        self,
        samples: Samples,
        rewards: Float[Tensor, " batch"],
        kl: Float[Tensor, "batch gen"],
        ref_logprobs: Float[Tensor, "batch gen"] | None,
        moments: F.RunningMoments | None,
    ) -> tuple[Float[Tensor, "batch gen"], Float[Tensor, "batch gen"]]:
        """The advantages of a batch, and the returns that the value head is trained towards.

        Args:
            kl: exact KL of each token, which its reward pays for unless it is estimated.
            moments: what the rewards were scaled by.
        """
        args, functions, mask = self.args, self.functions, samples.mask
        token_rewards = F.token_rewards(rewards, mask)
        if args.kl_in == "reward":
            estimator = functions.sampled_kl(args)
            if estimator is not None:
                kl = F.kl_estimate(samples.logprobs, ref_logprobs, estimator, mask)
            token_rewards = F.token_rewards(rewards, mask, kl, self.kl_controller.kl_coef)
        group = F.prompt_groups(len(rewards), args.samples_per_prompt).to(rewards.device)
        advantages = functions.estimate_advantages(
            args,
            samples.values,
            rewards,
            mask,
            token_rewards,
            group,
            self._greedy_rewards(samples, moments)
            if functions.compares_with_greedy(args)
            else None,
        )
        returns = functions.estimate_returns(args, advantages, samples.values, token_rewards, mask)
        return advantages, returns

    def _greedy_rewards(
        self, samples: Samples, moments: F.RunningMoments | None
    ) -> Float[Tensor, " batch"]:
        """What the likeliest tokens, one after the other, earn on the prompt of each row."""
        prompts = [tuple(prompt) for prompt in samples.prompts()]
        distinct = list(dict.fromkeys(prompts))
        spec = dataclasses.replace(self.sampling_spec, top_k=1, top_p=None)
        greedy = self._sample(distinct, torch.Generator(self.device), spec)
        rewards = score_texts(self.reward_fn, greedy.texts(self.tokenizer)).to(self.device)
        _, rewards = self._shape_rewards(greedy, rewards, moments)
        return rewards[[distinct.index(prompt) for prompt in prompts]]

    def learning_phase(self, rollout: Rollout) -> LearningStats:
        """Improve the policy on a rollout.

        1. Deal the batch out in minibatches, several times over.
        2. On each, take one optimiser step up the objective; but skip it above `ratio_threshold`,
           and end the phase beyond `target_kl`.
        3. Step the learning-rate schedule once, and remember the moments of the rewards.

        Raises:
            RunError: an objective or a gradient was not finite, and no step was taken with it or
            after it; or there was no minibatch to take a step on.
        """
        memory = ReplayMemory(
            rollout, self.args.num_minibatches, self.args.batches_per_learning_phase
        )
        generator = phase_generator(self.args.seed, self.phase, "minibatches")
        tally, furthest, names, skipped, unused = Tally(), None, (), 0, 0
        for step, minibatch in enumerate(memory.get_minibatches(generator)):
            there = {"rollout": rollout, "minibatch": minibatch, "step": step}
            self._emit("before_minibatch", **there)
            terms, grad_norm, verdict = self._step(minibatch, there, tally)
            if furthest is None:
                furthest = furthest_ratio(terms, minibatch)
            if verdict == "stop":
                unused = memory.num_minibatches * memory.passes - step
                break
            if verdict == "skip":
                skipped += 1
                continue
            clip_coef = self.args.clip_coef
            stats = minibatch_stats(terms, minibatch, grad_norm, clip_coef, self.args)
            tally.add(torch.stack(list(stats.values())))
            names = tuple(stats)
        rows, (first_ratio,) = tally.read(furthest)
        stats = [dict(zip(names, row, strict=True)) for row in rows]
        self._warn_if_off_policy(first_ratio)
        for numbers in stats:
            self._refuse_non_finite("objective", numbers["objective"])
            self._refuse_non_finite("gradient norm", numbers["grad_norm"])
        if not stats:
            raise RunError(
                f"no step was taken in phase {self.phase}, whose first minibatch has a ratio of "
                f"{first_ratio:.4g}; raise ratio_threshold or target_kl, or lower base_lr."
            )
        self.scheduler.step()
        self.reward_moments = rollout.reward_moments or self.reward_moments
        means = {name: sum(s[name] for s in stats) / len(stats) for name in stats[0]}
        return LearningStats(
            ratio_first_minibatch=first_ratio,
            skipped_minibatches=skipped,
            unused_minibatches=unused,
            **means,
        )

    def _step(
        self, minibatch: ReplayMinibatch, there: dict[str, Any], tally: Tally
    ) -> tuple[ObjectiveTerms, Float[Tensor, ""] | None, Verdict]:
        """One optimiser step up the objective, unless the minibatch has moved too far for it.

        Args:
            there: what the moments of the step show.
            tally: knows whether all was finite so far; otherwise weights stay as they are.

        Returns:
            The terms, the gradient norm before clipping (None without a step), and what was done.
        """
        part_size = self.args.micro_batch_size
        models, kl_coef = (self.policy, self.reference), self.kl_controller.kl_coef
        settings = (minibatch, self.args, self.functions, kl_coef)
        if part_size is None:
            terms = objective_terms(*models, *settings)
        else:
            self.optimizer.zero_grad()
            terms = climb_in_parts(*models, *settings, part_size)
        verdict = judge_step(terms, minibatch, self.args)
        if verdict != "step":
            self.optimizer.zero_grad()
            return terms, None, verdict
        self._emit("after_loss", terms=terms, **there)
        grad_norm = self._climb(terms, there, tally)
        if self.callbacks.hears("after_step"):
            self._emit("after_step", terms=terms, grad_norm=grad_norm.item(), **there)
        return terms, grad_norm, verdict

    def _climb(
        self, terms: ObjectiveTerms, there: dict[str, Any], tally: Tally
    ) -> Float[Tensor, ""]:
        """Backward pass and step; returns the norm of the gradient before it was clipped."""
        if self.stepper is not None:
            grad_norm = self.stepper.climb(terms.objective, tally.still_sound(terms.objective))
            tally.still_sound(grad_norm)
            self._emit("after_backward", terms=terms, **there)
            return grad_norm
        if self.args.micro_batch_size is None:
            self.optimizer.zero_grad()
            terms.objective.backward()
        self._emit("after_backward", terms=terms, **there)
        grad_norm = clip_gradients(self.policy, self.args.max_grad_norm)
        step_if(tally.still_sound(terms.objective, grad_norm), self.optimizer)
        return grad_norm

    def _refuse_non_finite(self, what: str, value: float) -> None:
        if not math.isfinite(value):
            raise RunError(
                f"the {what} became {value} in phase {self.phase}; "
                "lower the learning rates or raise kl_coef (what was saved before is intact)."
            )

    def _warn_if_off_policy(self, ratio: float) -> None:
        if math.isnan(ratio) or abs(ratio - 1) <= RATIO_TOLERANCE[self.args.precision]:
            return
        causes = [f"own part {part}" for part in self.own_parts if part in ("policy", "logprobs")]
        if next(self.policy.parameters()).dtype != torch.float32:
            causes.append("a policy in half precision")
        if any(point.fwd_hooks for point in self.policy.base_model.hook_dict.values()):
            causes.append(
                "a hook on base_model that acts differently on one token than on a sequence"
            )
        warnings.warn(
            f"phase {self.phase}: the policy that is trained is not the policy that sampled: "
            f"a ratio of {ratio:.4g} on the first minibatch; "
            f"look at {' and '.join(causes) or 'the sampling settings'}.",
            stacklevel=3,
        )

    def run_phase(self) -> PhaseReport:
        """One rollout phase and one learning phase, logged and saved."""
        self._start()
        began = perf_counter()
        return self._learn_and_report(self.rollout_phase(), began)

    def _learn_and_report(self, rollout: Rollout, began: float) -> PhaseReport:
        """The second half of a phase, whose first began at `began`."""
        rolled_out = perf_counter()
        stats = summarize(rollout)
        self._save_best(stats.mean_reward)
        base_lr, head_lr = self.scheduler.get_last_lr()
        learning_began = perf_counter()
        learning = self.learning_phase(rollout)
        cost = self._cost(rollout, rolled_out - began, perf_counter() - learning_began)
        kl_coef = self.kl_controller.kl_coef
        report = PhaseReport(self.phase, stats, learning, base_lr, head_lr, kl_coef, cost)
        self.kl_controller.update(stats.kl_per_sequence, self.args.batch_size)
        self._log(report, rollout)
        self._emit("after_phase", rollout=rollout, report=report)
        self.phase, self._generated = self.phase + 1, 0
        self._save_due()
        return report

    def generate(self, prompts: Texts) -> list[str] | list[Int[Tensor, " response"]]:
        """Let the policy answer, in the kind that the prompts are: texts, or token ids.

        1. Take prompts as they are, but for a BOS before texts, if `args.prepend_bos`.
        2. Sample, by the seed: another call in the same phase has other noise.
        3. Return the responses alone; token ids include the stop token, texts do not.

        Raises:
            ConfigError: an empty prompt, or one that leaves no room for an answer.
        """
        rows = as_tokens(self.tokenizer, prompts, "prompts", self.args.prepend_bos)
        place = (self.args.seed, self.phase, "generate", self.device)
        generator = phase_generator(*place, call=self._generated)
        self._generated += 1
        samples = self._sample(rows, generator, self._phase_spec())
        written = samples.tokens[:, samples.prefix_len :]
        responses = [ids[real] for ids, real in zip(written, samples.mask, strict=True)]
        if isinstance(prompts[0], str):
            return self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        return responses

    def step(
        self,
        queries: Texts,
        responses: Texts,
        scores: Sequence[float] | Sequence[Tensor] | Tensor,
        response_masks: Sequence[Sequence[int]] | Sequence[Tensor] | None = None,
    ) -> PhaseReport:
        """One phase of learning from texts that are scored already: TRL's way of working.

        1. Run the policy over query and response for log-probabilities and values.
        2. Go on as any phase does: shape the scores, learn, log, save.

        Args:
            queries, responses: `batch_size` of each, as texts or as token ids. A text has no stop
                token; where the end matters, give token ids.
            scores: one number for each.
            response_masks: for each response, 1 for its tokens that are learned from and 0 for
                those that are context only, such as the answer of a tool; all 1 when None.

        Returns:
            The report; `trl_stats` has its numbers under TRL's names.

        Raises:
            ConfigError: not as many as `batch_size`, an empty one, or advantages='remax', for which
                no scores of greedy answers are there.
        """
        self._check_step(queries, responses, scores)
        bos, given = self.args.prepend_bos, self.tokenizer
        asked = as_tokens(given, queries, "queries", bos)
        answered = as_tokens(given, responses, "responses", False)
        counted = as_masks(response_masks, answered)
        numbers = torch.tensor([float(score) for score in scores])
        began = perf_counter()
        samples = note_given(
            self.policy,
            asked,
            answered,
            self.args.temperature,
            self.args.micro_batch_size or self.args.minibatch_size,
            self.forward,
            counted,
        )
        self._start()
        self._write_info(scores="given")
        self._emit("after_rollout", samples=samples)
        rollout = self._score(samples, lambda texts: numbers)
        self._emit("after_score", samples=samples, rollout=rollout)
        return self._learn_and_report(rollout, began)

    def _check_step(self, queries: Texts, responses: Texts, scores: Sequence[Any] | Tensor) -> None:
        """Refuse what is not one query, response and score for each row of the batch."""
        given = {"queries": queries, "responses": responses, "scores": scores}
        for name, entries in given.items():
            if len(entries) != self.args.batch_size:
                raise ConfigError(
                    f"{name} has {len(entries)} entries, but batch_size={self.args.batch_size}; "
                    "give one for each sequence of the batch."
                )
        if self.functions.compares_with_greedy(self.args):
            raise ConfigError(
                f"advantages={self.args.advantages!r} needs scores of greedy answers, which step() "
                "is not given; choose another estimator."
            )

    def __iter__(self) -> Iterator[PhaseReport]:
        """Run the phases that are left, one `PhaseReport` each; stop and go on as you like."""
        self._start()
        self._stop_requested = False
        reports = []
        while self.phase < self.args.total_phases and not self._stop_requested:
            reports.append(self.run_phase())
            yield reports[-1]
        if self.phase < self.args.total_phases:
            self._write_info(status="stopped")
        elif self.run.read_info()["status"] != "finished":
            self._finish()
        self._emit("run_end", reports=reports)

    def train(self) -> list[PhaseReport]:
        """Run all phases that are left."""
        return list(self)

    def request_stop(self) -> None:
        """Finish the phase in progress, save, and end the iteration."""
        self._stop_requested = True

    def evaluate(self) -> dict[str, float | int | None]:
        """Sample afresh from the policy as it is, and average over several batches."""
        return self._averages([summarize(rollout) for rollout in self._evaluation()])

    def _evaluation(self) -> Iterator[Rollout]:
        """Several batches of fresh samples, the same ones at every call in a phase."""
        generator = phase_generator(self.args.seed, self.phase, "evaluation", self.device)
        for batch in range(EVALUATION_BATCHES):
            yield self._score(self._sample(self._deal_prompts(batch), generator))

    def _averages(self, stats: list[RolloutStats]) -> dict[str, float | int | None]:
        """Means over batches of fresh samples, and how many samples these are."""
        names = ("mean_reward", "gold_reward", "grammatical_fraction", "kl_per_sequence")
        means = {
            name: None
            if getattr(stats[0], name) is None
            else _mean(getattr(s, name) for s in stats)
            for name in names
        }
        return {**means, "samples": len(stats) * self.args.batch_size}

    def _finish(self) -> None:
        """Evaluate the policy that was learned, and log the first batch of what it writes."""
        stats: list[RolloutStats] = []
        for rollout in self._evaluation():
            if not stats:
                self._log_samples(rollout)
            stats.append(summarize(rollout))
        self._write_info(status="finished", final=self._averages(stats))

    @classmethod
    def resume(cls, path: str | Path, **parts: Any) -> "RLHFTrainer":
        """A trainer that goes on where the run in this directory was last saved.

        Args:
            parts: the run's own parts, if it had any; they are not stored.

        Raises:
            RunError: no run, a corrupt checkpoint, or an own part that is missing.
        """
        run = RunDir.open(path)
        info = run.read_info()
        missing = sorted(set(info.get("own_parts", [])) - parts.keys())
        if missing:
            raise RunError(
                f"{run.path} was trained with its own {', '.join(missing)}; "
                "resume it from Python with "
                f"RLHFTrainer.resume({str(run.path)!r}, {missing[0]}=...)."
            )
        trainer = cls(RLHFArgs.from_dict(info["args"]), **parts)
        trainer.run = run
        last = run.checkpoints / "last.safetensors"
        if last.exists():
            trainer._restore(last)
        return trainer

    def _restore(self, path: Path) -> None:
        tensors, notes = checkpoint.load_checkpoint(path)
        checkpoint.load_weights(self.policy, tensors, path)
        checkpoint.load_optimizer(self.optimizer, tensors)
        self.scheduler.load_state_dict(self.scheduler.state_dict() | notes["scheduler"])
        for group, lr in zip(
            self.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True
        ):
            group["lr"] = lr
        self.phase, self.best = notes["phase"], notes["best"]
        self.kl_controller.kl_coef = notes["kl_coef"]
        self.reward_moments = F.RunningMoments(**notes.get("reward_moments", {}))

    def _start(self) -> None:
        """Make the run's directory if it is a new run, and say that it begins; once."""
        if self._started:
            return
        if self.args.activation_checkpointing:
            refuse_hooked_blocks(self.policy)
        self._started = True
        if self.run is None:
            name = f"{self.args.preset}-seed{self.args.seed}"
            self.run = (
                RunDir.create_numbered(name) if self._out is None else RunDir.create(self._out)
            )
        else:
            self.run.rewind(self.phase)
        self._write_info(status="running")
        self._emit("run_start")
        if self.phase == 0:
            self._save_due()

    def _write_info(self, **changes: Any) -> None:
        info = self.run.read_info() if self.run.info_path.exists() else {}
        versions = {"rlhf_lab": version("rlhf_lab"), "python": platform.python_version()}
        packages = ("torch", "transformer_lens", "transformers")
        info |= {
            "args": self.args.to_dict(),
            "versions": versions | {name: version(name) for name in packages},
            "device": str(self.device),
            "own_parts": self.own_parts,
            "phases_done": self.phase,
        }
        self.run.write_info(info | changes)

    def _log(self, report: PhaseReport, rollout: Rollout) -> None:
        self.run.append(METRICS, [report.to_dict()])
        self._log_samples(rollout)
        if self.phase == 0:
            self._write_info(initial=report.to_dict())

    def _log_samples(self, rollout: Rollout) -> None:
        """What the policy wrote behind so many learning phases as are done."""
        rewards, gold = rollout.raw_rewards.tolist(), rollout.gold_rewards
        golds = [None] * len(rewards) if gold is None else gold.tolist()
        rows = zip(rollout.texts, rewards, golds, strict=True)
        names = ("text", "reward", "gold_reward")
        samples = [{"phase": self.phase} | dict(zip(names, row, strict=True)) for row in rows]
        self.run.append(SAMPLES, samples)

    def _cost(self, rollout: Rollout, rollout_seconds: float, learning_seconds: float) -> Cost:
        tokens = int(rollout.samples.mask.sum())
        return Cost(
            rollout_seconds=rollout_seconds,
            learning_seconds=learning_seconds,
            rollout_tokens_per_second=tokens / rollout_seconds,
            learning_tokens_per_second=tokens
            * self.args.batches_per_learning_phase
            / learning_seconds,
            peak_memory_bytes=peak_memory_bytes(self.device),
        )

    def _save_due(self) -> None:
        """Save what is due now: weights after 0, 1, 2, 4, 8, ... phases, the state as asked."""
        phase = self.phase
        if phase & (phase - 1) == 0:
            self._save(f"phase_{phase:06d}", checkpoint.weights(self.policy))
        is_end = phase == self.args.total_phases or self._stop_requested
        if is_end or phase % self.args.save_every == 0:
            state = checkpoint.weights(self.policy) | checkpoint.optimizer_tensors(self.optimizer)
            self._save("last", state)

    def _save_best(self, mean_reward: float) -> None:
        if self.best is None or mean_reward > self.best["mean_reward"]:
            self.best = {"phase": self.phase, "mean_reward": mean_reward}
            self._save("best", checkpoint.weights(self.policy))

    def _save(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        path = self.run.checkpoints / f"{name}.safetensors"
        scheduler = {
            key: value
            for key, value in self.scheduler.state_dict().items()
            if key in ("last_epoch", "_step_count", "_last_lr")
        }
        notes = {
            "phase": self.phase,
            "best": self.best,
            "scheduler": scheduler,
            "kl_coef": self.kl_controller.kl_coef,
            "reward_moments": dataclasses.asdict(self.reward_moments),
        }
        checkpoint.save_checkpoint(path, tensors, notes)
        self._emit("checkpoint", checkpoint=path)


def _mean(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values)
