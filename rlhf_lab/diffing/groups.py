"""Parameter groups: the weights of a model as a partition into components."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.models import effective_weights
from rlhf_lab.models.hooked_model import HookedModel

Part = tuple[str, int | None]  # a parameter, and one of its heads, or None for all of it
BY_QUERY_HEAD = ("W_Q", "b_Q", "W_O")
BY_KEY_HEAD = ("W_K", "W_V", "b_K", "b_V")


@dataclass(frozen=True)
class Groups:
    """Components of a model by name, each with its parameters or heads of parameters.

    Args:
        names: of the groups, in the order in which the model runs.
        parts: of each group, names of parameters with the index of a head, or None for all heads.
    """

    names: list[str]
    parts: list[list[Part]]

    def __len__(self) -> int:
        return len(self.names)

    def of(self, name: str) -> list[Part]:
        """Return the parts of one group; raises ConfigError for an unknown name."""
        if name not in self.names:
            raise ConfigError(f"Unknown group {name!r}. Choose one of: {', '.join(self.names)}.")
        return self.parts[self.names.index(name)]


def fine_groups(model: HookedModel) -> Groups:
    """Return groups of single heads, embeddings, norms, output biases and MLPs with their norms.

    A head, L0H0, has W_Q, W_K, W_V, their biases, and its slice of W_O; ln1 also has the norms of
    queries and keys. Keys and values that several heads share are separate groups: L0KV0.
    """
    return _make_groups(model, fine=True)


def coarse_groups(model: HookedModel) -> Groups:
    """Return groups of layers: embed with positions, attentions, MLPs, ln_final, unembed."""
    return _make_groups(model, fine=False)


def check_partition(groups: Groups, weights: Mapping[str, Float[Tensor, "..."]]) -> None:
    """Raise ConfigError unless every number of the weights is in exactly one group."""
    if not len(set(groups.names)) == len(groups.names) == len(groups.parts):
        raise ConfigError(f"groups have names {groups.names}. Use a different name for each group.")
    counts = {name: [0] * max(1, len(w) if w.ndim else 1) for name, w in weights.items()}
    for name, head in (part for parts in groups.parts for part in parts):
        heads = range(len(counts.get(name, ()))) if head is None else [head]
        if name not in counts or not 0 <= max(heads) < len(counts[name]):
            raise ConfigError(f"groups have head {head} of {name}, which the model does not have.")
        for index in heads:
            counts[name][index] += 1
    for name, count in counts.items():
        if set(count) != {1}:
            what = "leave out" if 0 in count else "repeat"
            raise ConfigError(f"groups {what} {name} or a head of it. Put it into one of them.")


def restrict(
    delta: Mapping[str, Float[Tensor, "..."]], groups: Groups, name: str
) -> dict[str, Float[Tensor, "..."]]:
    """Return the part of a change of weights that belongs to one group.

    Parameters are in full shape, with 0 at the heads of other groups.
    """
    zeros = {weight: torch.zeros_like(delta[weight]) for weight, _ in groups.of(name)}
    return taken_from(delta, zeros, groups.of(name))


def sum_by_group(x: Mapping[str, Float[Tensor, "..."]], groups: Groups) -> Float[Tensor, " group"]:
    """Return the sum of all numbers of each group, in float64; weights that x lacks have none."""
    of = lambda name, head: x[name][... if head is None else head].double().sum().cpu()
    sums = [sum(of(*part) for part in parts if part[0] in x) for parts in groups.parts]
    return torch.tensor(sums, dtype=torch.float64)


def taken_from(
    tuned: Mapping[str, Float[Tensor, "..."]],
    base: Mapping[str, Float[Tensor, "..."]],
    parts: list[Part],
) -> dict[str, Float[Tensor, "..."]]:
    """Return the base's weights with these parts of the tuned ones, bitwise.

    Weights without such a part are the base's tensors, others are copies.
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
    """Return the effective weights of two models, adapters included.

    Raises:
        ConfigError: If the models differ in parameters.
    """
    if hasattr(base, "base_model") or hasattr(tuned, "base_model"):
        raise ConfigError("a policy was passed for a language model. Pass its base_model.")
    before, after = effective_weights(base), effective_weights(tuned)
    shapes = [{name: weight.shape for name, weight in each.items()} for each in (before, after)]
    differing = sorted(dict(shapes[0].items() ^ shapes[1].items()))
    if differing:
        raise ConfigError(
            f"the two models do not have the same weights ({differing[0]}). Compare models of one "
            "architecture and size, such as a model and one trained from it."
        )
    return before, {name: after[name].to(before[name].device) for name in before}


def _make_groups(model: HookedModel, fine: bool) -> Groups:
    weights = effective_weights(model)
    found: dict[str, list[Part]] = {}
    for name in sorted(weights, key=lambda name: _order(name, model.cfg.n_layers)):
        for group, part in _split_parameter(name, weights[name], model, fine):
            found.setdefault(group, []).append(part)
    return Groups(list(found), list(found.values()))


def _order(name: str, n_layers: int) -> tuple[int, int, str]:
    top, *rest = name.split(".")
    if top != "blocks":
        order = {"embed": -2, "pos_embed": -1, "ln_final": n_layers, "unembed": n_layers + 1}
        return order.get(top, -1), 0, name
    return int(rest[0]), {"ln1": 0, "att": 1}.get(rest[1][:3], 2), name


def _split_parameter(
    name: str, weight: Float[Tensor, "..."], model: HookedModel, fine: bool
) -> Iterator[tuple[str, Part]]:
    top, *rest = name.split(".")
    if top != "blocks":
        yield (top if fine or top != "pos_embed" else "embed"), (name, None)
        return
    layer, module, kind = rest[0], rest[1], rest[-1].lstrip("_")
    if module.startswith(("mlp", "ln2")):
        yield f"L{layer} mlp", (name, None)
    elif not fine:
        yield f"L{layer} attn", (name, None)
    elif kind in (*BY_QUERY_HEAD, *BY_KEY_HEAD):
        shared = kind in BY_KEY_HEAD and len(weight) != model.cfg.n_heads
        for head in range(len(weight)):
            yield f"L{layer}{'KV' if shared else 'H'}{head}", (name, head)
    else:
        yield f"L{layer} {'b_O' if kind == 'b_O' else 'ln1'}", (name, None)
