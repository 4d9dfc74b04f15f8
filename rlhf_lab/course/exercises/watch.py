"""Exercises on watch it learn: read values and directions out of layers, ablate and erase them."""

from typing import Any

import torch
from torch import Tensor

from rlhf_lab.course.cases import Arguments, Cases, Draws, draw
from rlhf_lab.course.exercise import Answer, make_exercise
from rlhf_lab.course.exercises.toys import toy_transformer
from rlhf_lab.probes.direction import ablate, fit_direction
from rlhf_lab.probes.erasure import fit_leace
from rlhf_lab.probes.value_lens import normalize_residual


def _residual_cases() -> Cases:
    residual = lambda *shape: Draws(0).normal(*shape, 8) + 0.5
    return {
        "ordinary": {"residual": residual(3, 4)},
        "all layers at once": {"residual": residual(2, 3, 4)},
        "a single state": {"residual": residual()},
        "RMSNorm": {"residual": residual(3, 4), "norm": "RMS"},
        "small numbers": {"residual": 1e-3 * residual(2, 2)},
        "RMSNorm, small numbers": {"residual": 1e-3 * residual(2, 2), "norm": "RMS"},
        "equal numbers": {"residual": torch.ones(2, 2, 8)},
        "large numbers": {"residual": 1e6 * residual(2, 2)},
        "half precision": {"residual": (300 * residual(2, 2)).half()},
    }


def _observe_normalized(fn: Answer, residual: Tensor, norm: str = "LN") -> Any:
    return fn(toy_transformer(normalization_type=norm), residual)


def _clouds(*sites: int, n: int = 12, d_model: int = 3, seed: int = 0) -> Arguments:
    draws = Draws(seed)
    x = draws.normal(*sites, n, d_model) @ draws.normal(d_model, d_model) + 0.5
    labels = torch.arange(n) >= n // 2
    return {"x": x + labels[:, None] * draws.normal(d_model), "labels": labels}


def _direction_cases() -> Cases:
    mean, lda, uneven = {"method": "mean"}, {"method": "lda"}, {"labels": torch.arange(12) > 8}
    clouds, others = _clouds(2, seed=4), _clouds(2, seed=5)
    one_class = {"labels": torch.arange(12) >= 0}
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
        "labels of one class": others | mean | one_class,
    }


def _observe_fit(fn: Answer, labels: Tensor, **arguments: Any) -> dict[str, Any]:
    if not labels.all():
        direction, threshold = fn(labels=labels, **arguments)
        return {"direction": direction.float(), "threshold": threshold.float()}
    for of_one_class in (labels, ~labels):
        try:
            fn(labels=of_one_class, **arguments)
            return {"refuses labels of one class": False}
        except ValueError:
            pass
    return {"refuses labels of one class": True}


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


def _observe_eraser(fn: Answer, x: Tensor, **arguments: Any) -> dict[str, Any]:
    eraser = fn(x=x, **arguments)
    steps = torch.linspace(-1, 2, x.numel()).reshape(x.shape) * x.abs().max()
    return {"erased": eraser.erase(x).float(), "others, erased": eraser.erase(steps).float()}


def _ablate_cases() -> Cases:
    def case(site: int, n: int, d_model: int) -> Arguments:
        drawn = draw(ablate, {"*site": site, "n": n, "d_model": d_model}, n)
        direction = torch.nn.functional.normalize(drawn["direction"], dim=-1)
        return drawn | {"direction": direction}

    first = case(2, 4, 5)
    return {
        "ordinary": first,
        "other sizes": case(3, 2, 6),
        "one activation": case(1, 1, 5),
        "no layer axis": {name: value[0] for name, value in first.items()},
        "large numbers": first | {"x": 1e6 * first["x"]},
    }


EXERCISES = (
    make_exercise(normalize_residual, _residual_cases, _observe_normalized),
    make_exercise(fit_direction, _direction_cases, _observe_fit),
    make_exercise(ablate, _ablate_cases),
    make_exercise(fit_leace, _eraser_cases, _observe_eraser),
)
