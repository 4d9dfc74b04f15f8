"""Direction: linear probe for a label in the residual stream, its ablation, and its drift."""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import auc
from rlhf_lab.functional.masks import at_least_float32
from rlhf_lab.models.device import exact, where_exact
from rlhf_lab.probes.bindings import bind_direction
from rlhf_lab.probes.probe import Check, Observation, Probe, Record, decimals

LAYER_SITES = ("blocks.0.hook_resid_pre", "blocks.*.hook_resid_post")
Method = Literal["mean", "lda"]


class Fitted(NamedTuple):
    """A direction of length 1 per site, and the projection above which the label is True."""

    direction: Float[Tensor, "*site d_model"]
    threshold: Float[Tensor, "*site"]


def fit_direction(
    x: Float[Tensor, "*site n d_model"],
    labels: Bool[Tensor, " n"],
    method: Method = "mean",
    ridge: float = 1e-4,
) -> Fitted:
    """The direction that separates two classes, at each site by itself.

    1. "mean": the difference of the class means.
    2. "lda": that difference divided by the covariance within the classes (with a ridge of a share
       of its mean variance): the best direction for two Gaussians of one covariance.
    3. Scale to length 1; put the threshold half-way between the class means.

    Raises ValueError unless both labels occur.

    d = mu+ - mu-  (Marks and Tegmark 2024, arXiv 2310.06824);  d = S^-1 (mu+ - mu-)  (Fisher 1936)
    """
    if bool(labels.all()) or not bool(labels.any()):
        raise ValueError(f"labels are all {bool(labels[0])}; give sequences of both classes.")
    x = x.double()  # the covariance's inverse makes much of what float32 rounds away
    positive, negative = x[..., labels, :].mean(-2), x[..., ~labels, :].mean(-2)
    direction = positive - negative
    if method == "lda":
        means = torch.where(labels[:, None], positive[..., None, :], negative[..., None, :])
        centered = x - means
        covariance = centered.mT @ centered / len(labels)
        variance = covariance.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=1e-12)
        identity = torch.eye(x.shape[-1], dtype=variance.dtype, device=x.device)
        covariance = covariance + ridge * variance[..., None, None] * identity
        factor = torch.linalg.cholesky(covariance)
        direction = torch.cholesky_solve(direction[..., None], factor)[..., 0]
    direction = direction / direction.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    threshold = ((positive + negative) / 2 * direction).sum(-1)
    return Fitted(direction, threshold)


def fit_each_site(
    x: Float[Tensor, "site *pos n d_model"], labels: Bool[Tensor, " n"], method: Method
) -> Fitted:
    """`fit_direction` at one site after the other.

    The directions are the same, but the covariances of all sites at once would fill the memory
    where d_model is large.
    """
    parts = [fit_direction(one.float(), labels, method) for one in x]
    return Fitted(*(torch.stack(part) for part in zip(*parts, strict=True)))


def project(
    x: Float[Tensor, "*site n d_model"], direction: Float[Tensor, "*site d_model"]
) -> Float[Tensor, "*site n"]:
    """The length of each activation along a direction."""
    x = at_least_float32(x)
    return exact((x @ direction.to(x)[..., None])[..., 0])


def ablate(
    x: Float[Tensor, "*site n d_model"], direction: Float[Tensor, "*site d_model"]
) -> Float[Tensor, "*site n d_model"]:
    """Take a direction of length 1 out of activations: h - (h . d) d.

    Source: Arditi et al. 2024, arXiv 2406.11717, section 2.4.
    """
    along = project(x, direction).to(x.dtype)[..., None]
    return x - along * direction.to(x.dtype)[..., None, :]


def accuracy(
    projection: Float[Tensor, "*site n"],
    threshold: Float[Tensor, "*site"],
    labels: Bool[Tensor, " n"],
) -> Float[Tensor, "*site"]:
    """The share of sequences on the right side of the threshold."""
    return ((projection > threshold[..., None]) == labels).double().mean(-1)


def paired_excess(
    decided: Bool[Tensor, "*site n"], best: Bool[Tensor, "*site n"], labels: Bool[Tensor, " n"]
) -> tuple[Float[Tensor, "*site"], Float[Tensor, "*site"]]:
    """By how much decisions beat the best possible rule on the same sequences, and its standard
    error.

    1. Only sequences on which the two differ count: +1 where the decision is right, -1 where not.
    2. Average over all sequences; the standard error is that of the mean (McNemar 1947).
    """
    gain = (decided == labels).double() - (best == labels).double()
    n = gain.shape[-1]
    error = (gain.var(-1, unbiased=n > 1) / n).sqrt()
    return gain.mean(-1), error


