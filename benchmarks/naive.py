"""A naive PPO baseline on a HookedTransformer, as a learner would finish the ARENA notebook.

Three separate forwards per rollout (generation, the policy again, the reference), the reference's
logits kept over the whole vocabulary, the full log-softmax before the gather, and the default
AdamW. Log-probabilities are of the whole distribution, even where top-k sampling cut it.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from eindex import eindex
from jaxtyping import Float, Int
from torch import Tensor, nn

from benchmarks.worker import Clock, Setup, serve
from rlhf_lab.models import HookedTransformer, load_model
from rlhf_lab.models.hooked_transformer import HookPoint
from rlhf_lab.models.kv_cache import KVCache


@dataclass(frozen=True)
class NaiveArgs:
    """The notebook's settings, with its default values."""

    prefix: str = "This is"
    batch_size: int = 32
    num_minibatches: int = 4
    batches_per_learning_phase: int = 2
    gen_len: int = 50
    top_k: int | None = 10
    base_lr: float = 2e-5
    head_lr: float = 5e-4
    max_grad_norm: float = 1.0
    warmup_steps: int = 20
    total_phases: int = 200
    final_scale: float = 0.1
    clip_coef: float = 0.2
    vf_coef: float = 0.15
    ent_coef: float = 0.001
    kl_coef: float = 2.5


class TransformerWithValueHead(nn.Module):
    """A transformer, and a value head that a hook feeds with the last normalised residual."""

    def __init__(self, base_model: HookedTransformer) -> None:
        super().__init__()
        self.base_model = base_model
        d_model = base_model.cfg.d_model
        self.value_head = nn.Sequential(
            nn.Linear(d_model, 4 * d_model), nn.ReLU(), nn.Linear(4 * d_model, 1)
        ).to(base_model.cfg.device)

    def forward(
        self, tokens: Int[Tensor, "batch seq"]
    ) -> tuple[Float[Tensor, "batch seq d_vocab"], Float[Tensor, "batch seq"]]:
        """Logits and values at every position."""
        values = None

        def calc_values(normalized: Float[Tensor, "batch seq d_model"], hook: HookPoint) -> None:
            nonlocal values
            values = self.value_head(normalized).squeeze(-1)

        logits = self.base_model.run_with_hooks(
            tokens, fwd_hooks=[("ln_final.hook_normalized", calc_values)]
        )
        return logits, values


def get_samples(
    base_model: HookedTransformer, args: NaiveArgs
) -> tuple[Int[Tensor, "batch seq"], list[str]]:
    """Continue the prefix `batch_size` times; also returns the texts, without BOS."""
    tokens = base_model.to_tokens(args.prefix, prepend_bos=True).repeat(args.batch_size, 1)
    cache, unread = KVCache.empty(base_model.cfg.n_layers), tokens
    with torch.no_grad():
        for _ in range(args.gen_len):
            logits = base_model(unread, past_kv_cache=cache)[:, -1]
            top, ids = logits.topk(args.top_k or logits.shape[-1])
            unread = ids.gather(-1, torch.multinomial(top.softmax(-1), 1))
            tokens = torch.cat([tokens, unread], 1)
    return tokens, base_model.tokenizer.batch_decode(tokens, skip_special_tokens=True)


