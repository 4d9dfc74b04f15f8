"""Steering vectors: activations moved while a model writes, swept over layers and strengths."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.diffing.activation_store import Model
from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import (
    Interval,
    bootstrap_interval,
    generated_logits,
    kl_per_sequence,
    kl_per_token,
    log_probs,
)
from rlhf_lab.identity import Check
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.samples import Samples
from rlhf_lab.sampling import sample
from rlhf_lab.sampling_spec import SamplingSpec
from rlhf_lab.training.capture import capture_activations

Vector = Float[Tensor, " d_model"]
Figure = Callable[[list[str]], Tensor]
"""A number per text: the classifier's reward, the true reward, whether it is grammatical."""
KL = "kl"


@dataclass(frozen=True)
class Steered:
    """What a model wrote with a vector added at one site.

    Args:
        site, alpha: where, and how many times the vector.
        direction: "vector", or "random 0", "random 1", ... for controls of the same length.
        length: of what was added.
        figures: by name, a number per text; the KL from the model without it among them, in nats
            per text.
    """

    site: str
    alpha: float
    direction: str
    length: float
    figures: dict[str, Float[Tensor, " n"]]

    def interval(self, name: str) -> Interval:
        """The mean of a figure, with n and its interval over texts."""
        return bootstrap_interval(self.figures[name])


@dataclass(frozen=True)
class SteeringSweep:
    """A sweep over sites and alphas: a row for each vector and for each control."""

    rows: list[Steered]
    checks: list[Check] = field(default_factory=list)

    def table(self) -> list[dict[str, Any]]:
        """Site, alpha and direction of each row, and the interval of each figure as text."""
        return [
            {"site": row.site, "alpha": row.alpha, "direction": row.direction}
            | {name: str(row.interval(name)) for name in row.figures}
            for row in self.rows
        ]


def mean_difference(
    base: Model,
    tuned: Model,
    tokens: Int[Tensor, "batch seq"],
    site: str,
    mask: Bool[Tensor, "batch seq"],
    attention_mask: Bool[Tensor, "batch seq"] | None = None,
) -> Vector:
    """The mean of the tuned model's activations less that of the base's, on the same texts.

    Args:
        mask: True at the tokens to average over.
        attention_mask: False on left padding.

    Raises:
        ConfigError: no token under the mask.
    """
    if not mask.any():
        raise ConfigError("mask is False at every token; choose some to average over.")
    after, before = (
        capture_activations(model, tokens, [site], attention_mask=attention_mask)[site]
        for model in (tuned, base)
    )
    return (after - before)[mask.to(after.device)].mean(0)


def control_vector(
    model: Model,
    positive: Sequence[Sequence[int]],
    negative: Sequence[Sequence[int]],
    site: str,
) -> Vector:
    """The mean difference of pairs of texts, at the last token of each.

    Args:
        positive, negative: token ids, of any lengths; those of a pair have one index.

    Raises:
        ConfigError: no pair, texts without a partner, or an empty text.
    """
    if not positive or len(positive) != len(negative) or not all([*positive, *negative]):
        raise ConfigError(
            f"there are {len(positive)} positive and {len(negative)} negative texts; give as many "
            "of each, at least one, none of them empty."
        )
    last = lambda ids: capture_activations(model, torch.tensor([list(ids)]), [site], -1)[site][0]
    pairs = zip(positive, negative, strict=True)
    return torch.stack([last(plus) - last(minus) for plus, minus in pairs]).mean(0)


def steering_hooks(site: str, added: Vector) -> list[tuple[str, Callable[..., Tensor]]]:
    """Hooks for `model.hooks(fwd_hooks=...)` that add a vector at every position of a site."""
    return [(site, lambda activation, hook: activation + added.to(activation))]


