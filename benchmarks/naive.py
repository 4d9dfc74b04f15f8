"""A naive PPO baseline: the functions of the lessons in a loop, as a learner would write it.

Three separate forward passes per rollout (sampling, the policy again, the reference), the
reference's logits kept over the whole vocabulary, one log-softmax per term, and the default AdamW.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from benchmarks.worker import Clock, Setup, serve
from rlhf_lab import functional as F
from rlhf_lab.config import RLHFArgs
from rlhf_lab.models import HookedTransformer, TransformerWithValueHead, load_model
from rlhf_lab.models.kv_cache import KVCache
from rlhf_lab.training.optim import lr_scale


@torch.no_grad()
def get_samples(
    base_model: HookedTransformer, args: RLHFArgs
) -> tuple[Int[Tensor, "batch seq"], list[str]]:
    """Continue the prefix `batch_size` times; returns also the texts, without BOS."""
    tokens = base_model.to_tokens(args.prefix, prepend_bos=True).repeat(args.batch_size, 1)
    cache, unread = KVCache(base_model.cfg.n_layers), tokens
    for _ in range(args.gen_len):
        logits = base_model(unread, past_kv_cache=cache)[:, -1]
        top, ids = logits.topk(args.top_k or logits.shape[-1])
        unread = ids.gather(-1, torch.multinomial(top.softmax(-1), 1))
        tokens = torch.cat([tokens, unread], 1)
    return tokens, base_model.tokenizer.batch_decode(tokens, skip_special_tokens=True)


@dataclass(frozen=True)
class NaiveMemory:
    """Samples with their rewards and statistics, or some rows of them."""

    tokens: Int[Tensor, "batch seq"]
    logprobs: Float[Tensor, "batch gen"]
    advantages: Float[Tensor, "batch gen"]
    returns: Float[Tensor, "batch gen"]
    ref_logits: Float[Tensor, "batch seq d_vocab"]

    def take(self, rows: Int[Tensor, " row"]) -> "NaiveMemory":
        """Select some rows."""
        return NaiveMemory(*(column[rows] for column in vars(self).values()))


class NaiveTrainer:
    """A trainer that runs one phase at a time and changes the policy in place."""

    def __init__(
        self,
        args: RLHFArgs,
        policy: TransformerWithValueHead,
        reward_fn: Callable[[Sequence[str]], Float[Tensor, " batch"]],
    ) -> None:
        self.args, self.policy, self.reward_fn = args, policy, reward_fn
        self.reference = deepcopy(policy.base_model).requires_grad_(False)
        self.prefix_len = policy.base_model.to_tokens(args.prefix, prepend_bos=True).shape[1]
        groups = [
            {"params": policy.base_model.parameters(), "lr": args.base_lr},
            {"params": policy.value_head.parameters(), "lr": args.head_lr},
        ]
        self.optimizer = torch.optim.AdamW(groups, maximize=True)
        schedule = args.warmup_steps, args.total_phases, args.final_scale
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda phase: lr_scale(phase, *schedule)
        )

    def rollout_phase(self, lap: Callable[[str], None] = lambda stage: None) -> NaiveMemory:
        """Sample a batch and score it."""
        tokens, texts = get_samples(self.policy.base_model, self.args)
        lap("rollout/sampling")
        memory = self.score(tokens, texts)
        lap("rollout/scoring")
        return memory

    @torch.no_grad()
    def score(self, tokens: Int[Tensor, "batch seq"], texts: list[str]) -> NaiveMemory:
        """Compute rewards, log-probabilities, values and the reference's logits of samples."""
        rewards = F.normalize_reward(self.reward_fn(texts).to(tokens.device))
        logits, values = self.policy(tokens)
        values = values[:, self.prefix_len - 1 : -1]
        advantages = F.compute_advantages(values, rewards)
        returns = F.compute_returns(advantages, values)
        logprobs = F.get_logprobs(logits, tokens, self.prefix_len)
        return NaiveMemory(tokens, logprobs, advantages, returns, self.reference(tokens))

    def objective(self, minibatch: NaiveMemory) -> Float[Tensor, ""]:
        """Compute clipped surrogate - value loss + entropy bonus - KL penalty."""
        args, generated = self.args, slice(self.prefix_len - 1, -1)
        logits, values = self.policy(minibatch.tokens)
        logprobs = F.get_logprobs(logits, minibatch.tokens, self.prefix_len)
        logits, ref_logits = logits[:, generated], minibatch.ref_logits[:, generated]
        kl = F.kl_per_token(logits.log_softmax(-1), ref_logits.log_softmax(-1))
        entropy = F.entropy_per_token(logits.log_softmax(-1))
        surrogate = F.calc_clipped_surrogate_objective(
            logprobs, minibatch.logprobs, minibatch.advantages, args.clip_coef
        )
        return (
            surrogate
            - F.calc_value_function_loss(values[:, generated], minibatch.returns, args.vf_coef)
            + F.calc_entropy_bonus(entropy, args.ent_coef)
            - F.calc_kl_penalty(kl, args.kl_coef)
        )

    def minibatches(self, memory: NaiveMemory) -> Iterator[NaiveMemory]:
        """Yield all rows in a random order, several times."""
        for _ in range(self.args.batches_per_learning_phase):
            order = torch.randperm(self.args.batch_size, device=memory.tokens.device)
            yield from map(memory.take, order.reshape(self.args.num_minibatches, -1))

    def learning_phase(
        self, memory: NaiveMemory, lap: Callable[[str], None] = lambda stage: None
    ) -> None:
        """Make one optimizer step per minibatch."""
        for minibatch in self.minibatches(memory):
            lap("learning/minibatches")
            objective = self.objective(minibatch)
            lap("learning/forward")
            self.optimizer.zero_grad()
            objective.backward()
            lap("learning/backward")
            nn.utils.clip_grad_norm_(self.policy.parameters(), self.args.max_grad_norm)
            self.optimizer.step()
            lap("learning/optimizer")
        self.scheduler.step()


def load(setup: Setup) -> Callable[[Clock], None]:
    """Load a trainer with the shared weights; returns a function that runs one phase."""
    args = RLHFArgs(
        prefix=setup["prefix"],
        batch_size=setup["batch_size"],
        num_minibatches=setup["num_minibatches"],
        batches_per_learning_phase=setup["passes"],
        gen_len=setup["gen_len"],
        top_k=setup["top_k"],
    )
    policy = TransformerWithValueHead(load_model(setup["model"], device=setup["device"]))
    count = lambda texts: torch.tensor([float(text.count(setup["rewarded"])) for text in texts])
    trainer = NaiveTrainer(args, policy, count)
    return lambda clock: trainer.learning_phase(trainer.rollout_phase(clock.lap), clock.lap)


if __name__ == "__main__":
    serve(load, ("torch", "transformers", "transformer_lens"))