def normalize_reward(reward: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
    """Rewards with mean 0 and standard deviation 1."""
    return (reward - reward.mean()) / (reward.std() + 1e-5)


def compute_advantages(
    values: Float[Tensor, "batch seq"], rewards: Float[Tensor, " batch"], prefix_len: int
) -> Float[Tensor, "batch gen"]:
    """The next state's value, or at the end the reward, minus this state's value."""
    one_step = torch.cat([values[:, prefix_len:-1], rewards[:, None]], dim=-1)
    return one_step - values[:, prefix_len - 1 : -1]


@dataclass(frozen=True)
class ReplayMinibatch:
    """Some rows of the memory."""

    tokens: Int[Tensor, "minibatch seq"]
    logprobs: Float[Tensor, "minibatch gen"]
    advantages: Float[Tensor, "minibatch gen"]
    returns: Float[Tensor, "minibatch gen"]
    ref_logits: Float[Tensor, "minibatch seq d_vocab"]


@dataclass(frozen=True)
class ReplayMemory:
    """What the rollout phase leaves to learn from."""

    args: NaiveArgs
    tokens: Int[Tensor, "batch seq"]
    logprobs: Float[Tensor, "batch gen"]
    advantages: Float[Tensor, "batch gen"]
    values: Float[Tensor, "batch seq"]
    ref_logits: Float[Tensor, "batch seq d_vocab"]

    def get_minibatches(self) -> Iterator[ReplayMinibatch]:
        """All rows in a random order, several times over."""
        returns = self.advantages + self.values[:, -self.args.gen_len - 1 : -1]
        for _ in range(self.args.batches_per_learning_phase):
            order = torch.randperm(self.args.batch_size, device=self.tokens.device)
            for rows in order.reshape(self.args.num_minibatches, -1):
                yield ReplayMinibatch(
                    self.tokens[rows],
                    self.logprobs[rows],
                    self.advantages[rows],
                    returns[rows],
                    self.ref_logits[rows],
                )


def get_logprobs(
    logits: Float[Tensor, "batch seq d_vocab"], tokens: Int[Tensor, "batch seq"], prefix_len: int
) -> Float[Tensor, "batch gen"]:
    """Log-probabilities of the generated tokens."""
    logprobs = logits[:, prefix_len - 1 :].log_softmax(-1)
    return eindex(logprobs, tokens[:, prefix_len - 1 :], "b s [b s+1]")


def calc_kl_penalty(
    logits: Float[Tensor, "batch gen d_vocab"],
    ref_logits: Float[Tensor, "batch gen d_vocab"],
    kl_coef: float,
) -> Float[Tensor, ""]:
    """The mean KL divergence from the reference, over the whole vocabulary, weighted."""
    logprobs, ref_logprobs = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return kl_coef * (logprobs.exp() * (logprobs - ref_logprobs)).sum(-1).mean()


def calc_entropy_bonus(
    logits: Float[Tensor, "batch gen d_vocab"], ent_coef: float
) -> Float[Tensor, ""]:
    """The mean entropy, weighted."""
    logprobs = logits.log_softmax(-1)
    return -ent_coef * (logprobs.exp() * logprobs).sum(-1).mean()


def calc_value_loss(
    values: Float[Tensor, "batch gen"], returns: Float[Tensor, "batch gen"], vf_coef: float
) -> Float[Tensor, ""]:
    """Half the mean squared error of the values, weighted."""
    return 0.5 * vf_coef * (values - returns).pow(2).mean()


def calc_clipped_surrogate(
    logprobs: Float[Tensor, "batch gen"],
    old_logprobs: Float[Tensor, "batch gen"],
    advantages: Float[Tensor, "batch gen"],
    clip_coef: float,
) -> Float[Tensor, ""]:
    """PPO's clipped objective, with advantages of mean 0 and standard deviation 1."""
    ratio = (logprobs - old_logprobs).exp()
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    clipped = ratio.clip(1 - clip_coef, 1 + clip_coef)
    return torch.minimum(ratio * advantages, clipped * advantages).mean()


class NaiveTrainer:
    """One rollout phase and one learning phase at a time.

    Args:
        policy: changed in place; its frozen copy is the reference.
        reward_fn: from texts to rewards.
    """

    def __init__(
        self,
        args: NaiveArgs,
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
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.lr_scale)

    def lr_scale(self, phase: int) -> float:
        """A linear rise to 1, which starts above 0, then a linear fall to `final_scale`."""
        args = self.args
        if phase < args.warmup_steps:
            return (phase + 1) / (args.warmup_steps + 1)
        done = (phase - args.warmup_steps) / (args.total_phases - args.warmup_steps)
        return 1 - (1 - args.final_scale) * min(1.0, done)

    def rollout_phase(self, lap: Callable[[str], None] = lambda stage: None) -> ReplayMemory:
        """Sample a batch and score it."""
        tokens, texts = get_samples(self.policy.base_model, self.args)
        lap("rollout/sampling")
        memory = self.remember(tokens, texts)
        lap("rollout/scoring")
        return memory

    @torch.no_grad()
    def remember(self, tokens: Int[Tensor, "batch seq"], texts: list[str]) -> ReplayMemory:
        """Rewards, and what policy and reference say about sequences that were sampled."""
        rewards = normalize_reward(self.reward_fn(texts).to(tokens.device))
        logits, values = self.policy(tokens)
        ref_logits = self.reference(tokens)
        advantages = compute_advantages(values, rewards, self.prefix_len)
        logprobs = get_logprobs(logits, tokens, self.prefix_len)
        return ReplayMemory(self.args, tokens, logprobs, advantages, values, ref_logits)

    def objective(self, minibatch: ReplayMinibatch) -> Float[Tensor, ""]:
        """Clipped surrogate - value loss + entropy bonus - KL penalty, to be maximised."""
        args, generated = self.args, slice(self.prefix_len - 1, -1)
        logits, values = self.policy(minibatch.tokens)
        logprobs = get_logprobs(logits, minibatch.tokens, self.prefix_len)
        logits, ref_logits = logits[:, generated], minibatch.ref_logits[:, generated]
        surrogate = calc_clipped_surrogate(
            logprobs, minibatch.logprobs, minibatch.advantages, args.clip_coef
        )
        value_loss = calc_value_loss(values[:, generated], minibatch.returns, args.vf_coef)
        entropy = calc_entropy_bonus(logits, args.ent_coef)
        return surrogate - value_loss + entropy - calc_kl_penalty(logits, ref_logits, args.kl_coef)

    def learning_phase(
        self, memory: ReplayMemory, lap: Callable[[str], None] = lambda stage: None
    ) -> None:
        """One optimiser step per minibatch."""
        for minibatch in memory.get_minibatches():
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
    """A trainer on the weights that all contestants share, and a function that does one phase."""
    args = NaiveArgs(
        prefix=setup["prefix"],
        batch_size=setup["batch_size"],
        num_minibatches=setup["num_minibatches"],
        batches_per_learning_phase=setup["passes"],
        gen_len=setup["gen_len"],
        top_k=setup["top_k"],
    )
    policy = TransformerWithValueHead(load_model(setup["model"], device=setup["device"]))

    def count(texts: Sequence[str]) -> Float[Tensor, " batch"]:
        return torch.tensor([float(text.count(setup["rewarded"])) for text in texts])

    trainer = NaiveTrainer(args, policy, count)

    def phase(clock: Clock) -> None:
        trainer.learning_phase(trainer.rollout_phase(clock.lap), clock.lap)

    return phase


if __name__ == "__main__":
    serve(load, ("torch", "transformers", "transformer_lens"))
