"""The parts of a run: models, prompts, rewards, optimizer; built from the settings or handed in."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rlhf_lab.chat import Message
from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.launcher import is_launched, launched
from rlhf_lab.models import (
    Forward,
    ReferenceComparison,
    TransformerWithValueHead,
    compare_with_reference,
    make_reference,
    merged_lora,
)
from rlhf_lab.models.device import (
    pick_device,
    product_dtype,
    validate_half_precision,
    validate_tf32,
)
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.models.reference import validate_forwards
from rlhf_lab.organism.bundled import BUNDLED
from rlhf_lab.organism.rewards import REWARDS
from rlhf_lab.organism.tokenizer import speaks_reel
from rlhf_lab.parallel import device_of_rank, join
from rlhf_lab.rewards import (
    RewardFn,
    RewardOutput,
    RewardPipeline,
    SentimentReward,
    load_policy_and_critic,
    load_reward,
    resolve_custom_reward,
    split_rewards,
)
from rlhf_lab.samples import Samples
from rlhf_lab.sampling import SamplingSpec, sample_in_parts
from rlhf_lab.training.custom_components import (
    refuse_other_kinds,
    refuse_other_weights,
    refuse_unfit_models,
)
from rlhf_lab.training.kl_control import KLController, get_kl_controller
from rlhf_lab.training.objective import Objective
from rlhf_lab.training.optim import (
    StepInBackward,
    add_critic,
    get_optimizer_and_scheduler,
    own_optimizer_and_scheduler,
)
from rlhf_lab.training.overrides import Overrides
from rlhf_lab.training.prompts import Prompts, phase_spec
from rlhf_lab.training.ranks import (
    by_rank,
    gathered_samples,
    refuse_undealt,
    refuse_unequal,
    refuse_unsharded_parts,
)
from rlhf_lab.training.rollout_engine import EngineSampler
from rlhf_lab.training.whole_weights import weights_of


class Parts:
    """What a run is made of; the trainer has each part under the same name.

    Args:
        args: the settings; they name what is not handed in.
        policy, reference: the model to train, and what the KL is measured from (a frozen copy).
        prompts: texts to continue; with `args.chat`, also lists of messages to answer.
        reward_fn, gold_fn: from texts to rewards, and to a known truth to show beside them (the
            gold reward of a loaded model with Reel's words). Several rewards, in a mapping by name
            or a list, are paid as their sum with `reward_weights`.
        kl_controller: what sets the weight of the KL penalty.
        optimizer: any of torch's over the policy's parameters; it is made to maximise. AdamW with
            two learning rates when None.
        scheduler: of the own optimizer, stepped once per phase; constant rates when None.
        rollout_engine: what writes responses in place of the built-in sampler; see `RolloutEngine`.
        functions: the caller's own functions by name; see `Overrides`.

    Attributes:
        own_parts: the names of the parts that were handed in.
        tokenizer: the policy's.
        forward: how the models are run.
        world: the processes of the run; one alone without torchrun.
        first_reference: the reference that the run began with.
        reference_phase: after how many learning phases the policy became the reference; 0 if the
            reference is the first.
        weights: the policy's, whole on every process or sharded.
        engine: what writes responses, where that is not the built-in sampler.
        objective: the terms of the objective with the settings bound to them.
        rewards: everything that is done to a reward.
        optimizer, scheduler: with two learning rates, and their schedule over the phases.
        step_in_backward: steps parameters during the backward pass, if the settings say so.
        speaks_reel: the policy was loaded, and has Reel's words.
        starts_as_grammar: it is Reel's own language model, whose truth is known exactly.
    """

    def __init__(
        self,
        args: RLHFArgs,
        policy: TransformerWithValueHead | None = None,
        reference: HookedModel | None = None,
        prompts: Sequence[str | list[Message]] | None = None,
        reward_fn: RewardFn | Mapping[str, RewardFn] | Sequence[RewardFn] | None = None,
        gold_fn: RewardFn | None = None,
        kl_controller: KLController | None = None,
        optimizer: Any = None,
        scheduler: Any = None,
        rollout_engine: Any = None,
        **functions: Any,
    ) -> None:
        given = dict(policy=policy, reference=reference, prompts=prompts, reward_fn=reward_fn)
        given |= dict(gold_fn=gold_fn, kl_controller=kl_controller, **functions)
        given |= dict(optimizer=optimizer, scheduler=scheduler, rollout_engine=rollout_engine)
        refuse_other_kinds(args, given)
        self.own_parts = sorted(name for name, part in given.items() if part is not None)
        self.args, self.phase = args, 0
        self.functions = Overrides.choose(functions)
        self.functions.check(args)
        self.device = device_of_rank(pick_device(args.device), args.device, args.parallel)
        refuse_undealt(args, launched(), is_launched())
        asked = f"precision={args.precision!r}"
        validate_half_precision(self.device, product_dtype(args.precision), asked)
        validate_tf32(self.device, args.precision)
        self.policy = (policy or load_policy_and_critic(args, self.device)).to(self.device)
        dtype = next(self.policy.parameters()).dtype
        validate_half_precision(self.device, dtype, f"a policy in {dtype}")
        refuse_other_weights(args, dtype)
        self.reference = reference or make_reference(self.policy.base_model)
        refuse_unfit_models(self.policy, self.reference)
        self.first_reference, self.reference_phase = self.reference, 0
        if args.reset_reference_every is not None:
            validate_forwards(self.policy.base_model)
        self.forward = Forward.from_args(args)
        self.objective = Objective(args, self.functions, self.forward)
        self.tokenizer = self.policy.base_model.tokenizer
        if self.tokenizer is None:
            raise ConfigError("the policy has no tokenizer; give base_model one (set_tokenizer).")
        self.sampling_spec = SamplingSpec.from_args(args, self.tokenizer)
        self.engine = None
        if rollout_engine is not None:
            self.engine = EngineSampler(rollout_engine, args, self.sampling_spec)
        elif args.importance_correction != "none":
            raise ConfigError(
                f"importance_correction={args.importance_correction!r} requires a rollout_engine. "
                "Pass one, or set importance_correction='none'."
            )
        self.speaks_reel = speaks_reel(self.tokenizer) and "policy" not in self.own_parts
        self.starts_as_grammar = self.speaks_reel and args.base_model in BUNDLED
        self.prompts = Prompts(args, prompts, self.policy.base_model)
        self.rewards = RewardPipeline(
            args,
            self.tokenizer,
            load_reward(args, self.device)
            if reward_fn is None
            else resolve_custom_reward(reward_fn, args),
            gold_fn=gold_fn or (REWARDS["gold"] if self.speaks_reel else None),
            stop_tokens=self.sampling_spec.stops(self.tokenizer),
            check_grammar=self.speaks_reel,
            normalize=self.functions.normalize_reward,
            sample_greedily=self.sample_greedily if self.functions.wants_greedy(args) else None,
            compares=self.functions.compares_groups(args),
            score_by_rank=None if launched() == 1 else self._read_by_rank,
        )
        self.world = join(self.device, args.parallel)
        asked = self.prompts
        self.rewards.try_on(asked.tokens, asked.texts, asked.labels, asked.answers, asked.turns)
        refuse_unsharded_parts(args, self.policy, self.reference, optimizer)
        refuse_unequal(self)
        self.weights = weights_of(self.policy, args, self.world, self.forward)
        if optimizer is None and scheduler is None:
            self.optimizer, self.scheduler = get_optimizer_and_scheduler(args, self.policy)
            add_critic(self.optimizer, self.policy)
        else:
            own = own_optimizer_and_scheduler(args, self.policy, optimizer, scheduler)
            self.optimizer, self.scheduler = own
        in_backward = args.optimizer_in_backward
        self.step_in_backward = StepInBackward(self.optimizer) if in_backward else None
        self.weights.open()
        self.kl_controller = kl_controller or get_kl_controller(args)

    @property
    def prompt(self) -> list[int]:
        """The longest prompt, as token ids."""
        return max(self.prompts.tokens, key=len)

    @property
    def reward_fn(self) -> RewardFn:
        """From texts to rewards, before anything is done to them."""
        return self.rewards.reward_fn

    @property
    def rewarded_class(self) -> dict[str, Any] | None:
        """Index and label of the class that a sentiment reward pays; None for other rewards."""
        for reward in split_rewards(self.reward_fn).values():
            if isinstance(reward, SentimentReward):
                return {"index": reward.rewarded_class, "label": reward.rewarded_label}
        return None

    @property
    def gold_fn(self) -> RewardFn | None:
        """From texts to the known truth, where there is one."""
        return self.rewards.gold_fn

    def next_prompts(self) -> list[list[int]]:
        """The prompt of each row of this phase's batch; answers to one prompt stand together."""
        return self.prompts.of_batch(self.phase)

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        generator: torch.Generator,
        spec: SamplingSpec | None = None,
        at_once: int | None = None,
    ) -> Samples:
        """Let the policy continue prompts; by this phase's sampling spec when none is given.

        Args:
            at_once: sequences to generate at a time; `args.generation_batch_size` when None.

        Of several processes each writes its rows, with the noise that they have in one.
        """
        spec = spec or phase_spec(self.sampling_spec, self.args, self.phase)
        at_once = at_once or self.args.generation_batch_size
        rows = self.world.share(len(prompts))

        with self.world.together("sampling"):
            if self.engine is not None and self.engine.supports(spec):
                seed = int(torch.randint(2**31, (), generator=generator)) + (rows.start or 0)
                within = self.forward, self.args.rows_at_once
                samples = self.engine.sample(self.policy, prompts[rows], spec, seed, *within)
            else:
                within = self.forward, at_once, rows
                with merged_lora(self.policy):
                    samples = sample_in_parts(self.policy, prompts, spec, generator, *within)
        if not self.world.deals(len(prompts)):
            return samples
        return gathered_samples(self.world, samples, self.tokenizer.pad_token_id or 0)

    def compare_with_reference(self, samples: Samples) -> ReferenceComparison:
        """KL, entropy and the reference's residuals of samples; see `models.outputs`."""
        settings = self.args.temperature, self.args.rows_at_once, self.forward

        def compare(rows: Samples) -> ReferenceComparison:
            return compare_with_reference(self.policy, self.reference, rows, *settings)

        return by_rank(self.world, samples, compare, "comparing its samples with the reference")

    def _read_by_rank(
        self, samples: Samples, read: Callable[[Samples], RewardOutput]
    ) -> RewardOutput:
        """What a reward pays samples of which each process reads its rows."""
        return by_rank(self.world, samples, read, "scoring its samples")

    def sample_greedily(self, prompts: Sequence[Sequence[int]]) -> Samples:
        """The likeliest token at every step, behind each prompt."""
        spec = dataclasses.replace(self.sampling_spec, top_k=1, top_p=None)
        return self.sample(prompts, torch.Generator(), spec)
