"""Sources of a run: digests of what it read elsewhere, so that a change of it is told on resume."""

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

LOOKED_AT = 1024
"""Numbers of each weight that a digest is of; training changes all."""


def sources(trainer: "RLHFTrainer") -> dict[str, int]:
    """A digest of the prompts, of the reference and of the model behind the reward, if one is."""
    prompts = trainer.prompts
    read = [prompts.texts, prompts.labels] + [prompts.answers] * (prompts.answers is not None)
    found = {"prompts": zlib.crc32(json.dumps(read).encode())}
    found["reference"] = weights_digest(trainer.first_reference)
    judges = [
        getattr(reward, "model", None) for reward in split_rewards(trainer.reward_fn).values()
    ]
    digests = [weights_digest(judge) for judge in judges if isinstance(judge, nn.Module)]
    if digests:
        several = zlib.crc32(json.dumps(digests).encode())
        found["reward"] = digests[0] if len(digests) == 1 else several
    return found


@torch.no_grad()
def weights_digest(model: nn.Module) -> int:
    """The checksum of the first numbers of every weight, by name and shape."""
    digest = 0
    for name, weight in model.named_parameters():
        first = weight.reshape(-1)[:LOOKED_AT].float().cpu().contiguous()
        digest = zlib.crc32(f"{name} {tuple(weight.shape)}".encode(), digest)
        digest = zlib.crc32(first.numpy().tobytes(), digest)
    return digest


def noted_sources(trainer: "RLHFTrainer", info: Mapping[str, Any]) -> dict[str, int]:
    """The digests that a run began with; warns of each that is another now."""
    now, args = sources(trainer), trainer.args
    before = now | dict(info.get("sources") or {})
    places = {"prompts": "prompts", "reference": "base_model", "reward": "reward_model"}
    for name, field in places.items():
        if name in now and now[name] != before[name]:
            warnings.warn(
                f"{field}={getattr(args, field)!r} does not hold what it held when the run began; "
                "it goes on with what is there now, so that its phases do not compare.",
                stacklevel=2,
            )
    return before
