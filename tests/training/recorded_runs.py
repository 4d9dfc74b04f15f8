"""Configurations that tests share, and finished runs of them with all events."""

import importlib.util
import json
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn, optim
from torch.optim import NAdam
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, SequentialLR

from rlhf_lab.config import RLHFArgs
from rlhf_lab.rewards import load_policy_and_critic
from rlhf_lab.samples import Samples
from rlhf_lab.training import Context, Event, PhaseReport, ReplayMinibatch, RLHFTrainer, Rollout
from rlhf_lab.training.callbacks import FIELD_AVAILABILITY

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason="bitsandbytes comes with the extra eightbit",
)
PROMPTS = ["this movie", "honestly , the plot", "this film", "anyway , the acting was so"]
PROMPTS += ["basically , the", "folks , the script was"]
EQUAL = tuple(PROMPTS[::2])  # prompts whose responses all get the same reward


def reward_by_text(texts: list[str]) -> Tensor:
    """Return another number for each text."""
    return torch.tensor([zlib.crc32(text.encode()) / 2**32 for text in texts])


def reward_by_prompt(texts: list[str]) -> Tensor:
    """Return another number for each text, but 0.7 for the responses to half of the prompts."""
    return torch.where(
        torch.tensor([t.startswith(EQUAL) for t in texts]), 0.7, reward_by_text(texts)
    )


class Configuration(NamedTuple):
    """Settings of a run, a maker of its custom components, and the phases until it is interrupted.

    REWARD and CHAT in a setting stand for the directory of a reward model and of a chat model.
    """

    settings: dict[str, Any]
    make_parts: Callable[[], dict[str, Any]] = dict
    stop_after: int = 1
    hook: str | None = None  # a hook point that is read
    is_golden: bool = False  # safety_net.json has its numbers


