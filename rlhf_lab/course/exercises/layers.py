"""Exercises on layers: the value head, values and directions read from them, control labels."""

from typing import Any

import torch
from torch import Tensor

from rlhf_lab.course.cases import Arguments, Cases, Draws
from rlhf_lab.course.exercise import Answer, exercise, make_exercise
from rlhf_lab.course.exercises.toys import TOY_VOCABULARY, residual_cases, toy_transformer
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.models.hooked_model import empty_cache
from rlhf_lab.probes import control_labels
from rlhf_lab.probes.direction import ablate, fit_direction
from rlhf_lab.probes.erasure import fit_leace
from rlhf_lab.probes.value_lens import fit_ridge, normalize_residual

DRAWN = 100  # draws from which the probability of each word type's label is estimated


def _observe_forward(
    build: Answer,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    listen: bool = False,
    cached: int = 0,
) -> dict[str, Any]:
    model, calls = toy_transformer(), []
    plain = model(input_ids)
    policy = build(model, seed=1)
    torch.nn.init.ones_(policy.value_head[2].weight)
    if listen:
        model.add_hook("hook_embed", lambda activation, hook: calls.append(hook.name))
    hooks_before = _count_hooks(model)
    logits, values = _forward(policy, input_ids, attention_mask, cached)
    if values.shape != input_ids.shape:
        return {"values": values.detach()}
    is_whole = attention_mask is None and not cached
    real = torch.ones_like(values).bool() if attention_mask is None else attention_mask
    facts = {
        "values": values.detach().masked_fill(~real, 0.0),
        "logits are unchanged": not is_whole or torch.allclose(logits, plain, atol=1e-5),
        "logits": logits.detach().masked_fill(~real[..., None], 0.0),
        "hooks left behind": _count_hooks(model) - hooks_before,
        "calls of other hooks": calls,
    }
    for name, trained in (("logits", logits.square()), ("values", values)):
        policy.zero_grad(set_to_none=True)
        trained[real].sum().backward(retain_graph=True)
        learns = [p for p in policy.parameters() if p.grad is not None]
        facts[f"parameters that get a gradient from the {name}"] = len(learns)
    return facts


@exercise(TransformerWithValueHead, _observe_forward)
def _forward_cases() -> Cases:
    tokens = lambda batch, seq: Draws(batch).integers(TOY_VOCABULARY, batch, seq)
    padded = torch.tensor([[False, False, True, True, True], [True] * 5])
    return {
        "ordinary": {"input_ids": tokens(3, 5)},
        "batch of 1": {"input_ids": tokens(1, 6)},
        "one token": {"input_ids": tokens(2, 1)},
        "left padding": {"input_ids": tokens(2, 5), "attention_mask": padded},
        "other hooks attached": {"input_ids": tokens(2, 4), "listen": True},
        "with a KV cache": {"input_ids": tokens(2, 5), "cached": 3},
    }


def _forward(policy: Any, ids: Tensor, mask: Tensor | None, cached: int) -> Any:
    if not cached:
        return policy(ids) if mask is None else policy(ids, mask)
    cache, real = empty_cache(policy.base_model, len(ids)), torch.ones_like(ids).bool()
    cuts = slice(cached), slice(cached, None)
    parts = [policy(ids[:, cut], real[:, cut], past_kv_cache=cache) for cut in cuts]
    return [torch.cat(halves, 1) for halves in zip(*parts, strict=True)]


def _count_hooks(model: torch.nn.Module) -> int:
    return sum(len(point._forward_hooks) for point in model.hook_dict.values())


_ridge = make_exercise(fit_ridge)


@exercise(
    normalize_residual,
    lambda fn, residual, norm="LN": fn(toy_transformer(normalization_type=norm), residual),
)
def _residual_cases() -> Cases:
    residual = Draws(0).normal(2, 2, 8) + 0.5
    return residual_cases() | {
        "small numbers": {"residual": 1e-3 * residual},
        "RMSNorm, small numbers": {"residual": 1e-3 * residual, "norm": "RMS"},
        "equal numbers": {"residual": torch.ones(2, 2, 8)},
        "large numbers": {"residual": 1e6 * residual},
        "half precision": {"residual": (300 * residual).half()},
    }


def _clouds(*sites: int, n: int = 12, d_model: int = 3, seed: int = 0) -> Arguments:
    draws = Draws(seed)
    x = draws.normal(*sites, n, d_model) @ draws.normal(d_model, d_model) + 0.5
    labels = torch.arange(n) >= n // 2
    return {"x": x + labels[:, None] * draws.normal(d_model), "labels": labels}


def _observe_fit(fn: Answer, **arguments: Any) -> dict[str, Any]:
    direction, threshold = fn(**arguments)
    return {"direction": direction.float(), "threshold": threshold.float()}


