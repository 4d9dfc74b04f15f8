"""Toy models for exercises: a small transformer, a rollout, a trainer."""

import copy
import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.config import RLHFArgs
from rlhf_lab.course.cases import Cases, Draws
from rlhf_lab.models import HookedTransformer, ModelConfig, TransformerWithValueHead, load_model
from rlhf_lab.models.hooked_model import HookedModel, frozen_copy
from rlhf_lab.training import RLHFTrainer, Rollout

TOY_VOCABULARY = 11
WHOLE_REVIEW = (
    "this movie wow , the plot was so solid and the music was so good and the script was so clever "
    ". i liked it ."
)
_loaded = functools.cache(load_model)
_frozen = functools.cache(lambda name: frozen_copy(_loaded(name)))


def toy_transformer(seed: int = 0, normalization_type: str = "LN") -> HookedModel:
    """One layer with random weights, the same for one seed; touches no other random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sizes = {"n_layers": 1, "d_model": 8, "n_ctx": 12, "d_head": 4, "n_heads": 2, "d_mlp": 16}
        kinds = {"act_fn": "gelu", "normalization_type": normalization_type}
        cfg = ModelConfig(**sizes, **kinds, d_vocab=TOY_VOCABULARY)
        model = HookedTransformer(cfg)
        for parameter in model.parameters():
            parameter.data = 0.5 * torch.randn(parameter.shape)
    return model


def residual_cases() -> Cases:
    """Cases of functions of a toy transformer's residual stream, of one with RMSNorm in one."""
    residual = lambda *shape: {"residual": Draws(0).normal(*shape, 8) + 0.5}
    return {
        "ordinary": residual(3, 4),
        "all layers at once": residual(2, 3, 4),
        "a single state": residual(),
        "RMSNorm": residual(3, 4) | {"norm": "RMS"},
    }


def toy_rollout(batch: int, padded: bool = False) -> Rollout:
    """A rollout in which every number of sequence i is i, so that a row shows its sequence."""

    def numbered(x: Tensor) -> Tensor:
        row = torch.arange(len(x)).reshape(-1, *(1,) * (x.ndim - 1))
        return x.clone() if x.dtype == torch.bool else row.expand(x.shape).to(x.dtype)

    rollout = toy_trainer(batch_size=batch, num_minibatches=1).rollout_phase()
    samples = rollout.samples.map(numbered)
    samples.prompt_mask[0, 0] = not padded
    tensors = {k: numbered(x) for k, x in vars(rollout).items() if isinstance(x, Tensor)}
    return dataclasses.replace(rollout, samples=samples, **tensors)


def toy_trainer(
    phase: int = 0, out: Path | None = None, ends_early: bool = False, **fields: Any
) -> RLHFTrainer:
    """A trainer of a few short texts whose policy has already left its reference, for one seed."""
    sizes = {"batch_size": 4, "num_minibatches": 2, "gen_len": 4, "total_phases": 4}
    sizes |= {"prefix": WHOLE_REVIEW} if ends_early else {}
    run = {"preset": "reel", "device": "cpu", "warmup_steps": 1}
    args = RLHFArgs(**run | sizes | fields)
    policy = TransformerWithValueHead(copy.deepcopy(_loaded(args.base_model)), seed=args.seed)
    parts = {"policy": policy, "reference": _frozen(args.base_model), "reward_fn": _letters}
    trainer = RLHFTrainer(args, out=out, **parts)
    generator = torch.Generator().manual_seed(0)
    for weight in (policy.base_model.unembed.W_U, policy.value_head[2].weight):
        weight.data += 0.1 * torch.randn(weight.shape, generator=generator)
    trainer.phase = phase
    return trainer


def _letters(texts: list[str]) -> Float[Tensor, " batch"]:
    return torch.tensor([float(len(text)) for text in texts])
