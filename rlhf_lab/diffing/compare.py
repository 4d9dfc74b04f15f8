"""Model comparison: what training changed between two models, in one object with tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from rich.table import Table
from torch import Tensor

from rlhf_lab.diffing.effects import (
    PART_METHODS,
    PartMethod,
    effects_of_parts,
    layer_groups,
    refuse_unknown_methods,
)
from rlhf_lab.diffing.groups import weights_of_both
from rlhf_lab.diffing.patch_places import PatchPlace, Side
from rlhf_lab.diffing.patching import logit_difference, patch_activations
from rlhf_lab.diffing.stages import OpenStage, unseen
from rlhf_lab.diffing.weights import path, truncations
from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import Interval, bootstrap_means
from rlhf_lab.identity import Check
from rlhf_lab.models import TransformerWithValueHead, load_model, same_weights
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.models.tokenization import single_token
from rlhf_lab.training.restore import load_policy

Source = HookedModel | TransformerWithValueHead | str | Path
FARTHEST = 1000
"""Of the points of the line; 1 is the tuned model."""
RANKS, ALPHAS = (0, 1, 2, 4, 8), (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)


@dataclass(frozen=True)
class Comparison:
    """What changed between two models, as it shows in the logit difference of two words.

    Args:
        words: the logit of the first less that of the second is read.
        n: rows of the text.
        shift: by how much it moved, with its interval over rows.
        parts: layers' parts, by the names of `layer_groups`.
        effects: of each part by each method (see `effects_of_parts`), `[part]`.
        truncated: the shift of the base moved by so many directions of every matrix's change.
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
        """Tables for a terminal or, by rich's export, a page: parts, ranks and the line."""
        words = " - ".join(self.words)
        title = f"Shift of {words}: {self.shift}"
        parts = _table(title, "part", list(self.effects))
        for row, name in enumerate(self.parts):
            parts.add_row(name, *(_cell(found[row]) for found in self.effects.values()))
        ranks = _table("By rank of every matrix's change, vectors moved", "rank", ["shift"])
        for rank, found in self.truncated.items():
            ranks.add_row(str(rank), _cell(found))
        line = _table("Along the line of weights", "alpha", ["shift"])
        for alpha, found in self.line.items():
            line.add_row(f"{alpha:g}", _cell(found))
        return [parts, ranks, line]

    def to_dict(self) -> dict[str, object]:
        """All numbers, for JSON: value, low and high of each."""
        return {
            "words": list(self.words),
            "n": self.n,
            "shift": _numbers(self.shift),
            "parts": self.parts,
            "effects": {
                method: [_numbers(found[row]) for row in range(len(self.parts))]
                for method, found in self.effects.items()
            },
            "truncated": {rank: _numbers(found) for rank, found in self.truncated.items()},
            "line": {alpha: _numbers(found) for alpha, found in self.line.items()},
            "checks": {check.name: check.ok for check in self.checks},
        }


def compare(
    base: Source,
    tuned: Source,
    text: Int[Tensor, "batch seq"],
    words: tuple[str, str] = ("loved", "hated"),
    pos: int = -1,
    methods: Sequence[PartMethod] = PART_METHODS,
    ranks: Sequence[int] = RANKS,
    alphas: Sequence[float | int] = ALPHAS,
    stage: OpenStage = unseen,
) -> Comparison:
    """Compare two models on a text: what moved a logit difference, by part, rank and way.

    1. Load what is not in memory: a run's last policy, a directory, a bundled name or a hub id.
    2. Take each part's effect by five methods, grafts of low rank, and models on the line.
    3. Hold them to each other.

    Of a model of 135 million parameters, leave out the method "weights", which takes a derivative
    along the change of each part at 8 points of the way.

    Args:
        text: tokens, in rows of one length without padding.
        words: each one token of the models.
        pos: the position before the word.
        methods: see `effects_of_parts`.
        ranks, alphas: of the grafts, and on the line; none where they are empty.
        stage: is told what is done, and of each step.

    Raises:
        ConfigError: models that are not alike or read other tokens, words of several tokens or the
            same, or logits that are no sum.
        LoadError: no such model.
    """
    refuse_unknown_methods(methods)
    _refuse_wrong_points(ranks, alphas)
    model0, model1 = load_end(base), load_end(tuned)
    refuse_unlike_ends(model0, model1)
    ids = tuple(single_token(model0.tokenizer, word) for word in words)
    if ids[0] == ids[1]:
        raise ConfigError(f"words={words!r} are one token; give two words that differ.")
    if len(text) < 2:
        raise ConfigError(f"text has {len(text)} rows; give at least 2, for intervals.")
    start = logit_difference(Side(model0, text, _all(text)), pos, ids)
    read = lambda model: logit_difference(Side(model, text, _all(text)), pos, ids) - start
    shift = read(model1)
    effects = effects_of_parts(model0, model1, text, pos, ids, methods, stage)
    with stage("decomposing the change", len(list(model0.parameters())) if ranks else 0) as tick:
        models = truncations(model0, model1, ranks, tick)
        truncated = dict(zip(ranks, map(read, models), strict=True))
    line = {}
    with stage("along the line", len(alphas)) as tick:
        for alpha, model in zip(alphas, path(model0, model1, alphas), strict=True):
            line[float(alpha)] = read(model)
            tick()
    intervals = lambda rows: {key: bootstrap_means(row.cpu()) for key, row in rows.items()}
    return Comparison(
        words=words,
        n=len(text),
        shift=bootstrap_means(shift),
        parts=layer_groups(model0).names,
        effects={name: bootstrap_means(rows.T) for name, rows in effects.items()},
        truncated=intervals(truncated),
        line=intervals(line),
        checks=_checks(model0, model1, text, pos, ids, shift, effects, line),
    )


