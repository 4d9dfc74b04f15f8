"""Lesson 08, watch it learn: read values and directions out of layers, and take directions out."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlhf_lab.course.cases import draw
from rlhf_lab.course.exercise import Case, Exercise, Slip
from rlhf_lab.course.exercises.toys import toy_transformer
from rlhf_lab.probes.direction import ablate, fit_direction
from rlhf_lab.probes.value_lens import normalize_residual

LESSON = "08_watch_it_learn"


def _residual_cases() -> tuple[Case, ...]:
    generator = torch.Generator().manual_seed(0)

    def residual(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, 8, generator=generator) + 0.5

    return (
        Case("ordinary", {"residual": residual(3, 4)}),
        Case("all layers at once", {"residual": residual(2, 3, 4)}),
        Case("a single state", {"residual": residual()}),
        Case("RMSNorm", {"residual": residual(3, 4), "normalization_type": "RMS"}),
        Case("small numbers", {"residual": 1e-3 * residual(2, 2)}),
        Case("equal numbers", {"residual": torch.ones(2, 2, 8)}),
        Case("large numbers", {"residual": 1e6 * residual(2, 2)}),
        Case("half precision", {"residual": (300 * residual(2, 2)).half()}),
    )


def _observe_normalized(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    model = toy_transformer(normalization_type=arguments.get("normalization_type", "LN"))
    return fn(model, arguments["residual"])


def _clouds(sites: tuple[int, ...], n: int, d_model: int, seed: int) -> dict[str, torch.Tensor]:
    """Two skewed clouds of activations, of which the second half is labelled True."""
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
        Case("large numbers", {**_clouds((2,), 12, 3, 6), "x": 1e6 * uneven["x"]} | by_mean),
    )


def _observe_fit(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Direction and threshold, in any precision."""
    direction, threshold = fn(**arguments)
    return {"direction": direction.float(), "threshold": threshold.float()}


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
    Exercise(
        lesson=LESSON,
        reference=normalize_residual,
        difficulty=2,
        minutes=15,
        hints=(
            "The final norm does three things: centre, divide, and then gain and bias. The value "
            "head listens before the third.",
            "Everything happens along the last axis, with keepdim=True. Compute in float32, and "
            "give the result the dtype of the residual.",
            "x = x - x.mean(-1, keepdim=True) unless it is RMSNorm; then divide by "
            "(x.square().mean(-1, keepdim=True) + model.cfg.eps).sqrt().",
        ),
        cases=_residual_cases,
        gradients=("residual",),
        observe=_observe_normalized,
        slips=(
            Slip(
                "gain and bias of the norm are applied: they come after this hook",
                {
                    "return (x / scale).to(residual.dtype)": "return (x / scale * model.ln_final.w"
                    ' + getattr(model.ln_final, "b", 0.0)).to(residual.dtype)'
                },
            ),
            Slip("the mean is not subtracted", {"x = x - x.mean(-1, keepdim=True)": "pass"}),
            Slip(
                "the mean is subtracted for RMSNorm, too",
                {'if model.cfg.normalization_type in ("LN", "LNPre"):': "if True:"},
            ),
            Slip("this divides by the variance: take its root", {").sqrt()": ")"}),
            Slip("eps is missing under the root", {" + model.cfg.eps": ""}),
        ),
    ),
    Exercise(
        lesson=LESSON,
        reference=fit_direction,
        difficulty=3,
        minutes=20,
        hints=(
            "Where is the middle of the True activations, where that of the False ones? The arrow "
            "from one to the other is the direction.",
            "x is [... n d_model] and labels [n]: x[..., labels, :] are the True ones, and their "
            "mean is over axis -2. For lda, centre every activation on the mean of its own class; "
            "the covariance is [... d_model d_model].",
            "covariance = centered.mT @ centered / n, its diagonal raised by ridge times its mean; "
            "direction = torch.cholesky_solve(direction[..., None], "
            "torch.linalg.cholesky(covariance))[..., 0]; threshold = ((positive + negative) / 2 * "
            "direction).sum(-1), with the direction already of length 1.",
        ),
        cases=_direction_cases,
        observe=_observe_fit,
        slips=(
            Slip(
                "it points from True to False: it is mu+ - mu-",
                {"(positive - negative).double()": "(negative - positive).double()"},
            ),
            Slip(
                "the direction is not scaled to length 1",
                {" / direction.norm(dim=-1, keepdim=True).clamp(min=1e-12)": ""},
            ),
            Slip(
                "the threshold is 0: it belongs half-way between the class means",
                {
                    "((positive + negative).double() / 2 * direction).sum(-1)": ""
                    "torch.zeros_like(direction[..., 0])"
                },
            ),
            Slip(
                "the threshold is the sum of the two means: half of it",
                {".double() / 2 * direction": ".double() * direction"},
            ),
            Slip("lda is not told apart from mean", {'if method == "lda":': "if False:"}),
            Slip(
                "this multiplies by the covariance: divide by it, with torch.cholesky_solve",
                {
                    "torch.cholesky_solve(direction[..., None], factor)": ""
                    "(covariance @ direction[..., None])"
                },
            ),
        ),
    ),
    Exercise(
        lesson=LESSON,
        reference=ablate,
        difficulty=2,
        minutes=10,
        hints=(
            "How far does an activation reach along the direction? Walk that far back.",
            "x is [... n d_model] and direction [... d_model]. The length along it is [... n]; "
            "give it a last axis of 1, and the direction an axis before its last.",
            "along = project(x, direction).to(x.dtype)[..., None]; "
            "x - along * direction[..., None, :]",
        ),
        cases=_ablate_cases,
        gradients=("x",),
        slips=(
            Slip(
                "this is what lies along the direction: subtract it",
                {"return x - along": "return along"},
            ),
            Slip("this adds what lies along the direction", {"x - along": "x + along"}),
            Slip(
                "this subtracts the length from every entry: multiply it by the direction",
                {"along * direction.to(x.dtype)[..., None, :]": "along"},
            ),
            Slip(
                "this goes twice as far, to the mirror image",
                {"x - along": "x - 2 * along"},
            ),
        ),
    ),
)
