"""Lesson 01, the policy: sampling, log-probabilities, the logit lens, heads ablated and patched."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlhf_lab.course.cases import half_precision, standard_cases
from rlhf_lab.course.exercise import Case, make_exercise
from rlhf_lab.course.exercises.toys import TOY_VOCABULARY, toy_transformer
from rlhf_lab.diffing import ablate_heads, logit_lens, patch_heads
from rlhf_lab.functional import bootstrap_means, get_logprobs, recovered_fraction
from rlhf_lab.sampling import draw_token, sample_without_cache


def _draw_cases() -> tuple[Case, ...]:
    generator = torch.Generator().manual_seed(0)

    def drawn(batch: int, width: int) -> dict[str, torch.Tensor]:
        logits = 2 * torch.randn(batch, width, generator=generator)
        noise = torch.rand(batch, generator=generator)
        return {"logprobs": logits.log_softmax(-1), "noise": noise}

    def by_hand(probs: list[float], *noise: float) -> dict[str, torch.Tensor]:
        logprobs = torch.tensor(probs).log().expand(len(noise), len(probs))
        return {"logprobs": logprobs, "noise": torch.tensor(noise)}

    shares = [0.1, 0.4, 0.3, 0.2]
    return (
        Case("ordinary", drawn(6, 5)),
        Case("other sizes", drawn(9, 12)),
        Case("batch of 1", drawn(1, 5)),
        Case("one distribution, several numbers", by_hand(shares, 0.05, 0.3, 0.55, 0.95)),
        Case("a token of probability 0 in front, noise 0", by_hand([0.0, 0.5, 0.5], 0.0, 0.3, 0.7)),
        Case("tokens that cannot be said", by_hand([0.5, 0.0, 0.0, 0.5, 0.0], 0.2, 0.7, 0.999)),
        Case(
            "probabilities that add up to 0.9",
            by_hand([0.9 * p for p in shares], 0.09, 0.48, 0.79, 0.95),
        ),
    )


def _logprob_cases() -> tuple[Case, ...]:
    cold = standard_cases(
        get_logprobs,
        sizes={"seq": 7},
        one_token={"seq": 4},
        large={"logits": 1e3},
        prefix_len=3,
        temperature=0.7,
    )
    plain = standard_cases(get_logprobs, sizes={"seq": 5}, one_token={"seq": 2})
    return (*cold, *plain, half_precision(get_logprobs, "logits", sizes={"seq": 7}, prefix_len=3))


def _write_cases() -> tuple[Case, ...]:
    generator = torch.Generator().manual_seed(0)

    def case(label: str, batch: int, prefix: int, gen: int, temperature: float) -> Case:
        prompts = torch.randint(TOY_VOCABULARY, (batch, prefix), generator=generator)
        noise = torch.rand(gen, batch, generator=generator)
        arguments = {"prompts": prompts, "noise": noise, "temperature": temperature}
        return Case(label, arguments)

    return (
        case("ordinary", 4, 4, 6, 1.0),
        case("cold", 5, 3, 7, 0.5),
        case("hot", 5, 3, 7, 3.0),
        case("batch of 1", 1, 4, 5, 1.5),
        case("one step", 6, 2, 1, 1.5),
        case("a prompt of one token", 4, 1, 6, 1.5),
        case("nearly greedy", 3, 4, 6, 0.01),
    )


def _observe_writing(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    return fn(toy_transformer(), **arguments)


def _lens_cases() -> tuple[Case, ...]:
    generator = torch.Generator().manual_seed(0)

    def residual(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, 8, generator=generator) + 0.5

    return (
        Case("ordinary", {"residual": residual(3, 4)}),
        Case("all layers at once", {"residual": residual(2, 3, 4)}),
        Case("a single state", {"residual": residual()}),
        Case("RMSNorm", {"residual": residual(3, 4), "normalization_type": "RMS"}),
        Case("large numbers", {"residual": 1e4 * residual(2, 2)}),
        Case("a confident model", {"residual": residual(2, 2), "sharper": 100.0}),
    )


def _observe_lens(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    model = toy_transformer(normalization_type=arguments.get("normalization_type", "LN"))
    model.unembed.W_U.data *= arguments.get("sharper", 1.0)
    return fn(model.requires_grad_(False), arguments["residual"])


def _head_cases(*names: str) -> list[tuple[str, dict[str, Any]]]:
    generator = torch.Generator().manual_seed(0)
    cuts = [
        ("several heads and positions", (3, 6, 4, 2), [0, 2], slice(1, 4)),
        ("one head, one position", (4, 5, 3, 2), [1], slice(2, 3)),
        ("up to the end", (3, 4, 2, 3), [1], slice(2, None)),
        ("the last position", (3, 4, 2, 3), [0], slice(-1, None)),
        ("batch of 1", (1, 4, 3, 2), [2], slice(0, 2)),
    ]
    return [
        (
            label,
            {name: torch.randn(*shape, generator=generator) for name in names}
            | {"heads": heads, "positions": positions},
        )
        for label, shape, heads, positions in cuts
    ]


def _ablate_cases() -> tuple[Case, ...]:
    to_zero = [Case(label, case | {"to": "zero"}) for label, case in _head_cases("z")]
    to_mean = [Case(f"{label}, mean", case | {"to": "mean"}) for label, case in _head_cases("z")]
    return (*to_zero, *to_mean)


def _patch_cases() -> tuple[Case, ...]:
    return tuple(Case(label, case) for label, case in _head_cases("z", "donor"))


def _fraction_cases() -> tuple[Case, ...]:
    generator = torch.Generator().manual_seed(0)

    def case(
        label: str, share: float, n: int = 60, effect: float = 1.0, spread: float = 1.0
    ) -> Case:
        common = torch.randn(n, generator=generator)
        effects = effect * (1 + spread * torch.randn(n, generator=generator))
        noise = 0.2 * torch.randn(n, generator=generator)
        clean, corrupted = common + effects, common
        rows = {"clean": clean, "corrupted": corrupted, "patched": common + share * effects + noise}
        return expecting(label, rows)

    def expecting(label: str, rows: dict[str, torch.Tensor], **level: float) -> Case:
        columns = rows["clean"], rows["corrupted"], rows["patched"]
        found = bootstrap_means(*columns, statistic=_share_of_means, **level)
        return Case(label, rows | level | {"resamples": 200, "ends": (found.low, found.high)})

    no_effect = torch.randn(3, 50, generator=generator)
    plain = case("another level", 0.6).arguments
    rows = {name: plain[name] for name in ("clean", "corrupted", "patched")}
    return (
        case("a part of it", 0.6),
        case("the effect is negative", 0.4, effect=-1.5),
        case("more than all of it", 1.3, spread=0.5),
        case("the wrong way", -0.4, spread=0.5),
        case("many sequences", 0.6, n=400),
        expecting(
            "clean and corrupted differ by chance alone",
            dict(zip(("clean", "corrupted", "patched"), no_effect, strict=True)),
        ),
        expecting("another level", rows, level=0.5),
    )


def _share_of_means(clean: Any, corrupted: Any, patched: Any) -> Any:
    return (patched - corrupted) / (clean - corrupted)


def _observe_fraction(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    low, high = arguments["ends"]
    found = fn(**{name: rows for name, rows in arguments.items() if name != "ends"})
    if found.value is None:
        return {"the fraction is defined": False}
    facts = {
        "the fraction is defined": True,
        "share": torch.as_tensor(found.value).double().reshape(()),
        "sequences": found.n,
    }
    if found.low is None or low is None:
        return facts | {"there is an interval": found.low is not None}
    width, middle = found.high - found.low, (found.low + found.high) / 2
    known = high - low
    return facts | {
        "there is an interval": True,
        "width of the interval": _width(float(width / known)),
        "its middle agrees with a bootstrap": bool(abs(middle - (low + high) / 2) <= 0.15 * known),
    }


def _width(share: float) -> str:
    if 0.85 <= share <= 1.18:
        return "as a bootstrap's"
    if share < 0.85:
        return "too narrow" if share > 0.6 else "far too narrow"
    return "too wide" if share < 1.7 else "far too wide"


EXERCISES = (
    make_exercise(draw_token, cases=_draw_cases),
    make_exercise(sample_without_cache, cases=_write_cases, observe=_observe_writing),
    make_exercise(get_logprobs, cases=_logprob_cases),
    make_exercise(logit_lens, cases=_lens_cases, observe=_observe_lens),
    make_exercise(patch_heads, cases=_patch_cases),
    make_exercise(ablate_heads, cases=_ablate_cases),
    make_exercise(recovered_fraction, cases=_fraction_cases, observe=_observe_fraction),
)
