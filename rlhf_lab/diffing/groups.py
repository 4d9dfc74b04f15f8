"""Parameter groups: the weights of a model as a partition into parts, whose change is studied."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.models import effective_weights
from rlhf_lab.models.hooked_model import HookedModel

Part = tuple[str, int | None]
"""A parameter, and the head of it, or None for all of it."""
BY_QUERY_HEAD = ("W_Q", "b_Q", "W_O")
BY_KEY_HEAD = ("W_K", "W_V", "b_K", "b_V")


@dataclass(frozen=True)
class Groups:
    """Parts of a model by name, each with the parameters, or heads of them, that belong to it.

    Args:
        names: one per group, in the order in which the model runs.
        parts: of each, parameters by name with a head's index, or None for the whole parameter.

    Raises:
        ConfigError: a name or a part that is there twice, or names and parts of unequal number.
    """

    names: list[str]
    parts: list[list[Part]]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.parts) or len(set(self.names)) != len(self.names):
            raise ConfigError(
                f"names={self.names!r} with {len(self.parts)} lists of parts are no groups; give "
                "each group one name of its own."
            )
        every = [part for parts in self.parts for part in parts]
        twice = next((part for part in every if every.count(part) > 1), None)
        if twice is not None:
            raise ConfigError(f"groups have {_shown(twice)} twice; leave it to one of them.")

    def __len__(self) -> int:
        return len(self.names)

    def of(self, name: str) -> list[Part]:
        """The parts of one group.

        Raises:
            ConfigError: no group has that name.
        """
        if name not in self.names:
            raise ConfigError(f"group={name!r} is unknown; choose one of {', '.join(self.names)}.")
        return self.parts[self.names.index(name)]


def fine_groups(model: HookedModel) -> Groups:
    """Every head apart: embeddings, and of each block norm, heads, output bias and MLP.

    1. embed, pos_embed; ln_final, unembed.
    2. Of each block: ln1 (with the norms of queries and keys), each head (W_Q, W_K, W_V, their
       biases, and its slice of W_O) as L0H0, the attention's b_O, the MLP with its norm.
    3. Where query heads share keys and values, these are groups of their own: L0KV0.
    """
    return _grouped(model, fine=True)


def coarse_groups(model: HookedModel) -> Groups:
    """Whole layers: embed (positions too), each attention and MLP with its norm, ln_final, unembed.

    Seven of a model with two blocks, few enough for all 128 coalitions.
    """
    return _grouped(model, fine=False)


def check_partition(groups: Groups, weights: Mapping[str, Float[Tensor, "..."]]) -> None:
    """Raise ConfigError unless every number of the weights is in exactly one group."""
    every = {part for parts in groups.parts for part in parts}
    for name, head in every:
        heads = len(weights[name]) if name in weights and weights[name].ndim else 0
        if name not in weights or (head is not None and not 0 <= head < heads):
            raise ConfigError(f"groups have {_shown((name, head))}, which the model does not have.")
    for name, weight in weights.items():
        whole = (name, None) in every
        heads = [(name, head) for head in range(len(weight)) if (name, head) in every]
        if whole and heads:
            raise ConfigError(f"groups have {name} whole and by heads; choose one of the two.")
        if not whole and len(heads) < len(weight):
            raise ConfigError(f"groups leave out {name} or a head of it; put it into one of them.")


def restrict(
    delta: Mapping[str, Float[Tensor, "..."]], groups: Groups, name: str
) -> dict[str, Float[Tensor, "..."]]:
    """The share of a change of weights that belongs to one group.

    Gives the parameters of the group alone, in full shape, with 0 at the heads of other groups.

    Raises:
        ConfigError: no group has that name.
    """
    nothing = {weight: torch.zeros_like(delta[weight]) for weight, _ in groups.of(name)}
    return taken_from(delta, nothing, groups.of(name))


def taken_from(
    tuned: Mapping[str, Float[Tensor, "..."]],
    base: Mapping[str, Float[Tensor, "..."]],
    parts: list[Part],
) -> dict[str, Float[Tensor, "..."]]:
    """The base's weights with these parts from the tuned ones, bit for bit.

    Weights without such a part are the base's own tensors, others are new ones.
    """
    mixed = dict(base)
    for weight, head in parts:
        if head is None:
            mixed[weight] = tuned[weight]
            continue
        if mixed[weight] is base[weight]:
            mixed[weight] = base[weight].clone()
        mixed[weight][head] = tuned[weight][head]
    return mixed


def weights_of_both(
    base: HookedModel, tuned: HookedModel
) -> tuple[dict[str, Float[Tensor, "..."]], dict[str, Float[Tensor, "..."]]]:
    """The effective weights of two models, adapters included.

    Raises:
        ConfigError: they have other parameters, so that there is no difference of the two.
    """
    before, after = effective_weights(base), effective_weights(tuned)
    odd = sorted(before.keys() ^ after.keys())
    odd += [name for name in before if not odd and before[name].shape != after[name].shape]
    if odd:
        raise ConfigError(
            f"the two models do not have the same weights ({odd[0]}); compare models of one "
            "architecture and size, such as a model and what was trained from it."
        )
    return before, {name: after[name].to(before[name].device) for name in before}


def _grouped(model: HookedModel, fine: bool) -> Groups:
    weights = effective_weights(model)
    found: dict[str, list[Part]] = {}
    for name in sorted(weights, key=lambda name: _place(name, model.cfg.n_layers)):
        for group, part in _parts_of(name, weights[name], model, fine):
            found.setdefault(group, []).append(part)
    groups = Groups(list(found), list(found.values()))
    check_partition(groups, weights)
    return groups


def _place(name: str, n_layers: int) -> tuple[int, int, str]:
    """Where a parameter acts: its block, and its place within that."""
    top, *rest = name.split(".")
    if top != "blocks":
        order = {"embed": -2, "pos_embed": -1, "ln_final": n_layers, "unembed": n_layers + 1}
        return order.get(top, -1), 0, name
    module = rest[1][:3]
    return int(rest[0]), {"ln1": 0, "att": 1}.get(module, 2), name


def _parts_of(
    name: str, weight: Float[Tensor, "..."], model: HookedModel, fine: bool
) -> Iterator[tuple[str, Part]]:
    """The groups of one parameter, each with its share of it."""
    top, *rest = name.split(".")
    if top != "blocks":
        yield (top if fine or top != "pos_embed" else "embed"), (name, None)
        return
    layer, module, own = rest[0], rest[1], rest[-1].lstrip("_")
    if module.startswith(("mlp", "ln2")):
        yield f"L{layer} mlp", (name, None)
    elif not fine:
        yield f"L{layer} attn", (name, None)
    elif own in (*BY_QUERY_HEAD, *BY_KEY_HEAD):
        shares = own in BY_KEY_HEAD and len(weight) != model.cfg.n_heads
        for head in range(len(weight)):
            yield f"L{layer}{'KV' if shares else 'H'}{head}", (name, head)
    else:
        yield f"L{layer} {'b_O' if own == 'b_O' else 'ln1'}", (name, None)


def _shown(part: Part) -> str:
    name, head = part
    return name if head is None else f"head {head} of {name}"
