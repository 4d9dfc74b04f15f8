"""Lesson 09, what RLHF changed: how many weights, in how many directions, through which part."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlhf_lab.course.exercise import Case, Exercise, Slip
from rlhf_lab.course.exercises.toys import TOY_VOCABULARY, toy_transformer
from rlhf_lab.probes.logit_shift import SITES, attribute_logits
from rlhf_lab.probes.weight_delta import describe_spectrum, unchanged_fraction
from rlhf_lab.training.capture import capture_activations

LESSON = "09_what_rlhf_changed"


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
    )


def _observe_attribution(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Rows and logit difference at the last position, in any precision."""
    model = toy_transformer(normalization_type=arguments.get("normalization_type", "LN"))
    acts = capture_activations(model, arguments["tokens"], SITES, pos=-1)
    found = fn(model, acts, arguments["word"], arguments["other"])
    return {
        "components": list(found.components),
        "rows": found.rows.float(),
        "logit_difference": found.logit_difference.float(),
    }


EXERCISES = (
    Exercise(
        lesson=LESSON,
        reference=unchanged_fraction,
        difficulty=1,
        minutes=5,
        hints=(
            "Equal means equal, to the last bit. Then make both numbers coarser, and ask again.",
            "Both are tensors of one shape; == gives True and False, whose mean is the share. The "
            "result is two Python numbers.",
            "(before == after).double().mean().item(), and the same of before.bfloat16() and "
            "after.bfloat16().",
        ),
        cases=_weight_cases,
        slips=(
            Slip(
                "these are the shares that changed",
                {
                    "before == after": "before != after",
                    "before.bfloat16() == after.bfloat16()": ""
                    "before.bfloat16() != after.bfloat16()",
                },
            ),
            Slip(
                "this rounds the difference: round both, and then compare",
                {"(before.bfloat16() == after.bfloat16())": "((after - before).bfloat16() == 0)"},
            ),
            Slip(
                "nearly equal is not equal: do not allow a tolerance",
                {"(before == after)": "torch.isclose(before, after)"},
            ),
            Slip(
                "this rounds to float16: bfloat16 has fewer digits",
                {"(before.bfloat16() == after.bfloat16())": "(before.half() == after.half())"},
            ),
        ),
    ),
    Exercise(
        lesson=LESSON,
        reference=describe_spectrum,
        difficulty=2,
        minutes=15,
        hints=(
            "The energy of a direction is its squared singular value. How many times the largest "
            "energy is the total? And how many of the largest does it take to hold 90 % of it?",
            "s is [rank], largest first, and the results are two Python numbers. energy.cumsum(0) "
            "says how much the first ones hold. Let 1e-12 of the total pass for rounding.",
            "total / energy[0]; and the first index where energy.cumsum(0) >= 0.9 * total, plus 1 "
            "since indices count from 0. A total of 0 gives 0.0 and 0.",
        ),
        cases=_spectrum_cases,
        observe=_observe_spectrum,
        slips=(
            Slip("energy is the square of s", {"energy = s.square()": "energy = s"}),
            Slip(
                "off by one: an index counts from 0",
                {"int(reached.long().argmax()) + 1": "int(reached.long().argmax())"},
            ),
            Slip(
                "this divides the energy by the largest singular value, not by its square",
                {"total / energy[0]": "total / s[0]"},
            ),
            Slip(
                "this is the smallest share of the energy, not the largest",
                {"total / energy[0]": "total / energy[-1].clamp(min=1e-12)"},
            ),
            Slip("a delta of zero divides 0 by 0", {"if total == 0:": "if False:"}),
        ),
    ),
    Exercise(
        lesson=LESSON,
        reference=attribute_logits,
        difficulty=4,
        minutes=30,
        hints=(
            "A logit difference is linear in the normalised residual, and the residual is a sum. "
            "With the scale of the norm held at what it was, each part has its own share.",
            "parts is [component batch d_model], the scale [batch 1], the rows [component batch]. "
            "The constants are the same for the whole batch: expand them to [2 batch]. RMSNorm has "
            "no bias, and its constant is 0.",
            "u = W_U[:, word] - W_U[:, other]; rows = parts @ (gain * u) / scale[:, 0]; then "
            "Attribution([*names, 'norm bias', 'b_U'], torch.cat([rows, constants]), "
            "logits[:, word] - logits[:, other]).",
        ),
        cases=_attribution_cases,
        observe=_observe_attribution,
        slips=(
            Slip("the gain of the norm is left out", {"parts @ (gain * u)": "parts @ u"}),
            Slip(
                "the parts are not centred: subtract each one's mean over d_model",
                {"parts = parts - parts.mean(-1, keepdim=True)": "pass"},
            ),
            Slip(
                "the rows are not divided by the scale of the norm",
                {' / acts["ln_final.hook_scale"].double()[:, 0]': ""},
            ),
            Slip(
                "the two constants are 0: they are the norm's bias along u, and that of b_U",
                {"torch.cat([rows, constants])": "torch.cat([rows, 0 * constants])"},
            ),
            Slip(
                "this is other minus word",
                {
                    "(unembed.W_U[:, word] - unembed.W_U[:, other])": ""
                    "(unembed.W_U[:, other] - unembed.W_U[:, word])",
                    "(unembed.b_U[word] - unembed.b_U[other])": ""
                    "(unembed.b_U[other] - unembed.b_U[word])",
                    "logits[:, word] - logits[:, other]": "logits[:, other] - logits[:, word]",
                },
            ),
        ),
    ),
)