@exercise(fit_direction, _observe_fit)
def _direction_cases() -> Cases:
    mean, lda, uneven = {"method": "mean"}, {"method": "lda"}, {"labels": torch.arange(12) > 8}
    clouds, others = _clouds(2, seed=4), _clouds(2, seed=5)
    every = {"labels": torch.ones(12, dtype=torch.bool)}
    return {
        "difference of means": _clouds(2) | mean,
        "lda": _clouds(2, seed=1) | lda,
        "layers and positions": _clouds(2, 3, n=20, d_model=4, seed=2) | lda,
        "no layer axis": _clouds(n=10, d_model=4, seed=3) | mean,
        "lda with a large ridge": clouds | lda | {"ridge": 0.5},
        "uneven classes": others | mean | uneven,
        "lda where all are one vector": clouds | {"x": torch.full((2, 12, 3), 0.5)} | lda,
        "large numbers": clouds | {"x": 1e6 * clouds["x"]} | mean,
        "lda, uneven classes": others | lda | uneven,
        "all labels are True": others | mean | every,
        "all labels are False": others | mean | {"labels": ~every["labels"]},
    }


def _observe_eraser(fn: Answer, x: Tensor, **arguments: Any) -> dict[str, Any]:
    eraser = fn(x=x, **arguments)
    steps = torch.linspace(-1, 2, x.numel()).reshape(x.shape) * x.abs().max()
    return {"erased": eraser.erase(x).float(), "others, erased": eraser.erase(steps).float()}


@exercise(fit_leace, _observe_eraser)
def _eraser_cases() -> Cases:
    exactly, alike = {"ridge": 1e-9}, _clouds(2, seed=4)
    return {
        "ordinary": _clouds(2, seed=1) | exactly,
        "layers and positions": _clouds(2, 3, n=20, d_model=4, seed=2) | exactly,
        "no layer axis": _clouds(n=10, d_model=4, seed=3) | exactly,
        "uneven classes": _clouds(2, seed=5) | {"labels": torch.arange(12) > 8} | exactly,
        "a large ridge": alike | {"ridge": 0.5},
        "all are one vector": alike | {"x": torch.full((2, 12, 3), 0.5)},
        "large numbers": alike | {"x": 1e4 * alike["x"]} | exactly,
    }


def _observe_ablation(fn: Answer, x: Tensor, direction: Tensor) -> Tensor:
    return fn(x, torch.nn.functional.normalize(direction, dim=-1))


_ablate = make_exercise(ablate, observe=_observe_ablation)


def _observe_labels(fn: Answer, tokens: Tensor, share: float) -> dict[str, Any]:
    draw = lambda seed: fn(tokens, torch.Generator().manual_seed(seed), share)
    first = draw(0)
    facts: dict[str, Any] = {
        "it has the shape of tokens": first.shape == tokens.shape,
        "its entries are True or False": first.dtype == torch.bool,
    }
    if not all(facts.values()):
        return facts
    types, inverse = tokens.flatten().unique(return_inverse=True)
    drawn = torch.stack([draw(seed).flatten() for seed in range(DRAWN)])
    of_types = torch.stack([drawn[:, inverse == i][:, 0] for i in range(len(types))], 1)
    varies = bool((of_types != of_types[0]).any(0).all())
    by_id = bool((of_types.long().diff(dim=1) <= 0).all())
    state = torch.random.get_rng_state()
    facts |= {
        "a word has the same label everywhere": torch.equal(of_types[:, inverse], drawn),
        "each word's label varies over seeds": varies,
        "the number of True words varies": len(of_types.sum(1).unique()) > 1,
        "True words are not always those with the smallest ids": not by_id,
        "the same seed gives the same labels": torch.equal(first, draw(0)),
        "no other random state is used": torch.equal(state, torch.random.get_rng_state()),
    }
    fraction = of_types.double().mean().item()
    near = 5 * (share * (1 - share) / of_types.numel()) ** 0.5
    if varies:
        facts["probability of True"] = share if abs(fraction - share) < near else round(fraction, 1)
    return facts


@exercise(control_labels, _observe_labels)
def _label_cases() -> Cases:
    words = 10 + Draws(0).integers(40, 40)
    spread = torch.tensor([1000, 3, 77, 1000, 3, 1000, 5, 8, 9, 77])
    return {
        "40 places, half True": {"tokens": words, "share": 0.5},
        "a fifth True": {"tokens": words, "share": 0.2},
        "four fifths True": {"tokens": words, "share": 0.8},
        "rows and columns": {"tokens": words.reshape(8, 5), "share": 0.5},
        "widely spaced ids": {"tokens": spread, "share": 0.5},
        "two words": {"tokens": torch.tensor([4, 9, 9, 9, 4, 9]), "share": 0.5},
    }
