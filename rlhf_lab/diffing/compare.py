"""Comparison of two models: the shift of a logit difference by component, rank and line."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Int
from rich.table import Table
from torch import Tensor

from rlhf_lab.diffing.contrast import Words, make_contrast
from rlhf_lab.diffing.effects import PART_METHODS, PartMethod, effects_of_parts, layer_groups
from rlhf_lab.diffing.groups import weights_of_both
from rlhf_lab.diffing.patching import Side, logit_difference
from rlhf_lab.diffing.weights import path, truncations
from rlhf_lab.errors import ConfigError
from rlhf_lab.files import AnyPath, expand_home
from rlhf_lab.functional import Interval, bootstrap_means
from rlhf_lab.identity import Check
from rlhf_lab.models import TransformerWithValueHead, load_model
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.training.resume import load_policy

Source = HookedModel | TransformerWithValueHead | AnyPath
FARTHEST = 1000  # limit of a point on the line of weights; 1 is the tuned model
RANKS, ALPHAS = (0, 1, 2, 4, 8), (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)


@dataclass(frozen=True)
class Comparison:
    """The shift of a logit difference between two models, in all its parts.

    Args:
        words: the two words, or the two sides of a contrast.
        n: number of texts.
        shift: tuned minus base, with its interval over texts.
        parts: components, by the names of `layer_groups`.
        effects: of each component by each method (see `effects_of_parts`), `[part]`.
        truncated: the shift of the base with so many directions of every matrix's change.
        line: the shift along the line of weights; 0 is the base, 1 the tuned model.
        checks: identities between these numbers.
    """

    words: tuple[str, str]
    n: int
    shift: Interval
    parts: list[str]
    effects: dict[str, Interval]
    truncated: dict[int, Interval]
    line: dict[float, Interval]
    checks: list[Check]

    def tables(self) -> list[Table]:
        """Return tables for a terminal or, by rich's export, a page: components, ranks, line."""
        rows = {
            part: [found[i] for found in self.effects.values()] for i, part in enumerate(self.parts)
        }
        title = f"Shift of {' - '.join(self.words)}: {self.shift}"
        ranks = {str(rank): [found] for rank, found in self.truncated.items()}
        line = {f"{alpha:g}": [found] for alpha, found in self.line.items()}
        return [
            _table(title, "part", list(self.effects), rows),
            _table("By rank of every matrix's change, vectors moved", "rank", ["shift"], ranks),
            _table("Along the line of weights", "alpha", ["shift"], line),
        ]

    def to_dict(self) -> dict[str, object]:
        """Return all numbers for JSON: value, low and high of each."""
        each = lambda found: [_numbers(found[row]) for row in range(len(self.parts))]
        return {
            "words": list(self.words),
            "n": self.n,
            "shift": _numbers(self.shift),
            "parts": self.parts,
            "effects": {method: each(found) for method, found in self.effects.items()},
            "truncated": {rank: _numbers(found) for rank, found in self.truncated.items()},
            "line": {alpha: _numbers(found) for alpha, found in self.line.items()},
            "checks": {check.name: check.ok for check in self.checks},
        }


def compare(
    base: Source,
    tuned: Source,
    text: Int[Tensor, "batch seq"],
    words: Words = ("loved", "hated"),
    pos: int = -1,
    methods: Sequence[PartMethod] = PART_METHODS,
    ranks: Sequence[int] = RANKS,
    alphas: Sequence[float | int] = ALPHAS,
) -> Comparison:
    """Compare two models on texts: the shift of a logit difference by component, rank and line.

    Omit the method "weights" for a model of 135 million parameters: it takes a derivative
    along the change of each component at 8 points of the line or more.

    Args:
        base, tuned: models, policies, runs or their directories (the last policy), or names.
        text: tokens, in rows of one length without padding.
        words: two words, or weights by word; see `make_contrast`.
        pos: the position before the word.
        methods: see `effects_of_parts`.
        ranks, alphas: of the truncated changes, and on the line; may be empty.

    Raises:
        ConfigError: If the models differ in parameters or tokens, `make_contrast` rejects the
            words, or the logits are not a sum over components.
        LoadError: If a model cannot be loaded.
    """
    if any(rank < 0 for rank in ranks):
        raise ConfigError(f"ranks={list(ranks)} must be 0 or more.")
    if not all(abs(alpha) <= FARTHEST for alpha in alphas):
        raise ConfigError(f"alphas={list(alphas)} must be numbers from -{FARTHEST} to {FARTHEST}.")
    model0, model1 = load_ends(base, tuned)
    contrast = make_contrast(model0, words)
    if getattr(text, "ndim", 0) != 2 or len(text) < 2:
        raise ConfigError(f"text={text!r:.60} is not 2 or more rows of tokens. Use to_tokens.")
    start = logit_difference(Side(model0, text), pos, contrast)
    read = lambda model: (logit_difference(Side(model, text), pos, contrast) - start).cpu()
    shift = read(model1)
    effects = effects_of_parts(model0, model1, text, pos, contrast, methods)
    models = truncations(model0, model1, ranks)
    truncated = dict(zip(ranks, map(read, models), strict=True))
    models = path(model0, model1, alphas)
    line = dict(zip(map(float, alphas), map(read, models), strict=True))
    return Comparison(
        words=contrast.sides(model0),
        n=len(text),
        shift=bootstrap_means(shift),
        parts=layer_groups(model0).names,
        effects={name: bootstrap_means(rows.T) for name, rows in effects.items()},
        truncated={rank: bootstrap_means(row) for rank, row in truncated.items()},
        line={alpha: bootstrap_means(row) for alpha, row in line.items()},
        checks=_sum_checks(shift, effects.get("by weights"), line.get(1.0)),
    )


def _sum_checks(shift: Tensor, by_weights: Tensor | None, line_end: Tensor | None) -> list[Check]:
    checks, size = [], max(1.0, shift.abs().max().item())
    if line_end is not None:
        error = (line_end - shift).abs().max()
        checks.append(Check.at_most("the line ends at the shift", error, 1e-4))
    if by_weights is not None:
        error = (by_weights.sum(0) - shift).abs().max()
        checks.append(Check.at_most("weights sum to the shift", error, 1e-3 * size))
    return checks


def load_ends(base: Source, tuned: Source) -> tuple[HookedModel, HookedModel]:
    """Load two models; raise ConfigError unless they have the same parameters and tokens."""
    model0, model1 = load_end(base), load_end(tuned)
    weights_of_both(model0, model1)
    if model0.tokenizer.get_vocab() != model1.tokenizer.get_vocab():
        raise ConfigError(
            "the two models have tokenizers with other words, so they read one text differently. "
            "Compare a model with one that was trained from it."
        )
    return model0, model1


def load_end(source: Source) -> HookedModel:
    """Return one of two models: a model, a policy's model, a run's last policy, or a loaded one."""
    if isinstance(model := getattr(source, "base_model", source), HookedModel):
        return model
    if (expand_home(source) / "run.json").is_file():
        return load_policy(source)[0].base_model
    return load_model(source)


def _table(title: str, first: str, columns: list[str], rows: dict[str, list[Interval]]) -> Table:
    table = Table(first, title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    for name, found in rows.items():
        table.add_row(name, *map(_cell, found))
    return table


def _cell(found: Interval) -> str:
    if found.low is None:
        return f"{found.value.item():+.3f}"
    return f"{found.value.item():+.3f} [{found.low.item():+.3f}, {found.high.item():+.3f}]"


def _numbers(found: Interval) -> list[float]:
    ends = (found.value, found.low, found.high)
    return [round(x.item(), 6) for x in ends if x is not None]
