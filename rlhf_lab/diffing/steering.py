"""Steering vectors: activations shifted while a model generates, over hook points and strengths."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.diffing.activation_store import Model
from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import generated_logits, kl_per_sequence, kl_per_token, log_probs
from rlhf_lab.functional.masks import real_entries
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.rewards import score_texts
from rlhf_lab.sampling import sample
from rlhf_lab.sampling_spec import SamplingSpec
from rlhf_lab.training.capture import capture_activations

Vector = Float[Tensor, " d_model"]
Figure = Callable[[list[str]], Tensor]  # a number per text, such as the reward


@dataclass(frozen=True)
class Steered:
    """Samples of a model with alpha times a vector added at one hook point.

    Args:
        direction: "vector", or "random 0", "random 1", ... for controls of the same length.
        figures: a number per text, by name; "kl" is the KL from the unsteered model in nats.
    """

    site: str
    alpha: float
    direction: str
    figures: dict[str, Float[Tensor, " n"]]


def mean_difference(
    base: Model,
    tuned: Model,
    tokens: Int[Tensor, "batch seq"],
    site: str,
    mask: Bool[Tensor, "batch seq"],
    attention_mask: Bool[Tensor, "batch seq"] | None = None,
) -> Vector:
    """Return the mean activation of the tuned model minus that of the base, on the same texts.

    Args:
        mask: True at the tokens to average over.
        attention_mask: False on left padding.
    """
    if not real_entries(tokens, mask).any():
        raise ConfigError("mask is False at every token. Choose tokens to average over.")
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
    """Return the mean difference of pairs of texts, at the last token of each.

    Args:
        positive, negative: token ids of any lengths; both texts of a pair have the same index.
    """
    if not 0 < len(positive) == len(negative):
        problem = f"positive has {len(positive)} texts, negative {len(negative)}"
        raise ConfigError(f"{problem}. Pass the same number, at least 1.")
    last = lambda ids: capture_activations(model, torch.tensor([list(ids)]), [site], -1)[site][0]
    pairs = zip(positive, negative, strict=True)
    return torch.stack([last(plus) - last(minus) for plus, minus in pairs]).mean(0)


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
) -> list[Steered]:
    """Sample with alpha times a vector added at each site, and with random directions as controls.

    Every site, direction and alpha has one text per prompt, with the same noise.

    Args:
        vectors: by site.
        figures: by name; for example {"reward": ..., "true_reward": ..., "grammatical": ...}.
        controls: random directions per site, of the vector's length.
    """
    if not vectors or not alphas or not prompts or "kl" in figures:
        raise ConfigError(
            f"there are {len(vectors)} vectors, {len(alphas)} alphas and {len(prompts)} prompts. "
            "Pass at least one of each, and no figure with the name 'kl'."
        )
    if not all(torch.as_tensor(x).isfinite().all() for x in (*vectors.values(), *alphas)):
        raise ConfigError(f"A vector or one of {alphas=} is not finite. Pass finite numbers.")
    generator, directions = torch.Generator().manual_seed(seed), {}
    for site, vector in vectors.items():
        directions[site, "vector"] = vector
        for i in range(controls):
            noise = torch.randn(vector.shape, generator=generator).to(vector)
            directions[site, f"random {i}"] = noise / noise.norm() * vector.norm()
    rows = []
    for (site, direction), vector in directions.items():
        for alpha in alphas:
            found = _sample_steered(policy, site, alpha * vector, prompts, spec, figures, seed)
            rows.append(Steered(site, float(alpha), direction, found))
    return rows


def _sample_steered(
    policy: TransformerWithValueHead,
    site: str,
    added: Vector,
    prompts: Sequence[Sequence[int]],
    spec: SamplingSpec,
    figures: Mapping[str, Figure],
    seed: int,
) -> dict[str, Float[Tensor, " n"]]:
    add = lambda activation, hook: activation + added.to(activation)
    with policy.hooks(fwd_hooks=[(site, add)]):
        samples = sample(policy, prompts, spec, torch.Generator().manual_seed(seed))
        steered = policy(samples.tokens, samples.attention_mask)[0]
    plain = policy(samples.tokens, samples.attention_mask)[0]
    both = (log_probs(generated_logits(x, samples.prefix_len)) for x in (steered, plain))
    kl = kl_per_sequence(kl_per_token(*both), samples.mask)
    texts = samples.texts(policy.base_model.tokenizer)
    read = lambda name: score_texts(figures[name], texts, f"figures[{name!r}]").cpu()
    return {name: read(name) for name in figures} | {"kl": kl.cpu()}
