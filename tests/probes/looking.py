"""Short runs whose models a probe is shown after training, as often as a test likes."""

import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_lab.config import RLHFArgs
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.probes import EvalText, Observation, Probe, Record, ReelTruth, Run
from rlhf_lab.training import Context, RLHFTrainer
from tests.small_runs import SMALL

SHORT = SMALL | {"reward_fn": "sentiment", "batch_size": 16, "gen_len": 26}
SHORT |= {"stop_tokens": ".", "base_lr": 3e-3}
ADAPTED = {"temperature": 0.9, "lora_rank": 4, "lora_targets": "W_Q W_K W_V W_O W_in"}
PROMPTS = "this movie\nthis\nthis film really\n"


class Trained(NamedTuple):
    """A run that is over, as seen after the last rollout that was scored."""

    trainer: RLHFTrainer
    ctx: Context
    tokens: Tensor  # eval text
    truth: ReelTruth | None  # if the policy speaks Reel
    mask: Tensor

    def seen(self) -> Observation:
        """What a probe is shown; the weights are those after the last phase."""
        return Observation(
            ctx=self.ctx,
            args=self.trainer.args,
            prefix_len=len(self.trainer.prompt),
            custom_components=[],
            acts={},
            reference_acts={},
            text=EvalText.of(self.tokens, self.mask),
            truth=self.truth,
        )


def train_soundly(trainer: RLHFTrainer) -> Run:
    """Train to the end: no probe was switched off, and all checks hold."""
    trainer.train()
    run = Run(trainer.run.path)
    assert run.notes() == [] and run.checks()
    assert [(x.phase, x.probe, x.name, x.value) for x in run.checks() if not x.ok] == []
    return run


def same_weights(one: RLHFTrainer, other: RLHFTrainer) -> bool:
    pairs = zip(one.policy.parameters(), other.policy.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def trained(trainer: RLHFTrainer, tokens: Tensor, truth: ReelTruth | None) -> Trained:
    """Train to the end, and keep what the last event after scoring showed."""
    found: list[Any] = []
    trainer.on("after_score")(found.append)
    trainer.train()
    return Trained(trainer, found[-1], tokens, truth, torch.ones_like(tokens).bool())


def sound(run: Trained, probe: Probe) -> Record:
    """One record, whose own checks all hold."""
    with torch.no_grad():
        record = probe.observe(run.seen())
    assert [check for check in record.checks if not check.ok] == []
    return record


def with_models(run: Trained, reference: HookedModel, model: HookedModel) -> Observation:
    """Return the observation of a run with other models."""
    seen = run.seen()
    policy, ctx = copy.copy(seen.ctx.policy), copy.copy(seen.ctx)
    policy.__dict__ = {**policy.__dict__, "_modules": {**policy._modules, "base_model": model}}
    object.__setattr__(ctx, "policy", policy)
    object.__setattr__(ctx, "reference", reference)
    return seen.__class__(**{**vars(seen), "ctx": ctx})


def adapted_run(place: Path) -> Trained:
    """Reel, with adapters on all that attention does."""
    truth = ReelTruth()
    args = RLHFArgs(**SHORT | ADAPTED)
    return trained(RLHFTrainer(args, out=place / "run"), truth.reviews(24, seed=5)[0], truth)


def padded_run(place: Path) -> Trained:
    """Reel, from prompts of unequal length, and samples that stop early."""
    (place / "prompts.txt").write_text(PROMPTS)
    args = RLHFArgs(**SHORT | {"prompts": str(place / "prompts.txt"), "gen_len": 20})
    truth = ReelTruth()
    return trained(RLHFTrainer(args, out=place / "run"), truth.reviews(4, seed=5)[0], truth)


def grouped_run(place: Path, model: Path, tokens: Tensor, mask: Tensor) -> Trained:
    """A model from a directory that does not speak Reel."""
    sizes = dict(total_phases=2, warmup_steps=0, batch_size=8, num_minibatches=2, gen_len=8)
    words = dict(reward_fn="count:w1", prefix="w3 w4")
    args = RLHFArgs(base_model=str(model), base_lr=5e-3, **sizes, **words)
    return trained(RLHFTrainer(args, out=place / "run"), tokens, None)._replace(mask=mask)