def _refuse_wrong_points(ranks: Sequence[int], alphas: Sequence[float | int]) -> None:
    """Raise ConfigError for a rank or a point of the line that cannot be, or is there twice."""
    for name, given in (("ranks", ranks), ("alphas", alphas)):
        if len(set(given)) < len(given):
            raise ConfigError(f"{name}={list(given)} has a number twice; give each once.")
    if not all(rank >= 0 for rank in ranks):
        raise ConfigError(f"ranks={list(ranks)} must be 0 or more.")
    if not all(abs(alpha) <= FARTHEST for alpha in alphas):
        raise ConfigError(f"alphas={list(alphas)} must be numbers from -{FARTHEST} to {FARTHEST}.")


def refuse_unlike_ends(model0: HookedModel, model1: HookedModel) -> None:
    """Raise ConfigError unless two models have the same weights and read the same tokens."""
    weights_of_both(model0, model1)
    tokenizers = [model.tokenizer for model in (model0, model1)]
    if None in tokenizers:
        raise ConfigError("a model has no tokenizer, by which words are found; load it with one.")
    if tokenizers[0].get_vocab() != tokenizers[1].get_vocab():
        raise ConfigError(
            "the two models have tokenizers with other words, so that one text is not the same to "
            "both; compare a model with what was trained from it."
        )


def load_end(source: Source) -> HookedModel:
    """One of two models: itself, a policy's transformer, a run's last policy, or a loaded one."""
    if isinstance(source, HookedModel):
        return source
    if isinstance(source, TransformerWithValueHead):
        return source.base_model
    if (Path(source) / "run.json").is_file():
        return load_policy(source)[0].base_model
    return load_model(source)


def _checks(
    model0: HookedModel,
    model1: HookedModel,
    text: Int[Tensor, "batch seq"],
    pos: int,
    ids: tuple[int, int],
    shift: Float[Tensor, " batch"],
    effects: dict[str, Float[Tensor, "part batch"]],
    line: dict[float, Float[Tensor, " batch"]],
) -> list[Check]:
    """What must hold between the methods, and of a patch that changes nothing."""
    side = Side(model0, text)
    last = PatchPlace(f"blocks.{model0.cfg.n_layers - 1}.hook_resid_post")
    itself = patch_activations(side, side, {"last": last}, pos, ids)
    largest = lambda x: x.abs().max().item()
    on_line = zip(path(model0, model1, (0, 1)), (model0, model1), strict=True)
    ends = [same_weights(*each) for each in on_line]
    nothing = largest(itself.patched[0] - itself.start)
    checks = [
        Check.at_most("a patch of a model with itself changes nothing", nothing, 0.0),
        Check.at_most("the ends of the line are the two models", float(not all(ends)), 0.0),
    ]
    if "by weights" in effects:
        gap, most = largest(effects["by weights"].sum(0) - shift.cpu()), max(1.0, largest(shift))
        checks.append(Check.at_most("weights sum to the shift", gap, 1e-3 * most))
    if "patched out" in effects:
        residual = shift.cpu() - effects["patched out"][-1]
        moved = patch_activations(side, Side(model1, text), {"last": last}, pos, ids)
        gap = largest((moved.patched[0] - moved.start).cpu() - residual)
        name = "read-out and last residual make up the shift"
        checks.append(Check.at_most(name, gap, 1e-4))
    if 1.0 in line:
        gap = largest(line[1.0] - shift)
        checks.append(Check.at_most("the line ends at the shift", gap, 1e-4))
    return checks


def _all(text: Int[Tensor, "batch seq"]) -> Tensor:
    return torch.ones_like(text, dtype=torch.bool)


def _table(title: str, first: str, columns: list[str]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _cell(found: Interval) -> str:
    if found.low is None:
        return f"{found.value.item():+.3f}"
    return f"{found.value.item():+.3f} [{found.low.item():+.3f}, {found.high.item():+.3f}]"


def _numbers(found: Interval) -> list[float]:
    ends = (found.value, found.low, found.high)
    return [round(x.item(), 6) for x in ends if x is not None]
