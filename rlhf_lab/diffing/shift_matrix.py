"""Sender x receiver matrix: what the weights of one part did to a logit difference through each."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap

from rlhf_lab.diffing.groups import Groups, check_partition, restrict
from rlhf_lab.diffing.quadrature import NODES, quadrature
from rlhf_lab.diffing.stages import Tick, untold
from rlhf_lab.diffing.weight_line import WeightLine
from rlhf_lab.errors import ConfigError
from rlhf_lab.models.hooked_model import HookedModel, is_centered
from rlhf_lab.models.hooked_transformer import HookPoint
from rlhf_lab.models.residual_parts import residual_components, validate_additive
from rlhf_lab.torch_modes import differentiable_attention

AT_ONCE = 20_000_000
"""Numbers of weights along which derivatives are taken at once: 80 MB in float32."""


@dataclass(frozen=True)
class ShiftMatrix:
    """A shift of a logit difference by whose weights changed, and through whose output it shows.

    Args:
        groups: of weights, one row each.
        columns: components, and the two causes that belong to none, scale and read-out.
        values: the diagonal is direct, the rest of a row goes through later parts, its sum is all
            that the group's weights did; a column's sum is the component's own change.
        node_shift: the mean logit difference at each node, less the first model's; where it is not
            smooth, the straight line between the models leads through other behavior.
        measured: the shift, by both models' own logits.
    """

    groups: list[str]
    columns: list[str]
    values: Float[Tensor, "group column batch"]
    node_shift: Float[Tensor, " node"]
    measured: Float[Tensor, " batch"]

    @property
    def by_weights(self) -> Float[Tensor, "group batch"]:
        """What each group's weights did to the logit difference."""
        return self.values.sum(1)

    @property
    def by_output(self) -> Float[Tensor, "column batch"]:
        """What shows through each component's output, scale and read-out."""
        return self.values.sum(0)

    @property
    def error(self) -> float:
        """By how much the sum of all misses the shift, in the worst row of the text."""
        return (self.values.sum((0, 1)) - self.measured).abs().max().item()


