"""Configurations that tests share, and finished runs of them with all events."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from rlhf_lab.samples import Samples
from rlhf_lab.training import Context, Event, ReplayMinibatch, RLHFTrainer, Rollout
from rlhf_lab.training.callbacks import FIELD_AVAILABILITY

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
    """Settings and custom components of a run, and the phases before its interruption.

    REWARD and CHAT in a setting stand for the directory of a reward model and of a chat model.
    """

    settings: dict[str, Any]
    parts: dict[str, Any] = {}
    stop_after: int = 1


RESETS = {"reset_reference_every": 2, "total_phases": 5, "base_lr": 3e-3}
PAIRS = {"samples_per_prompt": 2, "dynamic_sampling": 12, "normalize_reward": False}
IN_BACKWARD = {"optimizer_in_backward": True, "max_grad_norm": None}
HALF = {"weight_precision": "bf16", "value_head": "separate", "micro_batch_size": 2}
ROUNDED = IN_BACKWARD | {"weight_precision": "bf16_stochastic", "activation_checkpointing": True}
SCALED = {"reward_scaling": "scale_and_shift", "normalize_reward": False, "advantages": "remax"}
CHAT = {"base_model": "CHAT", "chat": True, "reward_fn": "count:w5", "prefix": "w1 w2"}
CONFIGURATIONS = {
    "plain": Configuration({"total_phases": 5, "base_lr": 1e-3, "seed": 2}, stop_after=2),
    "adapters": Configuration(
        {"lora_rank": 2, "lora_targets": "W_Q,W_V,W_O,W_in", "base_lr": 1e-2, "warmup_steps": 0}
    ),
    "detached": Configuration({"value_head": "detached", "base_lr": 1e-2}),
    "critic": Configuration({"value_head": "separate", "base_lr": 1e-2}),
    "adapters, critic": Configuration({"lora_rank": 2, "value_head": "separate", "base_lr": 1e-2}),
    "critic from a reward model": Configuration(
        {"value_head": "separate", "critic_path": "REWARD"}
    ),
    "token rewards": Configuration(
        {"reward_fn": "learned", "reward_model": "REWARD", "reward_per_token": True}
        | {"normalize_reward": False}
    ),
    "several rewards": Configuration(
        {"reward_fn": "smoothed,length,regex:.{1,999}", "reward_weights": (1.0, 0.5, 0.0)}
        | {"gen_len": 26}
    ),
    "state": Configuration(
        SCALED
        | {"kl_in": "reward", "kl_estimator": "k3", "kl_controller": "adaptive", "kl_target": 1e-3}
        | {"kl_horizon": 100, "base_lr": 1e-3, "total_phases": 3}
    ),
    "dynamic sampling": Configuration(
        PAIRS | {"normalize_reward": True, "gen_len_min": 4, "total_phases": 3},
        {"prompts": PROMPTS, "reward_fn": reward_by_prompt},
    ),
    "resets": Configuration(RESETS, stop_after=3),
    "resets, adapters": Configuration(RESETS | {"lora_rank": 2, "base_lr": 1e-2}, stop_after=3),
    "in backward": Configuration(IN_BACKWARD),
    "bf16": Configuration(HALF | {"warmup_steps": 0}),
    "bf16_stochastic": Configuration(ROUNDED | {"warmup_steps": 0, "base_lr": 1e-3}),
    "chat": Configuration(CHAT | {"gen_len": 8, "normalize_reward": False}),
}


class RecordedRun:
    """A finished run, with the fields of each event.

    Attributes:
        events: each event with its phase.
        fields: the fields of the context by event.
        weights: of the policy that sampled each batch, and of the final one.
    """

    def __init__(self, trainer: RLHFTrainer) -> None:
        self.trainer, self.path = trainer, trainer.recorder.out
        self.events: list[tuple[str, int]] = []
        self.fields: dict[str, set[str]] = {}
        self.weights: list[dict[str, Tensor]] = []
        self.rollouts: list[Rollout] = []
        self.rates: list[list[float]] = []  # of each step
        for event in get_args(Event):
            trainer.on(event)(self.observe)
        self.reports = trainer.train()
        self.weights.append(copy_weights(trainer.policy))

    def observe(self, ctx: Context) -> None:
        self.events.append((ctx.event, ctx.phase))
        self.fields[ctx.event] = {name for name in FIELD_AVAILABILITY if hasattr(ctx, name)}
        if ctx.event == "after_rollout":
            self.weights.append(copy_weights(ctx.policy))
        elif ctx.event == "after_score":
            self.rollouts.append(ctx.rollout)
        elif ctx.event == "after_step":
            self.rates.append([group["lr"] for group in self.trainer.optimizer.param_groups])


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
    return Rollout(samples=samples, true_rewards=None, grammatical=None, **defaults | fields)


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
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


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
    """Compare metrics, samples, evaluation and checkpoints bitwise."""
    assert read_metrics(found) == read_metrics(expected)
    assert (found / "samples.jsonl").read_bytes() == (expected / "samples.jsonl").read_bytes()
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
