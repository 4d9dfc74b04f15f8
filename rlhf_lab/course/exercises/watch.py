"""Lesson 08, watch it learn: read values and directions out of layers, ablate and erase them."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlhf_lab.course.cases import draw
from rlhf_lab.course.exercise import Case, make_exercise
from rlhf_lab.course.exercises.toys import toy_transformer
from rlhf_lab.probes.direction import ablate, fit_direction
from rlhf_lab.probes.erasure import fit_leace
from rlhf_lab.probes.value_lens import normalize_residual


def _residual_cases() -> tuple[Case, ...]:
    generator = torch.Generator().manual_seed(0)

    def residual(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, 8, generator=generator) + 0.5

    rms = {"normalization_type": "RMS"}
    return (
        Case("ordinary", {"residual": residual(3, 4)}),
        Case("all layers at once", {"residual": residual(2, 3, 4)}),
        Case("a single state", {"residual": residual()}),
        Case("RMSNorm", {"residual": residual(3, 4)} | rms),
        Case("small numbers", {"residual": 1e-3 * residual(2, 2)}),
        Case("RMSNorm, small numbers", {"residual": 1e-3 * residual(2, 2)} | rms),
        Case("equal numbers", {"residual": torch.ones(2, 2, 8)}),
        Case("large numbers", {"residual": 1e6 * residual(2, 2)}),
        Case("half precision", {"residual": (300 * residual(2, 2)).half()}),
    )


def _observe_normalized(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    model = toy_transformer(normalization_type=arguments.get("normalization_type", "LN"))
    return fn(model, arguments["residual"])


def _clouds(sites: tuple[int, ...], n: int, d_model: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    skew = torch.randn(d_model, d_model, generator=generator)
    x = torch.randn(*sites, n, d_model, generator=generator) @ skew + 0.5
    labels = torch.arange(n) >= n // 2
    center = torch.randn(d_model, generator=generator)
    return {"x": x + labels[:, None] * center, "labels": labels}


def _direction_cases() -> tuple[Case, ...]:
    by_mean, by_lda = {"method": "mean"}, {"method": "lda"}
    uneven = _clouds((2,), 12, 3, 5)
    return (
        Case("difference of means", _clouds((2,), 12, 3, 0) | by_mean),
        Case("lda", _clouds((2,), 12, 3, 1) | by_lda),
        Case("layers and positions", _clouds((2, 3), 20, 4, 2) | by_lda),
        Case("no layer axis", _clouds((), 10, 4, 3) | by_mean),
        Case("lda with a large ridge", _clouds((2,), 12, 3, 4) | by_lda | {"ridge": 0.5}),
        Case("uneven classes", uneven | by_mean | {"labels": torch.arange(12) > 8}),
        Case("lda where all are one vector", {**uneven, "x": 0 * uneven["x"] + 0.5} | by_lda),
        Case("large numbers", {**_clouds((2,), 12, 3, 6), "x": 1e6 * uneven["x"]} | by_mean),
        Case("lda, uneven classes", uneven | by_lda | {"labels": torch.arange(12) > 8}),
        Case("labels of one class", uneven | by_mean | {"labels": torch.arange(12) >= 0}),
    )


def _observe_fit(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    labels, accepted = arguments["labels"], []
    if not bool(labels.all()):
        direction, threshold = fn(**arguments)
        return {"direction": direction.float(), "threshold": threshold.float()}
    for of_one_class in (labels, ~labels):
        with contextlib.suppress(ValueError):
            fn(**{**arguments, "labels": of_one_class})
            accepted.append(of_one_class)
    return {"refuses labels of one class": not accepted}


def _eraser_cases() -> tuple[Case, ...]:
    exactly = {"ridge": 1e-9}
    uneven = _clouds((2,), 12, 3, 5) | {"labels": torch.arange(12) > 8}
    several = _clouds((2, 3), 20, 4, 2)
    alike = _clouds((2,), 12, 3, 4)
    return (
        Case("ordinary", _clouds((2,), 12, 3, 1) | exactly),
        Case("layers and positions", several | exactly),
        Case("no layer axis", _clouds((), 10, 4, 3) | exactly),
        Case("uneven classes", uneven | exactly),
        Case("a large ridge", alike | {"ridge": 0.5}),
        Case("all are one vector", alike | {"x": 0 * alike["x"] + 0.5}),
        Case("large numbers", alike | {"x": 1e4 * alike["x"]} | exactly),
    )


def _observe_eraser(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    eraser, x = fn(**arguments), arguments["x"]
    steps = torch.linspace(-1, 2, x.numel()).reshape(x.shape) * x.abs().max()
    return {"erased": eraser.erase(x).float(), "others, erased": eraser.erase(steps).float()}


def _ablate_cases() -> tuple[Case, ...]:
    shapes = {
        "ordinary": {"*site": 2, "n": 4, "d_model": 5},
        "other sizes": {"*site": 3, "n": 2, "d_model": 6},
        "one activation": {"*site": 1, "n": 1, "d_model": 5},
    }
    drawn = [(name, draw(ablate, sizes, i)) for i, (name, sizes) in enumerate(shapes.items())]
    first = drawn[0][1]
    drawn.append(("no layer axis", {name: value[0] for name, value in first.items()}))
    drawn.append(("large numbers", {"x": 1e6 * first["x"], "direction": first["direction"]}))
    unit = torch.nn.functional.normalize
    return tuple(
        Case(name, {"x": case["x"], "direction": unit(case["direction"], dim=-1)})
        for name, case in drawn
    )


EXERCISES = (
    make_exercise(normalize_residual, cases=_residual_cases, observe=_observe_normalized),
    make_exercise(fit_direction, cases=_direction_cases, observe=_observe_fit),
    make_exercise(ablate, cases=_ablate_cases),
    make_exercise(fit_leace, cases=_eraser_cases, observe=_observe_eraser),
)