class Scale:
    """A callable with state, for LambdaLR."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, phase: int) -> float:
        self.calls += 1
        return 1 / (1 + self.calls)


class IntegralController:
    """A controller whose coefficient depends on all KLs so far; its update returns None."""

    def __init__(self) -> None:
        self.kl_coef, self.seen = 0.3, []

    def update(self, kl_per_sequence: float, n_sequences: int) -> None:
        self.seen.append((kl_per_sequence, n_sequences))
        self.kl_coef = 0.3 + sum(kl for kl, _ in self.seen)


def make_optimizer(
    build: Callable[..., optim.Optimizer], schedule: Callable[..., Any] | None = None
) -> dict[str, Any]:
    """Return a policy with a custom optimizer and schedule, as components of a trainer."""
    policy = load_policy_and_critic(RLHFArgs(preset="reel"), torch.device("cpu"))
    parts = {"policy": policy, "optimizer": build(policy.parameters())}
    return parts | ({} if schedule is None else {"scheduler": schedule(parts["optimizer"])})


def make_schedules(optimizer: optim.Optimizer) -> SequentialLR:
    parts = [LambdaLR(optimizer, Scale()), CosineAnnealingLR(optimizer, T_max=3)]
    return SequentialLR(optimizer, parts, milestones=[1])


def mean_square_entropy(entropy: Tensor, ent_coef: float, mask: Tensor | None = None) -> Tensor:
    return ent_coef * entropy.square().mean()


PLAIN = {"total_phases": 5, "save_every": 2, "base_lr": 1e-3, "seed": 2, "temperature": 2.0}
RESETS = {"reset_reference_every": 2, "total_phases": 5, "base_lr": 3e-3}
PAIRS = {"samples_per_prompt": 2, "dynamic_sampling": 12, "normalize_reward": False}
IN_BACKWARD = {"optimizer_in_backward": True, "max_grad_norm": None}
ROUNDED = IN_BACKWARD | {"weight_precision": "bf16_stochastic", "activation_checkpointing": True}
RAW = {"normalize_reward": False}
ADAPTERS = {"lora_rank": 2, "base_lr": 1e-2}
SCALED = {"reward_scaling": "scale_and_shift", "advantages": "remax", "kl_in": "reward"} | RAW
ADAPTIVE = {"kl_controller": "adaptive", "kl_target": 1e-3, "kl_horizon": 100}
ADAPTIVE |= {"kl_estimator": "k3"}
CHAT = {"base_model": "CHAT", "chat": True, "reward_fn": "count:w5", "prefix": "w1 w2"}
GOLDEN = {"preset": "reel", "device": "cpu", "total_phases": 3, "batch_size": 16}
GOLDEN |= {"num_minibatches": 2, "gen_len": 26, "warmup_steps": 2}


def small(
    make_parts: Callable[[], dict[str, Any]] = dict, stop_after: int = 1, **settings: Any
) -> Configuration:
    return Configuration(settings, make_parts, stop_after)


def golden(
    make_parts: Callable[[], dict[str, Any]] = dict, hook: str | None = None, **settings: Any
) -> Configuration:
    return Configuration(GOLDEN | settings, make_parts, 1, hook, is_golden=True)


UNEQUAL = ["this movie", "honestly , the plot", "anyway , the acting was so"]
PENALTIES = {"reward_clip": 2.0, "stop_at_eos": True, "min_response_length": 24}
PENALTIES |= {"overlong_buffer": 4, "reward_scaling": "scale_and_shift"}
CONFIGURATIONS = {
    "defaults": golden(),
    "kl in reward, k1": golden(kl_in="reward", kl_estimator="k1"),
    "micro-batches": golden(micro_batch_size=4),
    "gspo": golden(policy_loss="gspo", loss_aggregation="sequence_mean", clip_coef=0.002),
    "target_kl stops": golden(target_kl=1e-4, base_lr=1e-3),
    "in backward": golden(**IN_BACKWARD),
    "remax": golden(advantages="remax", normalize_reward=False),
    "rloo, lora, k3": golden(
        advantages="rloo", samples_per_prompt=4, lora_rank=2, kl_estimator="k3", base_lr=3e-4
    ),
    "separate critic, bf16": golden(value_head="separate", precision="bf16"),
    "own entropy bonus": golden(lambda: {"entropy_bonus": mean_square_entropy}, ent_coef=0.01),
    "a hook on a pattern": golden(hook="blocks.1.attn.hook_pattern"),
    "unequal prompts, drawn lengths": golden(
        lambda: {"prompts": UNEQUAL}, gen_len=24, gen_len_min=18, value_head="detached"
    ),
    "penalties, scaling, clip": golden(normalize_reward=False, **PENALTIES),
    "ratio_threshold skips": golden(
        ratio_threshold=1.0005, base_lr=3e-3, clip_coef_high=0.3, dual_clip=3.0
    ),
    "activation checkpointing, top-p": golden(
        activation_checkpointing=True, top_k=None, top_p=0.9, temperature=1.3
    ),
    "adaptive KL": golden(kl_controller="adaptive"),
    # the third phase is done twice when it is resumed
    "plain": small(stop_after=3, stop_tokens="was", **PLAIN),
    "adapters": small(lora_targets="W_Q,W_V,W_O,W_in", warmup_steps=0, **ADAPTERS),
    "critic": small(value_head="separate", base_lr=1e-2, micro_batch_size=2),
    "adapters, critic": small(value_head="separate", **ADAPTERS),
    "critic from a reward model": small(value_head="separate", critic_path="REWARD"),
    "token rewards": small(
        reward_fn="learned", reward_model="REWARD", reward_per_token=True, **RAW
    ),
    "several rewards": small(
        reward_fn="smoothed,length,regex:.{1,999}", reward_weights=(1.0, 0.5, 0.0), gen_len=26
    ),
    "state": small(base_lr=1e-3, total_phases=3, **SCALED, **ADAPTIVE),
    "dynamic sampling": small(
        lambda: {"prompts": PROMPTS, "reward_fn": reward_by_prompt},
        **PAIRS | {"normalize_reward": True, "gen_len_min": 3, "total_phases": 3},
    ),
    "resets": small(stop_after=2, **RESETS),  # at a reset
    "resets, adapters": small(stop_after=3, **RESETS | ADAPTERS),
    "bf16": small(warmup_steps=0, weight_precision="bf16", value_head="separate"),
    "teacher": small(method="gkd", reference_model="reel-nano-b", warmup_steps=0),
    "bf16_stochastic": small(warmup_steps=0, base_lr=1e-3, **ROUNDED),
    "chat": small(gen_len=8, **CHAT, **RAW),
    "8-bit moments": small(optimizer="adamw_8bit", warmup_steps=0, base_lr=1e-3, gen_len=12),
    "schedule with state": small(
        lambda: make_optimizer(partial(NAdam, lr=1e-4), make_schedules),
        stop_after=2,
        total_phases=4,
    ),
    "custom controller": small(
        lambda: {"kl_controller": IntegralController()}, stop_after=2, total_phases=4
    ),
}
RECORDED = ("after_rollout", "after_step", "after_phase", "checkpoint", "run_end")


def record_sums(ctx: Context) -> dict[str, float]:
    """Return the sum of the weights and the coefficient, which the run stores."""
    weights = sum(p.double().sum().item() for p in ctx.policy.parameters())
    return {"weights": weights, "coef": ctx.kl_coef}


def record(trainer: RLHFTrainer) -> RLHFTrainer:
    """Register `record_sums` at the events that a resumed run repeats exactly."""
    for event in RECORDED:
        trainer.on(event)(record_sums)
    return trainer


class RecordedRun:
    """A finished run, with the fields of each event.

    Attributes:
        events: each event with its phase.
        fields: the fields of the context by event.
        weights: of the policy that sampled each batch, and of the final one.
    """

    def __init__(self, trainer: RLHFTrainer, hook: str | None = None) -> None:
        self.trainer, self.path = trainer, trainer.recorder.out
        self.events: list[tuple[str, int]] = []
        self.fields: dict[str, set[str]] = {}
        self.weights: list[dict[str, Tensor]] = []
        self.rollouts: list[Rollout] = []
        self.has_gradients: list[bool] = []  # before the backward pass of each minibatch
        self.rates: list[list[float]] = []  # of each step
        self.cards: list[str] = []  # after each save of the state
        for event in get_args(Event):
            trainer.on(event)(self.observe)
        record(trainer)
        if hook is not None:
            trainer.policy.base_model.add_hook(hook, lambda activation, hook: None)
        self.reports = trainer.train()
        self.weights.append(copy_weights(trainer.policy))

    def after(self, phases: int) -> tuple[dict[str, Tensor], list[PhaseReport]]:
        """Return the weights and the reports after some phases."""
        return self.weights[phases], self.reports[:phases]

    def observe(self, ctx: Context) -> None:
        self.events.append((ctx.event, ctx.phase))
        self.fields[ctx.event] = {name for name in FIELD_AVAILABILITY if hasattr(ctx, name)}
        if ctx.event == "after_rollout":
            self.weights.append(copy_weights(ctx.policy))
        elif ctx.event == "after_score":
            self.rollouts.append(ctx.rollout)
        elif ctx.event == "after_loss":
            self.has_gradients.append(any(p.grad is not None for p in ctx.policy.parameters()))
        elif ctx.event == "after_step":
            self.rates.append([group["lr"] for group in self.trainer.optimizer.param_groups])
        elif ctx.event == "checkpoint" and ctx.checkpoint.stem == "last":
            self.cards.append((ctx.run.path / "README.md").read_text(encoding="utf-8"))


def make_minibatch(logprobs: Tensor, advantages: Tensor, **fields: Any) -> ReplayMinibatch:
    """Return a minibatch of responses to prompts of 2 tokens; everything else is 0."""
    batch, gen = logprobs.shape
    zeros = torch.zeros(batch, gen)
    defaults = {
        "tokens": torch.zeros(batch, 2 + gen, dtype=torch.long),
        "attention_mask": torch.ones(batch, 2 + gen, dtype=torch.bool),
        "mask": torch.ones(batch, gen, dtype=torch.bool),
        "values": zeros,
        "returns": zeros,
        "ref_residuals": torch.zeros(batch, gen, 2),
        "support": None,
    }
    return ReplayMinibatch(logprobs=logprobs, advantages=advantages, **defaults | fields)


def make_rollout(samples: Samples, **fields: Any) -> Rollout:
    """Return a rollout of these samples; everything else is 0."""
    zeros, rewards = torch.zeros(samples.mask.shape), torch.zeros(len(samples.mask))
    names = ("kl", "entropy", "advantages", "returns")
    defaults = dict.fromkeys(names, zeros) | {"ref_residuals": zeros[..., None]}
    defaults |= {"raw_rewards": rewards, "rewards": rewards, "texts": [""] * len(rewards)}
    return Rollout(samples=samples, true_rewards=None, **defaults | fields)


def copy_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


@torch.no_grad()
def move_weights(model: nn.Module) -> nn.Module:
    """Move the weights, so ratios, values and KL differ from their starting values; return it."""
    generator = torch.Generator().manual_seed(5)
    for weight in model.parameters():
        weight += 0.02 * torch.randn(weight.shape, generator=generator).to(weight.device)
    return model


def is_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name].cpu(), b[name].cpu()) for name in a)


def read_files(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without `cost`, which depends on the clock."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "cost"} for line in lines]


def tensorboard_events(run: Path) -> Any:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return events


def assert_same_run(found: Path, expected: Path) -> None:
    """Compare metrics, samples, records of callbacks, evaluation and checkpoints bitwise."""
    assert read_metrics(found) == read_metrics(expected)
    for file in ("samples.jsonl", *(f"returned/{x.name}" for x in expected.glob("returned/*"))):
        assert (found / file).read_bytes() == (expected / file).read_bytes(), file
    info, whole = (json.loads((run / "run.json").read_text()) for run in (found, expected))
    assert info["status"] == whole["status"] == "finished" and info["final"] == whole["final"]
    names = {path.name for path in (expected / "checkpoints").iterdir()}
    assert {path.name for path in (found / "checkpoints").iterdir()} == names
    for name in names:
        files = (load_file(run / "checkpoints" / name) for run in (found, expected))
        assert is_equal(*files), name


def train_partly(trainer: RLHFTrainer, phases: int = 2) -> Path:
    """Stop a run after a few phases, as a kill does, and return its directory."""
    for _ in range(phases):
        trainer.run_phase()
    trainer.recorder.break_off(KeyboardInterrupt())
    return trainer.run.path


MakeRun = Callable[[str], RecordedRun]
