"""Lesson 09, what RLHF changed: how many weights, in how many directions, through which part."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlhf_lab.course.exercise import Case, exercise_from
from rlhf_lab.course.exercises.toys import TOY_VOCABULARY, toy_transformer
from rlhf_lab.probes.logit_shift import SITES, attribute_logits
from rlhf_lab.probes.weight_delta import describe_spectrum, unchanged_fraction
from rlhf_lab.training.capture import capture_activations


def _weight_cases() -> tuple[Case, ...]:
    generator = torch.Generator().manual_seed(0)

    def weights(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    before = weights(5, 4)
    some = torch.where(weights(5, 4) > 0, before + 1, before)
    mixed = torch.where(weights(5, 4) > 0, before * (1 + 1e-3), before)
    return (
        Case("some changed", {"before": before, "after": some}),
        Case("all changed a little", {"before": before, "after": before * (1 + 1e-3)}),
        Case("all changed by 1e-7", {"before": before, "after": before * (1 + 2e-7)}),
        Case("some changed a little", {"before": before, "after": mixed}),
        Case("nothing changed", {"before": before, "after": before.clone()}),
        Case("a vector", {"before": before[0], "after": some[0]}),
        Case("large numbers", {"before": 1e6 * before, "after": 1e6 * mixed}),
    )


def _spectrum_cases() -> tuple[Case, ...]:
    spectra = {
        "falling": [4.0, 3.0, 2.0, 1.0],
        "one direction": [3.0, 0.0, 0.0],
        "all equal": [2.0] * 10,
        "a long tail": [2.0, *[0.5] * 12],
        "a single number": [0.5],
        "nothing changed": [0.0, 0.0, 0.0],
        "large numbers": [1e6, 9e5, 2e5, 1e3],
    }
    return tuple(
        Case(name, {"s": torch.tensor(numbers, dtype=torch.float64)})
        for name, numbers in spectra.items()
    )


def _observe_spectrum(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    stable_rank, k90 = fn(**arguments)
    return {"stable rank": torch.tensor(float(stable_rank)), "directions": torch.tensor(int(k90))}


def _attribution_cases() -> tuple[Case, ...]:
    generator = torch.Generator().manual_seed(0)

    def case(label: str, batch: int, seq: int, word: int, **more: str) -> Case:
        tokens = torch.randint(TOY_VOCABULARY, (batch, seq), generator=generator)
        return Case(label, {"tokens": tokens, "word": word, "other": 3} | more)

    return (
        case("ordinary", 3, 5, 7),
        case("other words", 4, 6, 10),
        case("batch of 1", 1, 5, 7),
        case("one token", 3, 1, 7),
        case("RMSNorm", 3, 5, 7, normalization_type="RMS"),
        case("logits that a hook has changed", 3, 5, 7, hook="word number w has its number added"),
    )


def _observe_attribution(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Rows and logit difference at the last position, in any precision."""
    model = toy_transformer(normalization_type=arguments.get("normalization_type", "LN"))
    acts = capture_activations(model, arguments["tokens"], SITES, pos=-1)
    if "hook" in arguments:  # rows do not sum to these logits, and a proof has to say so
        acts["logits"] = acts["logits"] + torch.arange(TOY_VOCABULARY)
    found = fn(model, acts, arguments["word"], arguments["other"])
    return {
        "components": list(found.components),
        "rows": found.rows.float(),
        "logit_difference": found.logit_difference.float(),
    }


_exercise = exercise_from("changed.toml")

EXERCISES = (
    _exercise(unchanged_fraction, cases=_weight_cases),
    _exercise(describe_spectrum, cases=_spectrum_cases, observe=_observe_spectrum),
    _exercise(attribute_logits, cases=_attribution_cases, observe=_observe_attribution),
)
