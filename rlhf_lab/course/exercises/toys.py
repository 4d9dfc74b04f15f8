"""Toy models for exercises: a small transformer, a rollout, a trainer."""

import copy
import functools
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.config import RLHFArgs
from rlhf_lab.models import HookedTransformer, ModelConfig, TransformerWithValueHead, load_model
from rlhf_lab.models.hooked_model import HookedModel, frozen_copy
from rlhf_lab.sampling import Samples
from rlhf_lab.training import RLHFTrainer, Rollout

TOY_VOCABULARY = 11


def toy_transformer(seed: int = 0, normalization_type: str = "LN") -> HookedModel:
    """One layer with random weights, the same for one seed; touches no other random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        cfg = ModelConfig(
            n_layers=1,
            d_model=8,
            n_ctx=12,
            d_head=4,
            n_heads=2,
            d_mlp=16,
            d_vocab=TOY_VOCABULARY,
            act_fn="gelu",
            normalization_type=normalization_type,
        )
        model = HookedTransformer(cfg)
        for parameter in model.parameters():
            parameter.data = 0.5 * torch.randn(parameter.shape)
    return model


def toy_rollout(batch: int, gen: int = 3, prefix_len: int = 2, padded: bool = False) -> Rollout:
    """A rollout in which every number of sequence i is i, so that a row tells where it is from."""
    row = torch.arange(batch)
    prompt_mask = torch.ones(batch, prefix_len, dtype=torch.bool)
    prompt_mask[0, 0] = not padded
    per_token = row[:, None].expand(batch, gen).float()
    samples = Samples(
        tokens=row[:, None].expand(batch, prefix_len + gen),
        prompt_mask=prompt_mask,
        mask=torch.ones(batch, gen, dtype=torch.bool),
        logprobs=per_token,
        values=per_token,
        support=None,
    )
    return Rollout(
        samples=samples,
        texts=[str(i) for i in range(batch)],
        raw_rewards=row.float(),
        rewards=row.float(),
        true_rewards=None,
        grammatical=None,
        kl=per_token,
        entropy=per_token,
        ref_residuals=per_token[..., None].expand(batch, gen, 2),
        advantages=per_token,
        returns=per_token,
    )


def toy_trainer(phase: int = 0, out: Path | None = None, **fields: Any) -> RLHFTrainer:
    """A trainer of a few short texts whose policy has already left its reference, for one seed."""
    sizes = {"batch_size": 4, "num_minibatches": 2, "gen_len": 4, "total_phases": 4}
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


_loaded = functools.cache(load_model)
_frozen = functools.cache(lambda name: frozen_copy(_loaded(name)))


def _letters(texts: list[str]) -> Float[Tensor, " batch"]:
    return torch.tensor([float(len(text)) for text in texts])