class Direction(Probe):
    """The direction of a label in the residual stream, by layer and position.

    It stores held-out accuracy and AUC; the accuracy with shuffled labels and along a random
    direction; the projection of both classes on the reference's direction (does the text move?)
    and the cosine with it (does the axis turn?). On Reel, the accuracy of Bayes' rule on the same
    sequences is beside it, which no probe can beat but by luck.

    Checks: after ablation nothing is left along the direction; on Reel, Bayes' rule is not beaten
    by more than 4 standard errors (a leak would).

    Args:
        label: what the eval labels mean.
        method: "mean" or "lda".
        sites: hook names.

    Raises:
        ConfigError: another method.
    """

    name = "direction"
    text = "eval"
    sites = LAYER_SITES
    every = 5

    def __init__(
        self,
        label: str = "sentiment",
        method: str = "lda",
        sites: tuple[str, ...] = LAYER_SITES,
        every: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(every, name or f"direction_{label}")
        if method not in ("mean", "lda"):
            raise ConfigError(f"method={method!r} of {self.name} must be 'mean' or 'lda'.")
        self.method, self.sites = method, sites

    def observe(self, seen: Observation) -> Record:
        """Fit on the first two thirds of the sequences, look at the last third."""
        labels = seen.text.labels
        if labels is None:
            raise ConfigError(f"{self.name} needs a label per sequence; give the suite labels=.")
        cut = 2 * len(labels) // 3
        x, reference = (
            where_exact(torch.stack([acts[site] for site in seen.acts]).transpose(1, 2))
            for acts in (seen.acts, seen.reference_acts)
        )
        labels = labels.to(x.device)
        ours = Split(x[:, :, :cut], labels[:cut], x[:, :, cut:], labels[cut:])
        fitted = fit_each_site(ours.x, ours.labels, self.method)
        first = fit_each_site(reference[:, :, :cut], ours.labels, self.method)
        held, positive = ours.held, ours.held_labels
        moved = project(held, first.direction)
        values = {
            "sites": list(seen.acts),
            "accuracy": _accuracy(ours, fitted),
            "auc": decimals(auc(project(held, fitted.direction), positive), 4),
            "cosine_with_reference": decimals((fitted.direction * first.direction).sum(-1), 4),
            **_controls(ours, self.method),
            "positive_projection": decimals(moved[..., positive].mean(-1), 4),
            "negative_projection": decimals(moved[..., ~positive].mean(-1), 4),
        }
        left = project(ablate(held.double(), fitted.direction), fitted.direction)
        miss = left.abs().max().item()
        checks = [Check.at_most("nothing is left along an ablated direction", miss, 1e-6)]
        if seen.truth is not None:
            bayes, check = _against_bayes(seen, ours, fitted, cut)
            values |= bayes
            checks.append(check)
        tensors = {"direction": fitted.direction, "reference_direction": first.direction}
        return Record(values, {name: x.float() for name, x in tensors.items()}, checks)

    def bind(self, seen: Observation, record: Record) -> list[Check]:
        """Hold the record to what is computed another way; see `bind_direction`."""
        return bind_direction(seen, record, self.method)


class Split(NamedTuple):
    """Activations and labels to fit on, and those that are held out."""

    x: Float[Tensor, "site seq fit d_model"]
    labels: Bool[Tensor, " fit"]
    held: Float[Tensor, "site seq test d_model"]
    held_labels: Bool[Tensor, " test"]


def _accuracy(split: Split, fitted: Fitted) -> list:
    """How often a direction tells the held-out classes apart."""
    along = project(split.held, fitted.direction)
    return decimals(accuracy(along, fitted.threshold, split.held_labels), 4)


def _controls(split: Split, method: Method) -> dict[str, list]:
    """Accuracies that a probe should beat: of shuffled labels, and of a random direction."""
    x, labels = split.x, split.labels
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(labels), generator=generator).to(labels.device)
    shuffled = fit_each_site(x, labels[order], method)
    noise = torch.randn(x.shape[-1], generator=generator).to(x.device)
    noise = (noise / noise.norm()).expand(*x.shape[:2], -1).double()
    along = project(x, noise)
    threshold = (along[..., labels].mean(-1) + along[..., ~labels].mean(-1)) / 2
    return {
        "accuracy_shuffled": _accuracy(split, shuffled),
        "accuracy_random": _accuracy(split, Fitted(noise, threshold)),
    }


def _against_bayes(
    seen: Observation, split: Split, fitted: Fitted, cut: int
) -> tuple[dict[str, list], Check]:
    """The accuracy of Bayes' rule at each position, and the check that it is not beaten."""
    tokens, labels = seen.text.tokens, split.held_labels
    decided = project(split.held, fitted.direction) > fitted.threshold[..., None]
    belief, mask = seen.truth.beliefs(tokens)
    best = (belief[cut:] > 0.5).T.to(labels.device)
    excess, error = paired_excess(decided, best.expand_as(decided), labels)
    informed = ((belief[cut:] - 0.5).abs() > 1e-9).any(0) & mask[cut:].all(0)
    beaten = ((excess - 4 * error)[:, informed.to(excess.device)]).max().clamp(min=0).item()
    bayes = (best == labels).double().mean(-1)
    values = {
        "bayes_accuracy": decimals(bayes, 4),
        "informed": informed.tolist(),
        "slots": seen.truth.slot_names(tokens.shape[1]),
    }
    return values, Check.at_most("Bayes' rule is not beaten", beaten, 0.0)