class Readings(nn.Module):
    """A model that gives, at the last position, everything that makes its logit difference.

    Args:
        words: the ids of the two words.
    """

    def __init__(self, model: HookedModel, words: tuple[int, int]) -> None:
        super().__init__()
        self.model, self.words = model, words
        self.names: list[str] = []

    def forward(self, tokens: Int[Tensor, "batch seq"]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Components, one over the final norm's scale, reader, and constants, in float64."""
        model, kept = self.model, {}

        def keep(activation: Tensor, hook: HookPoint) -> None:
            kept[hook.name] = activation[:, -1]

        layers = range(model.cfg.n_layers)
        sites = [name for name in ("hook_embed", "hook_pos_embed") if name in model.hook_dict]
        sites += [
            f"blocks.{layer}.{x}" for layer in layers for x in ("attn.hook_z", "hook_mlp_out")
        ]
        with model.hooks(fwd_hooks=[(site, keep) for site in [*sites, "ln_final.hook_scale"]]):
            model(tokens, attention_mask=torch.ones_like(tokens))
        self.names, parts = residual_components(model, kept)
        norm, unembed = model.ln_final, model.unembed
        u = (unembed.W_U[:, self.words[0]] - unembed.W_U[:, self.words[1]]).double()
        constant = (unembed.b_U[self.words[0]] - unembed.b_U[self.words[1]]).double()
        gain = norm.w.double() if hasattr(norm, "w") else torch.ones_like(u)
        constant = constant + (norm.b.double() @ u if hasattr(norm, "b") else 0)
        if is_centered(norm):
            parts = parts - parts.mean(-1, keepdim=True)
        return parts, 1 / kept["ln_final.hook_scale"].double()[:, 0], gain * u, constant


@torch.no_grad()
def shift_matrix(
    model0: HookedModel,
    model1: HookedModel,
    tokens: Int[Tensor, "batch seq"],
    pos: int,
    ids: tuple[int, int],
    groups: Groups,
    nodes: int = NODES,
    tick: Tick = untold,
) -> ShiftMatrix:
    """Split a shift of a logit difference exactly by whose weights moved and where that shows.

    1. Move all weights in a straight line from one model to the other.
    2. At each node of Gauss and Legendre's quadrature, take the derivative of every component, of
       the final norm's scale and of the read-out along the change of one group: one forward-mode
       derivative for each group, with a value for each row of the text.
    3. Multiply what moved by what stands: <k, q> s has three factors.

    Rows of the text are of one length, without padding. On a device without float64, it runs on the
    CPU.

    Args:
        tick: called behind every node.

    M[g, c] = int_0^1 <q(a) s(a), J_c(a) delta_g> da; scale: <sum_c k_c, q> ds; read-out:
    <sum_c k_c, dq> s, and the constants'
    (integrated gradients: Sundararajan et al. 2017, arXiv 1703.01365; along weights)

    Raises:
        ConfigError: unlike models, groups that are no partition, or logits that are no sum.
    """
    line = Line(model0, model1, tokens, pos, ids)
    between = line.weights
    check_partition(groups, between.before)
    values, shifts, names = 0.0, [], list(groups.names)
    for node, weight in zip(*quadrature(nodes), strict=True):
        weights = between.at(node)
        rows = line.derivatives(weights, [restrict(between.delta, groups, name) for name in names])
        values = values + weight * rows
        shifts.append(line.difference(weights).mean())
        tick()
    first, last = line.difference(between.before), line.difference(between.after)
    shift = torch.stack(shifts) - first.mean()
    return ShiftMatrix(names, line.columns, values, shift, last - first)


@torch.no_grad()
def shift_by_weights(
    model0: HookedModel,
    model1: HookedModel,
    tokens: Int[Tensor, "batch seq"],
    pos: int,
    ids: tuple[int, int],
    groups: Groups,
    nodes: int = NODES,
) -> Float[Tensor, " group"]:
    """Give the row sums of `shift_matrix` alone, as means over the text, by one backward pass each.

    phi_g = int_0^1 <grad f(theta_0 + a delta), delta_g> da

    Raises:
        ConfigError: see `shift_matrix`.
    """
    line = Line(model0, model1, tokens, pos, ids)
    between = line.weights
    check_partition(groups, between.before)
    total = {name: torch.zeros_like(delta) for name, delta in between.delta.items()}
    for node, weight in zip(*quadrature(nodes), strict=True):
        weights = {name: w.requires_grad_() for name, w in between.at(node).items()}
        with torch.enable_grad():
            mean = line.difference(weights).mean()
            gradients = torch.autograd.grad(mean, list(weights.values()), allow_unused=True)
        for name, gradient in zip(weights, gradients, strict=True):
            if gradient is not None:
                total[name] += weight * gradient
    moved = {name: total[name].double() * delta.double() for name, delta in between.delta.items()}
    shares = (restrict(moved, groups, name).values() for name in groups.names)
    return torch.stack([sum(share.sum() for share in each) for each in shares])


class Line:
    """The straight line of weights between two models, and what they make of a text on it.

    Raises:
        ConfigError: unlike models, logits that are no sum over parts, or a position that is not
            there.
    """

    def __init__(
        self,
        model0: HookedModel,
        model1: HookedModel,
        tokens: Int[Tensor, "batch seq"],
        pos: int,
        ids: tuple[int, int],
    ) -> None:
        validate_additive(model0)
        if not -tokens.shape[1] <= pos < tokens.shape[1]:
            raise ConfigError(f"pos={pos} lies outside texts of {tokens.shape[1]} tokens.")
        self.weights = WeightLine(model0, model1)
        # what is later than the position has no part in it
        self.tokens = tokens[:, : pos % tokens.shape[1] + 1].to(self.weights.text_device)
        self.readings = Readings(self.weights.model, ids)
        self.read(self.weights.before)  # names the components
        self.columns = [*self.readings.names, "scale", "read_out"]

    def read(self, weights: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `Readings` gives with these weights."""
        named = {f"model.{name}": weight for name, weight in weights.items()}
        return functional_call(self.readings, named, (self.tokens,))

    def difference(self, weights: dict[str, Tensor]) -> Float[Tensor, " batch"]:
        """The logit difference with these weights, by the model's own logits."""
        options = {"attention_mask": torch.ones_like(self.tokens)}
        logits = functional_call(self.readings.model, dict(weights), (self.tokens,), options)
        logits = logits[:, -1].double()
        return logits[:, self.readings.words[0]] - logits[:, self.readings.words[1]]

    def derivatives(
        self, weights: dict[str, Tensor], changes: list[dict[str, Tensor]]
    ) -> Float[Tensor, "change column batch"]:
        """What each column gains along each of several changes of some of the weights.

        Several of them go through the model at once, as many as fit in `AT_ONCE` numbers.
        """
        shape = len(changes), len(self.columns), len(self.tokens)
        found = self.tokens.new_zeros(shape, dtype=torch.float64)
        real = [i for i, along in enumerate(changes) if any(bool(x.any()) for x in along.values())]
        size = sum(weight.numel() for weight in weights.values())
        for some in torch.tensor(real, dtype=torch.long).split(max(1, AT_ONCE // size)):
            chosen = [changes[i] for i in some]
            at = {name: weights[name] for name in dict.fromkeys(n for c in chosen for n in c)}
            moved = {
                n: torch.stack([c.get(n, torch.zeros_like(at[n])) for c in chosen]) for n in at
            }
            read = lambda these, rest=weights: self.read(rest | these)
            along = lambda change, at=at, read=read: _products(*jvp(read, (at,), (change,)))
            with differentiable_attention():
                found[some] = vmap(along)(moved)
        return found


def _products(
    stands: tuple[Tensor, ...], moves: tuple[Tensor, ...]
) -> Float[Tensor, "column batch"]:
    """The product rule for <k, q> s and the constants, by factor."""
    (parts, scale, reader, _), (moved, stretched, turned, constant) = stands, moves
    whole = parts.sum(0)
    read_out = (whole @ turned) * scale + constant
    return torch.cat(
        [(moved @ reader) * scale, torch.stack([(whole @ reader) * stretched, read_out])]
    )
