"""Data parallelism: a batch dealt to ranks, and what they found of it put together again."""

import dataclasses
import json
import platform
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf_lab import __version__
from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.models.value_head import has_standard_forward
from rlhf_lab.parallel import World
from rlhf_lab.samples import Samples, Support
from rlhf_lab.training.input_digests import weights_digest

if TYPE_CHECKING:
    from rlhf_lab.training.components import Parts

Found = TypeVar("Found")


def by_rank(world: World, samples: Samples, look: Callable[[Samples], Found], doing: str) -> Found:
    """What a function finds on samples, each rank looking at its own rows only.

    Args:
        look: gives a row for each sequence, in a tensor, in a tuple or mapping of tensors, or in a
            dataclass of them; each row on its own, whatever the others are.
        doing: what it does, in words, for the message of an error.
    """
    n_rows = len(samples.tokens)
    if not world.deals(n_rows):
        return look(samples)
    rows = torch.arange(n_rows, device=samples.tokens.device)[world.share(n_rows)]
    with world.together(doing):
        found = look(samples[rows])
    return _gathered(world, found)


def gathered_samples(world: World, samples: Samples, pad_token: int) -> Samples:
    """The samples of all ranks, in order, as one batch: prompts as wide as the widest.

    Gives them back as they are where a process is alone.
    """
    prefix = world.widest(samples.prefix_len) - samples.prefix_len
    support = samples.support
    if support is not None:
        gap = (0, world.widest(support.tokens.shape[-1]) - support.tokens.shape[-1])
        support = Support(pad(support.tokens, gap), pad(support.kept, gap))
    return _gathered(
        world,
        dataclasses.replace(
            samples,
            tokens=pad(samples.tokens, (prefix, 0), value=pad_token),
            prompt_mask=pad(samples.prompt_mask, (prefix, 0)),
            support=support,
        ),
    )


def _gathered(world: World, found: Any) -> Any:
    """Rows of all ranks, in whatever holds them."""
    if isinstance(found, Tensor):
        return world.gather(found)
    if dataclasses.is_dataclass(found):
        fields = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
        return dataclasses.replace(found, **_gathered(world, fields))
    if isinstance(found, Mapping):
        return {name: _gathered(world, each) for name, each in found.items()}
    if isinstance(found, tuple):  # a NamedTuple
        return found._make(_gathered(world, each) for each in found)
    return found


def refuse_undealt(args: RLHFArgs, size: int, is_launched: bool) -> None:
    """Raise ConfigError for settings that the processes of a run cannot share.

    Args:
        size: how many there are.
        is_launched: torchrun started them.
    """
    if not is_launched and args.parallel != "auto":
        raise ConfigError(
            f"parallel={args.parallel!r} needs several processes; start it with `torchrun "
            "--nproc-per-node N -m rlhf_lab ...`, or set it to 'auto'."
        )
    if size == 1 and args.parallel != "fsdp":
        return
    if args.parallel == "fsdp":
        _refuse_unsharded(args)
    remedy = "start another number of them, or change batch_size or num_minibatches"
    minibatch = args.batch_size // args.num_minibatches
    for name, rows in {
        f"batch_size={args.batch_size}": args.batch_size,
        f"a minibatch of batch_size / num_minibatches = {minibatch} sequences": minibatch,
    }.items():
        if rows % size:
            raise ConfigError(f"{name} cannot be dealt to {size} processes; {remedy}.")
    micro = args.micro_batch_size
    if micro is not None and minibatch // size % micro:
        raise ConfigError(
            f"micro_batch_size={micro} does not divide the {minibatch // size} sequences of a "
            f"minibatch that each of {size} processes has; choose one that does."
        )
    if args.optimizer_in_backward:
        raise ConfigError(
            "optimizer_in_backward=True steps before the gradients of all processes are "
            "added up; leave it False."
        )


def _refuse_unsharded(args: RLHFArgs) -> None:
    """Raise ConfigError for settings that weights cut up by FSDP2 cannot have."""
    refused = {
        f"optimizer={args.optimizer!r} keeps its codes beside whole weights; set 'adamw'": (
            args.optimizer != "adamw"
        ),
        f"weight_precision={args.weight_precision!r} steps whole weights; set 'fp32'": (
            args.weight_precision != "fp32"
        ),
        f"precision={args.precision!r} keeps a whole copy of the weights until the backward pass, "
        "unless blocks are run again there; set activation_checkpointing=True": (
            args.precision == "bf16" and not args.activation_checkpointing
        ),
    }
    for sentence, is_set in refused.items():
        if is_set:
            raise ConfigError(f"{sentence}, or parallel='ddp' in place of 'fsdp'.")


def refuse_unsharded_parts(
    args: RLHFArgs, policy: torch.nn.Module, reference: torch.nn.Module, optimizer: Any
) -> None:
    """Raise ConfigError for parts of a caller's own that FSDP2 cannot cut up."""
    if args.parallel != "fsdp":
        return
    learned = {id(p) for p in policy.parameters() if p.requires_grad}
    refused = {
        f"the policy, a {type(policy).__name__}, has a forward of its own, which may read weights "
        "outside of their blocks": not has_standard_forward(policy),
        "the optimizer was made of whole weights, before they are cut up": optimizer is not None,
        "the reference has weights that learn": any(
            id(p) in learned for p in reference.parameters()
        ),
    }
    for sentence, is_so in refused.items():
        if is_so:
            raise ConfigError(f"{sentence}; set parallel='ddp' in place of 'fsdp'.")


def refuse_unequal(parts: "Parts") -> None:
    """Raise ConfigError, on every rank, where ranks have other versions, settings or weights."""
    world = parts.world
    if world.size == 1:
        return
    own = {
        "rlhf_lab": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "settings": parts.args.to_dict(),
        "weights of the policy": weights_digest(parts.policy),
        "weights of the reference": weights_digest(parts.reference),
    }
    own = json.loads(json.dumps(own))
    main = world.of_main(own)
    other = [name for name in own if own[name] != main[name]]
    with world.together("comparing itself with process 0"):
        if other:
            raise ConfigError(
                f"process {world.rank} has other {', '.join(other)} than process 0; start them "
                "alike, with the same packages and files."
            )


def add_gradients_up(world: World, policy: torch.nn.Module) -> None:
    """Put the sum of the ranks' gradients in the place of each; each had its rows' share of it."""
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    world.add_up(gradients, "gradients")
