"""Digests of the inputs of a run, so that `resume` can warn if a file changed meanwhile."""

import json
import warnings
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlhf_lab.rewards import split_rewards

if TYPE_CHECKING:
    from rlhf_lab.training.trainer import RLHFTrainer

DIGEST_PREFIX_LENGTH = 1024  # numbers of each weight in its digest; training changes all of them
INPUT_FIELDS = {"prompts": "prompts", "reference": "base_model", "reward": "reward_model"}


def input_digests(trainer: "RLHFTrainer") -> dict[str, int]:
    """Return digests of the prompts, the reference and the models of the reward."""
    prompts = trainer.prompts
    texts = [prompts.texts, prompts.labels] + [prompts.answers] * (prompts.answers is not None)
    models = [
        getattr(reward, "model", None) for reward in split_rewards(trainer.reward_fn).values()
    ]
    models = [weights_digest(model) for model in models if isinstance(model, nn.Module)]
    return {
        "prompts": zlib.crc32(json.dumps(texts).encode()),
        "reference": weights_digest(trainer.first_reference),
        "reward": zlib.crc32(json.dumps(models).encode()),
    }


@torch.no_grad()
def weights_digest(model: nn.Module) -> int:
    """Return a checksum of name, shape and first numbers of every weight."""
    digest = 0
    for name, weight in model.named_parameters():
        first = weight.reshape(-1)[:DIGEST_PREFIX_LENGTH].float().cpu().contiguous()
        digest = zlib.crc32(f"{name} {tuple(weight.shape)}".encode(), digest)
        digest = zlib.crc32(first.numpy().tobytes(), digest)
    return digest


def check_input_digests(trainer: "RLHFTrainer", info: Mapping[str, Any]) -> dict[str, int]:
    """Return the digests from the run's start; warn about inputs that have changed since."""
    now = input_digests(trainer)
    before = info.get("input_digests", now)
    for name, field in INPUT_FIELDS.items():
        if now[name] != before[name]:
            warnings.warn(
                f"{field}={getattr(trainer.args, field)!r} has changed since the run started. The "
                "run continues with the new contents, so its phases are not comparable.",
                stacklevel=2,
            )
    return before
