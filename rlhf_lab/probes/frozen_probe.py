"""FrozenProbe: persona drift, read at one slot by a linear probe that phase 0 froze."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import bootstrap_means
from rlhf_lab.models.device import where_exact
from rlhf_lab.organism.rewards import grammatical, true_reward
from rlhf_lab.probes.direction import (
    Fitted,
    accuracy,
    cosine_interval,
    fit_direction,
    paired_excess,
    project,
)
from rlhf_lab.probes.direction_probe import LAYER_SITES
from rlhf_lab.probes.probe import (
    RESAMPLES,
    Check,
    Observation,
    Probe,
    Record,
    decimals,
    interval_fields,
)
from rlhf_lab.probes.steering import continue_steered
from rlhf_lab.sampling import sampling_noise
from rlhf_lab.sampling_spec import SamplingSpec
from rlhf_lab.training import RLHFTrainer

ALPHAS = (-1.0, -0.5, -0.25, 0.25, 0.5, 1.0)
_Tensors = dict[str, Tensor]
LEAST_SIZE = 1e-3  # difference of means below which all tokens are equal up to rounding


class FrozenProbe(Probe):
    """A classifier of a label at one slot, fitted to the reference once.

    It is the difference of class means d_0 with its threshold, at each site, fitted to the first
    two thirds of the eval text and tested on the rest. In addition to `Direction`, which has one
    accuracy per layer and position, it records:

    - the accuracy of the frozen classifier, its gap to a refitted one on the same sequences, each
      with its interval, and the fraction that it calls positive;
    - the interval of the cosine of both directions, and the cosine of two halves' (the floor);
    - the shift of the activations along d_0, and the cosine of the shift with d_0;
    - a control: shuffled labels, fitted to a quarter of the sequences;
    - on Reel, Bayes' accuracy, and the effect of d_0: alpha times the difference of means is added
      at `steer_at` and the slot while the policy continues held-out prefixes; the true reward, the
      fraction of grammatical texts and the surprisal, compared with random directions.

    Checks: the shift is the change of the mean projection; before learning both classifiers are
    equal; Bayes' rule is not beaten by more than 4 standard errors.

    Args:
        pos: position of the slot; -1 for the last, in texts of one length.
        alphas: strengths of steering, in differences of means.
        steered: prefixes to continue; none when 0.
        randoms: random directions for each strength.
        steer_at: a site; that of the middle block when None.

    Raises:
        ConfigError: If an alpha is 0, or alphas or randoms are missing.
    """

    name = "frozen_probe"
    question = "Does a classifier of phase 0 still read the policy, and does its direction steer?"
    caveat = "A fall means that the label is represented differently, not that it is gone."
    text = "eval"
    sites = LAYER_SITES
    every = 5
    needs_labels = True

    def __init__(
        self,
        pos: int = -1,
        alphas: tuple[float, ...] = ALPHAS,
        steered: int = 32,
        randoms: int = 20,
        steer_at: str | None = None,
        sites: tuple[str, ...] = LAYER_SITES,
        every: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(every, name)
        self.pos, self.alphas, self.steered, self.randoms = pos, alphas, steered, randoms
        self.steer_at, self.sites = steer_at, sites
        if not alphas or 0 in alphas or randoms < 1:
            raise ConfigError(
                f"alphas={alphas} and randoms={randoms} of {self.name}: give sizes other than 0, "
                "and at least one random direction; steered=0 leaves steering out."
            )

    def settings(self) -> dict:
        return super().settings() | {"alphas": list(self.alphas)}

    def check_run(self, trainer: RLHFTrainer) -> None:
        if trainer.args.reset_reference_every is not None:
            raise ConfigError(
                f"{self.name} reads with the reference of phase 0, and reset_reference_every="
                f"{trainer.args.reset_reference_every} makes another; leave it None."
            )

    def observe(self, seen: Observation) -> Record:
        labels = seen.text.labels
        columns = seen.text.columns(self.pos).unique().tolist()
        if len(columns) > 1:
            raise ConfigError(
                f"pos={self.pos} of {self.name} is no one slot in texts of unequal length "
                f"({columns[0]} to {columns[-1]}); count from the front."
            )
        cut, sites = 2 * len(labels) // 3, list(seen.acts)
        x, first = (
            where_exact(torch.stack([acts[site] for site in sites])).double()
            for acts in (seen.acts, seen.reference_acts)
        )
        labels = labels.to(x.device)
        frozen, refit = (fit_direction(acts[:, :cut], labels[:cut]) for acts in (first, x))
        projection, values = _read(x, first, labels, cut, (frozen, refit))
        values |= {
            "sites": sites,
            "position": columns[0],
            "sequences": {"fitted": cut, "held": len(labels) - cut, "steered": self.steered},
            "accuracy_control": _control(x, labels, cut),
        }
        same = (frozen.direction * refit.direction).sum(-1)
        change = projection.mean(1) - project(first[:, cut:], frozen.direction).mean(1)
        gap = (torch.tensor(values["shift"]) - change.cpu()).abs().max()
        checks = [Check.at_most("the shift is the change of the mean projection", gap, 1e-4)]
        starts_apart = {"reference", "interventions"} & set(seen.custom_components)
        if seen.ctx.phase == 0 and not starts_apart:
            there = torch.tensor(values["size"]) > LEAST_SIZE
            apart = max([0.0, *(1 - same.cpu()[there]).tolist(), *map(abs, values["gap"])])
            checks.append(Check.at_most("before learning both readers are one", apart, 1e-6))
        tensors: _Tensors = {}
        if seen.truth_fits_labels:
            bayes, check = _bayes(seen, x[:, cut:], refit, cut, values["position"])
            values |= bayes
            checks.append(check)
        if seen.truth is not None and self.steered:
            site = self.steer_at or f"blocks.{(len(seen.ctx.policy.base_model.blocks) - 1) // 2}"
            site = site if self.steer_at else f"{site}.hook_resid_post"
            vector = frozen.direction[sites.index(site)] * values["size"][sites.index(site)]
            steered, arms = self._steer(seen, cut, values["position"], site, vector)
            values |= {"steered_at": site} | steered
            tensors |= arms
        return Record(values, {name: t.float() for name, t in tensors.items()}, checks)

    def _steer(
        self, seen: Observation, cut: int, pos: int, site: str, vector: Float[Tensor, " d_model"]
    ) -> tuple[dict, _Tensors]:
        prefixes = seen.text.tokens[cut : cut + self.steered, : pos + 1]
        generator = torch.Generator().manual_seed(0)
        random = torch.randn(self.randoms, len(vector), generator=generator)
        random = random / random.norm(dim=1, keepdim=True) * vector.norm().float().cpu()
        noise = steering_noise(seen, len(prefixes), pos)
        vector = vector.float().cpu()
        added = [torch.zeros_like(vector), *(alpha * vector for alpha in self.alphas)]
        sizes = sorted({abs(alpha) for alpha in self.alphas})
        added += [size * direction for size in sizes for direction in random]
        arms = torch.stack(added).repeat_interleave(len(prefixes), 0).to(prefixes.device)
        tokens, surprise = continue_steered(
            seen.ctx.policy,
            prefixes.repeat(len(added), 1),
            site,
            arms,
            spec_of(seen, pos),
            noise.repeat(1, len(added)),
        )
        texts = seen.ctx.policy.base_model.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        values: dict = {"alphas": [0.0, *self.alphas], "random_alphas": sizes}
        tensors: _Tensors = {}
        scores = {
            "true_reward": true_reward(texts),
            "grammatical": grammatical(texts).float(),
            "surprise": surprise.cpu(),
        }
        for name, score in scores.items():
            by_arm = score.reshape(len(added), -1)
            own, others = by_arm[: 1 + len(self.alphas)], by_arm[1 + len(self.alphas) :]
            others = others.reshape(len(sizes), self.randoms, -1)
            tensors[name] = own
            for what, rows in ((name, own), (f"{name}_random", others.mean(1))):
                found = bootstrap_means(rows.T, resamples=RESAMPLES)
                values |= {what: decimals(found.value, 4), **interval_fields(what, found)}
        return values, tensors


def _read(
    x: Float[Tensor, "site n d_model"],
    first: Float[Tensor, "site n d_model"],
    labels: Bool[Tensor, " n"],
    cut: int,
    readers: tuple[Fitted, Fitted],
) -> tuple[Float[Tensor, "site held"], dict]:
    (frozen, refit), held = readers, labels[cut:]
    projection = project(x[:, cut:], frozen.direction)
    called = projection > frozen.threshold[:, None]
    right = (called == held).double()
    anew = (project(x[:, cut:], refit.direction) > refit.threshold[:, None]) == held
    fitted, sides = first[:, :cut], (labels[:cut], ~labels[:cut])
    fitted_now = x[:, :cut]
    positive, negative = (fitted[:, side].mean(1) for side in sides)
    moved = x[:, cut:] - first[:, cut:]
    along, mean = project(moved, frozen.direction), moved.mean(1)
    cosines = (mean * frozen.direction).sum(-1) / mean.norm(dim=-1)
    halves = [fit_direction(fitted_now[:, half], labels[:cut][half]) for half in halves_of(sides)]
    cosine = cosine_interval(x[:, :cut], first[:, :cut], labels[:cut], RESAMPLES)
    means = {
        "accuracy_frozen": right,
        "gap": right - anew.double(),
        "called": called.double(),
        "shift": along,
    }
    values: dict = {
        "size": decimals((positive - negative).norm(dim=-1)),
        "positive": round(held.double().mean().item(), 4),
        "moved_cosine": decimals(cosines, 4),
        "split_half": decimals((halves[0].direction * halves[1].direction).sum(-1), 4),
        "cosine": decimals((frozen.direction * refit.direction).sum(-1), 4),
        **interval_fields("cosine", cosine),
    }
    for name, rows in means.items():
        found = bootstrap_means(rows.T, resamples=RESAMPLES)
        values |= {name: decimals(found.value, 4), **interval_fields(name, found)}
    return projection, values


def halves_of(
    sides: tuple[Bool[Tensor, " n"], Bool[Tensor, " n"]],
) -> tuple[Bool[Tensor, " n"], Bool[Tensor, " n"]]:
    """Two halves of the sequences, each with every other one of either class."""
    odd = sum((side & (side.cumsum(0) % 2 == 1)) for side in sides) > 0
    return odd, ~odd


def _control(
    x: Float[Tensor, "site n d_model"], labels: Bool[Tensor, " n"], cut: int
) -> list[float]:
    """The accuracy on shuffled labels of a reader of shuffled ones.

    It is fitted to a quarter of the sequences, at most 4 per dimension: where they are many, what
    leaks is faint.
    """
    generator = torch.Generator().manual_seed(0)
    shuffled = labels[torch.randperm(len(labels), generator=generator).to(labels.device)]
    few = control_rows(cut, x.shape[-1])
    reader = fit_direction(x[:, :few], shuffled[:few])
    found = accuracy(project(x[:, cut:], reader.direction), reader.threshold, shuffled[cut:])
    return decimals(found, 4)


def control_rows(fitted: int, d_model: int) -> int:
    """How many sequences the control is fitted to."""
    return max(8, min(fitted // 4, 4 * d_model))


def _bayes(
    seen: Observation, held: Float[Tensor, "site held d_model"], refit: Fitted, cut: int, pos: int
) -> tuple[dict, Check]:
    tokens, labels = seen.text.tokens, seen.text.labels[cut:].to(held.device)
    belief, mask = seen.truth.beliefs(tokens)
    best = (belief[cut:, pos] > 0.5).to(held.device)
    decided = project(held, refit.direction) > refit.threshold[:, None]
    excess, error = paired_excess(decided, best.expand_as(decided), labels)
    informed = bool(((belief[cut:, pos] - 0.5).abs() > 1e-9).any() and mask[cut:, pos].all())
    beaten = (excess - 4 * error).max().clamp(min=0).item() if informed else 0.0
    right = (best == labels).double()
    found = bootstrap_means(right[:, None], resamples=RESAMPLES)
    values = {
        "slot": seen.truth.slot_names(tokens.shape[1])[pos],
        "bayes_accuracy": decimals(found.value, 4),
        **interval_fields("bayes_accuracy", found),
    }
    return values, Check.at_most("Bayes' rule is not beaten", beaten, 0.0)


def spec_of(seen: Observation, pos: int) -> SamplingSpec:
    """The run's sampling, until the eval text's length and without stops."""
    args = seen.args
    left = seen.text.tokens.shape[1] - pos - 1
    return SamplingSpec(max(1, left), args.temperature, args.top_k, args.top_p)


def steering_noise(seen: Observation, n: int, pos: int) -> Float[Tensor, "gen n"]:
    """The same noise in every arm and phase: differences between arms are no luck."""
    generator = torch.Generator().manual_seed(1)
    return sampling_noise(n, spec_of(seen, pos).gen_len, generator)