@torch.no_grad()
def steering_sweep(
    policy: TransformerWithValueHead,
    vectors: Mapping[str, Vector],
    alphas: Sequence[float | int],
    prompts: Sequence[Sequence[int]],
    spec: SamplingSpec,
    figures: Mapping[str, Figure],
    seed: int = 0,
    controls: int = 4,
) -> SteeringSweep:
    """Let a policy write with alpha times a vector at each site, and as far in random directions.

    1. Draw random directions per site, as long as its vector.
    2. For each site, direction and alpha, write a text per prompt, with the same noise everywhere.
    3. Take the figures of the texts, and their exact KL from the policy without the vector.
    4. Check one row, drawn at random, against its stored names.

    Args:
        vectors: by site.
        figures: by name; for example {"reward": ..., "true_reward": ..., "grammatical": ...}.
        controls: random directions per site.

    Raises:
        ConfigError: nothing to sweep, or a figure that is called "kl".
    """
    if not vectors or not alphas or not prompts or KL in figures:
        raise ConfigError(
            f"there are {len(vectors)} vectors, {len(alphas)} alphas and {len(prompts)} prompts; "
            f"give at least one of each, and no figure of the name {KL!r}."
        )
    generator, directions = torch.Generator().manual_seed(seed), {}
    for site, vector in vectors.items():
        directions[site, "vector"] = vector
        for i in range(controls):
            noise = torch.randn(vector.shape, generator=generator).to(vector)
            directions[site, f"random {i}"] = noise / noise.norm() * vector.norm()
    rows = []
    for (site, direction), vector in directions.items():
        for alpha in alphas:
            added = alpha * vector
            found, _ = _written(policy, site, added, prompts, spec, figures, seed)
            rows.append(Steered(site, float(alpha), direction, added.norm().item(), found))
    which = int(torch.randint(len(rows), (), generator=generator))
    chosen = rows[which]
    added = chosen.alpha * directions[chosen.site, chosen.direction]
    _, samples = _written(policy, chosen.site, added, prompts, spec, figures, seed)
    checks = [_lengths(rows, vectors), *_of_row(policy, chosen, added, samples, figures)]
    return SteeringSweep(rows, checks)


def _written(
    policy: TransformerWithValueHead,
    site: str,
    added: Vector,
    prompts: Sequence[Sequence[int]],
    spec: SamplingSpec,
    figures: Mapping[str, Figure],
    seed: int,
) -> tuple[dict[str, Float[Tensor, " n"]], Samples]:
    """Figures of what is written with a vector, and the samples themselves."""
    generator = torch.Generator().manual_seed(seed)
    with policy.base_model.hooks(fwd_hooks=steering_hooks(site, added)):
        samples = sample(policy, prompts, spec, generator)
        logprobs = _logprobs(policy, samples)
    kl = kl_per_sequence(kl_per_token(logprobs, _logprobs(policy, samples)), samples.mask)
    texts = samples.texts(policy.base_model.tokenizer)
    found = {name: figure(texts).float().cpu() for name, figure in figures.items()}
    return found | {KL: kl.cpu()}, samples


def _logprobs(
    policy: TransformerWithValueHead, samples: Samples
) -> Float[Tensor, "batch gen d_vocab"]:
    ids, there = samples.tokens, samples.attention_mask
    logits = capture_activations(policy, ids, ["logits"], attention_mask=there)["logits"]
    return log_probs(generated_logits(logits, samples.prefix_len))


def _lengths(rows: Sequence[Steered], vectors: Mapping[str, Vector]) -> Check:
    """Every row is as long as alpha times the vector of its stored site."""
    off = [abs(row.length - abs(row.alpha) * vectors[row.site].norm().item()) for row in rows]
    longest = max(row.length for row in rows)
    return Check.at_most("controls are as long as the vector", max(off), 1e-4 * longest + 1e-9)


def _of_row(
    policy: TransformerWithValueHead,
    row: Steered,
    added: Vector,
    samples: Samples,
    figures: Mapping[str, Figure],
) -> list[Check]:
    """Hold a row to its names: what is added where, and its figures of one text by themselves."""
    ids, there = samples.tokens[:1], samples.attention_mask[:1]
    wanted = [row.site, "logits"]
    plain = capture_activations(policy, ids, wanted, attention_mask=there)
    with policy.base_model.hooks(fwd_hooks=steering_hooks(row.site, added)):
        moved = capture_activations(policy, ids, wanted, attention_mask=there)
    off = ((moved[row.site] - plain[row.site])[there] - added).abs().max()
    size = plain[row.site].abs().max().clamp(min=1.0)
    p, q = (generated_logits(x["logits"], samples.prefix_len)[0].cpu() for x in (moved, plain))
    p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)[samples.mask[0].cpu()].sum()
    text = samples.texts(policy.base_model.tokenizer)[:1]
    worst = max(abs(f(text)[0].item() - row.figures[name][0].item()) for name, f in figures.items())
    kl_off = (kl - row.figures[KL][0]).abs() / kl.abs().clamp(min=1.0)
    return [
        Check.at_most(f"alpha times the vector is added at {row.site}", (off / size).item(), 1e-4),
        Check.at_most("a text's figures, asked again by name", worst, 1e-3),
        Check.at_most("a text's KL, summed in float64", kl_off.item(), 1e-3),
    ]
