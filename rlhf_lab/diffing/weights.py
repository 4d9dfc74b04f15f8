"""Weight grafts, low-rank truncation and interpolation of two models of one architecture."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import einops
import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.diffing.groups import Groups, taken_from, weights_of_both
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import merged_copy
from rlhf_lab.models.device import exact
from rlhf_lab.models.hooked_model import HookedModel

Weights = Mapping[str, Float[Tensor, "..."]]
Directions = tuple[Float[Tensor, "rows rank"], Float[Tensor, "rank cols"]]


def graft(base: HookedModel, tuned: HookedModel, belongs: Callable[[str], bool]) -> HookedModel:
    """Copy the base model, with some of its weights replaced by the tuned model's, bit for bit.

    1. Copy the base with its adapters merged, without hooks, and frozen. Neither model may change,
       or share weights with the copy.
    2. If a weight's name belongs to the graft, replace it by the tuned model's weight.

    Args:
        belongs: takes a name such as "blocks.0.mlp.W_in", and returns True if this weight comes
            from the tuned model.

    Raises:
        ConfigError: If the two models have different weights, or no name belongs.
    """
    before, after = weights_of_both(base, tuned)
    chosen = {name: weight for name, weight in after.items() if belongs(name)}
    if not chosen:
        raise ConfigError("belongs is False for every weight; choose some, such as 'unembed.W_U'.")
    return model_with(base, before | chosen)


def graft_groups(
    base: HookedModel, tuned: HookedModel, groups: Groups, names: Sequence[str]
) -> HookedModel:
    """Copy the base with some groups of weights of the tuned model, such as single heads.

    Raises:
        ConfigError: If the models differ in parameters, or a group is unknown.
    """
    before, after = weights_of_both(base, tuned)
    return model_with(base, taken_from(after, before, [p for n in names for p in groups.of(n)]))


def truncate_delta(
    before: Float[Tensor, "rows cols"],
    after: Float[Tensor, "rows cols"],
    rank: int,
    directions: Directions | None = None,
) -> Float[Tensor, "rows cols"]:
    """Move a matrix by the strongest directions of its change alone.

    1. Take the singular value decomposition of after - before, in float64.
    2. Keep the `rank` largest singular values.
    3. Add what they make to `before`.

    At rank 0 it is `before`, and at full rank `after`, both bit for bit.

    before + U[:, :r] S[:r] V[:r]   (Eckart and Young 1936: the closest change of that rank)

    Args:
        directions: U S and V of the change, at least `rank` of each, if they are already known.

    Raises:
        ConfigError: a rank below 0.
    """
    if rank < 0:
        raise ConfigError(f"rank={rank} is out of range. Use 0 or more.")
    if rank == 0 or rank >= min(before.shape):
        return (after if rank else before).clone()
    left, right = directions or _strongest_directions(before, after, rank)
    return (exact(before) + left[:, :rank] @ right[:rank]).to(before)


def _strongest_directions(
    before: Float[Tensor, "rows cols"], after: Float[Tensor, "rows cols"], most: int
) -> Directions:
    most, like = min(most, *before.shape), exact(before[:1])
    if torch.equal(before, after):
        return like.new_zeros(len(before), most), like.new_zeros(most, before.shape[1])
    u, s, vh = torch.linalg.svd(exact(after) - exact(before), full_matrices=False)
    return u[:, :most] * s[:most], vh[:most]


def truncate(model0: HookedModel, model1: HookedModel, rank: int) -> HookedModel:
    """Copy the first model, and move every matrix by `rank` directions of its change.

    Heads are side by side in one matrix (see `as_matrix`); vectors are the second model's.
    """
    return next(truncations(model0, model1, [rank]))


def truncations(
    model0: HookedModel, model1: HookedModel, ranks: Sequence[int]
) -> Iterator[HookedModel]:
    """Yield the model of `truncate` for each rank, from one decomposition of every matrix."""
    before, after = weights_of_both(model0, model1)
    pairs = {name: (as_matrix(name, before[name]), as_matrix(name, after[name])) for name in before}
    known: dict[str, Directions | None] = {}
    for name, (first, second) in pairs.items():
        is_needed = any(0 < rank < min(first.shape) for rank in ranks)
        known[name] = _strongest_directions(first, second, max(ranks)) if is_needed else None
    for rank in ranks:
        moved = {}
        for name, (first, second) in pairs.items():
            if min(first.shape) > 1:
                second = truncate_delta(first, second, rank, known[name])
            moved[name] = from_matrix(name, second, before[name])
        yield model_with(model0, moved)


def path(
    model0: HookedModel, model1: HookedModel, alphas: Iterable[float | int]
) -> Iterator[HookedModel]:
    """Yield models on the straight line of weights from one model through the other.

    They are bitwise the first model at 0 and the second at 1. Two models are linearly connected if
    none between them is worse than the ends.

    theta_0 + alpha (theta_1 - theta_0)   (Frankle et al. 2020, arXiv 1912.05671)
    """
    before, after = weights_of_both(model0, model1)
    for alpha in alphas:
        if not abs(alpha) < torch.inf:
            raise ConfigError(f"alphas must be finite, got {alpha!r}. Pass finite numbers.")
        # lerp starts from the nearer end, so both ends are exact
        yield model_with(
            model0, {name: torch.lerp(before[name], after[name], float(alpha)) for name in before}
        )


@torch.no_grad()
def model_with(model: HookedModel, weights: Weights) -> HookedModel:
    """Return a frozen copy of a model with these weights, without hooks or adapters."""
    made = merged_copy(model)
    for name, parameter in made.named_parameters():
        parameter.copy_(weights[name])
    return made


def as_matrix(name: str, weight: Tensor) -> Float[Tensor, "rows cols"]:
    """Return a parameter as a matrix: heads side by side, vectors and biases as one row."""
    if weight.ndim == 3:
        if name.endswith("W_O"):
            return einops.rearrange(weight, "head d_head d_model -> (head d_head) d_model")
        return einops.rearrange(weight, "head d_model d_head -> d_model (head d_head)")
    if weight.ndim == 2 and name.rsplit(".", 1)[-1].lstrip("_").startswith("b_"):
        return einops.rearrange(weight, "head d_head -> 1 (head d_head)")
    return weight if weight.ndim == 2 else weight.reshape(1, -1)


def spectrum(
    matrix: Float[Tensor, "rows cols"],
) -> tuple[Float[Tensor, " rank"], Float[Tensor, "side rank"]]:
    """Return singular values, largest first, and the singular vectors of the shorter side.

    From the eigenvalues of that side's Gram matrix, in float64, which is affordable for embeddings
    of 50,000 rows. Singular values below 1e-8 of the largest are lost to rounding.
    """
    matrix = exact(matrix)
    if not matrix.any():
        side = min(matrix.shape)
        return matrix.new_zeros(side), torch.eye(side, dtype=matrix.dtype, device=matrix.device)
    gram = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    values, vectors = torch.linalg.eigh(gram)
    return values.clamp(min=0).sqrt().flip(0), vectors.flip(1)


def leading_fraction(
    delta: Float[Tensor, "rows cols"], weight: Float[Tensor, "rows cols"], k: int
) -> float:
    """Return the fraction of a change in the weight's first k singular vectors on both sides.

    ||U_k' D V_k||^2 / ||D||^2   (nan for a change of 0)
    """
    u, _, vh = torch.linalg.svd(exact(weight), full_matrices=False)
    inside = u[:, :k].T @ exact(delta) @ vh[:k].T
    return (inside.square().sum() / exact(delta).square().sum()).item()


def from_matrix(
    name: str, matrix: Float[Tensor, "rows cols"], like: Float[Tensor, "..."]
) -> Float[Tensor, "..."]:
    """Return a parameter in its own shape from its matrix of `as_matrix`."""
    if like.ndim == 3 and not name.endswith("W_O"):
        return einops.rearrange(matrix, "d_model (head d) -> head d_model d", head=len(like))
    return matrix.reshape(like.shape)
