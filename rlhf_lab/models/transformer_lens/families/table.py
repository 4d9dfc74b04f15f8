"""Tables of weights: where each tensor of transformers stands in a hooked model, both ways."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import einops
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from rlhf_lab.errors import LoadError

OF_EVERY_CONFIG = frozenset(signature(PreTrainedConfig.__init__).parameters)
WITHOUT_EFFECT = frozenset(
    ("use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "initializer_range")
    + ("attention_dropout", "is_decoder")
)
"""Fields that change no logit of a model that is not in training mode."""


@dataclass(frozen=True)
class Piece:
    """One parameter of a hooked model, as all or a share of a tensor of transformers.

    Args:
        ours: its name in the hooked model.
        pattern: of einops, from theirs to ours; as it is when empty.
        axes: the lengths that the pattern needs.
        share: its rows of a fused tensor.
        scale, shift: ours = theirs * scale + shift.
    """

    ours: str
    pattern: str = ""
    axes: Mapping[str, int] = field(default_factory=dict)
    share: int = 0
    scale: float = 1.0
    shift: float = 0.0

    def read(self, theirs: Tensor) -> Tensor:
        """The hooked model's parameter."""
        if self.scale != 1:  # rounded to the dtype first, as in transformers
            theirs = theirs * torch.tensor(self.scale, dtype=theirs.dtype, device=theirs.device)
        if self.shift:
            theirs = theirs + self.shift
        return einops.rearrange(theirs, self.pattern, **self.axes) if self.pattern else theirs

    def write(self, ours: Tensor) -> Tensor:
        """The tensor of transformers again, as far as rounding lets it."""
        ours = ours.detach().cpu().float()
        if self.pattern:
            left, right = self.pattern.split(" -> ")
            ours = einops.rearrange(ours, f"{right} -> {left}", **self.axes)
        return (ours - self.shift) / self.scale


@dataclass(frozen=True)
class Place:
    """One tensor of transformers, and the parameters that it holds.

    Args:
        theirs: its name in transformers.
        pieces: side by side along `dim`, if there are several.
        order: a pattern of einops that brings the pieces side by side; they are when empty.
        axes: the lengths that the order needs.
        rows: how many of its first rows a hooked model has; all when None.
    """

    theirs: str
    pieces: tuple[Piece, ...]
    dim: int = 0
    order: str = ""
    axes: Mapping[str, int] = field(default_factory=dict)
    rows: int | None = None

    def read(self, theirs: Tensor) -> dict[str, Tensor]:
        """The hooked model's parameters by name."""
        if self.order:
            theirs = einops.rearrange(theirs, self.order, **self.axes)
        theirs = theirs[: self.rows]
        shares = [theirs]
        if len(self.pieces) > 1:
            shares = theirs.split([piece.share for piece in self.pieces], self.dim)
        return {p.ours: p.read(share) for p, share in zip(self.pieces, shares, strict=True)}

    def write(self, ours: Mapping[str, Tensor], original: Tensor) -> Tensor:
        """The tensor of transformers again.

        1. Put the pieces together.
        2. Where they are scaled or shifted, which rounding does not undo, keep the original's
           numbers wherever they give the very same parameter.
        3. Keep the original's rows that a hooked model does not have.
        """
        shares = []
        read = self.read(original.to(ours[self.pieces[0].ours].dtype))
        for piece in self.pieces:
            share = piece.write(ours[piece.ours])
            if piece.scale != 1 or piece.shift:
                same = read[piece.ours].cpu() == ours[piece.ours].detach().cpu()
                share = torch.where(same, original.detach().cpu().float(), share)
            shares.append(share)
        theirs = torch.cat(shares, self.dim)
        if self.order:
            left, right = self.order.split(" -> ")
            theirs = einops.rearrange(theirs, f"{right} -> {left}", **self.axes)
        if self.rows is None:
            return theirs
        return torch.cat([theirs, original[self.rows :].detach().cpu().float()])


def same(theirs: str, ours: str, **change: float) -> Place:
    """A tensor that is a parameter as it is, or scaled or shifted."""
    return Place(theirs, (Piece(ours, **change),))


def turned(theirs: str, ours: str) -> Place:
    """A matrix that transformers keeps as [d_out d_in], a hooked model as [d_in d_out]."""
    return Place(theirs, (Piece(ours, "d_out d_in -> d_in d_out"),))


@dataclass(frozen=True)
class Family:
    """What is known of one architecture of transformers.

    Args:
        architecture: the class of the model.
        converted: the fields of its configuration that are converted.
        idle: further fields that change no logit here.
        only: fields that are converted for these values alone; any other is refused.
        settings: the fields of a hooked model's configuration.
        places: where its weights stand.
        folds_unembedding_bias: whether the unembedding's bias, which the architecture does not
            have, may be trained, since export can fold it into a layer norm.
    """

    architecture: str
    converted: frozenset[str]
    settings: Callable[[PreTrainedConfig], dict[str, Any]]
    places: Callable[[PreTrainedConfig], list[Place]]
    idle: frozenset[str] = frozenset()
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    folds_unembedding_bias: bool = False

    def check(self, config: PreTrainedConfig) -> None:
        """Refuse a configuration that has something that is not converted.

        Raises:
            LoadError: it has; the field is named.
        """
        if getattr(config, "quantization_config", None) is not None:
            refuse(config, "quantization_config", "weights of full precision")
        for name, allowed in self.only.items():
            value = getattr(config, name, None)
            if value is not None and value not in allowed:
                refuse(config, name, f"{name}={' or '.join(map(repr, allowed))}")
        known = self.converted | self.idle | WITHOUT_EFFECT | self.only.keys()
        for name, parameter in signature(type(config).__init__).parameters.items():
            if name in known or name in OF_EVERY_CONFIG:
                continue
            if parameter.kind is parameter.VAR_KEYWORD:
                continue
            if getattr(config, name, None) != parameter.default:
                refuse(config, name, f"{name}={parameter.default!r}")

    def read(self, config: PreTrainedConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A hooked model's parameters, of transformers' weights.

        Raises:
            LoadError: a weight has no place in a hooked model.
        """
        places = self.places(config)
        left = sorted(weights.keys() - {place.theirs for place in places})
        if left:
            raise LoadError(
                f"its weight {left[0]} has no place in a hooked model; choose a model without it."
            )
        return {
            name: tensor
            for place in places
            for name, tensor in place.read(weights[place.theirs].detach()).items()
        }

    def write(
        self,
        config: PreTrainedConfig,
        parameters: Mapping[str, Tensor],
        original: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Transformers' weights, of a hooked model's parameters.

        Args:
            original: the weights of the model that it began as.

        Raises:
            LoadError: a parameter that is not 0 has no place in transformers' model.
        """
        places = self.places(config)
        placed = {piece.ours for place in places for piece in place.pieces}
        for name, tensor in parameters.items():
            if name not in placed and tensor.any():
                raise LoadError(
                    f"the policy's {name} is not 0, and {self.architecture} has no place for it; "
                    "train again with this version, which leaves it at 0."
                )
        return {place.theirs: place.write(parameters, original[place.theirs]) for place in places}


def refuse(config: PreTrainedConfig, name: str, remedy: str) -> None:
    """Raise LoadError for a field of a configuration.

    Args:
        remedy: what a model should have.
    """
    shown = f"{getattr(config, name, None)!r:.80}"
    raise LoadError(
        f"{name}={shown} of a {config.model_type} model is not converted; choose a model with "
        f"{remedy}."
    )


ACTIVATIONS_OF_TRANSFORMERS = {
    "gelu": "gelu",
    "gelu_fast": "gelu_fast",
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}


def activation(config: PreTrainedConfig, name: str) -> str:
    """A hooked model's name of the activation function in this field.

    Raises:
        LoadError: there is none.
    """
    given = getattr(config, name)
    if given not in ACTIVATIONS_OF_TRANSFORMERS:
        refuse(config, name, f"one of {', '.join(ACTIVATIONS_OF_TRANSFORMERS)}")
    return ACTIVATIONS_OF_TRANSFORMERS[given]


def fields(names: str, *more: Iterable[str]) -> frozenset[str]:
    """Names of fields, with blanks between."""
    return frozenset(names.split()).union(*more)
