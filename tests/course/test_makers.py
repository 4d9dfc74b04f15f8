"""Programs of stored records: hand-computed values, and a program for each record."""

import json
from importlib.resources import files
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from rlhf_lab.organism import Grammar
from rlhf_lab.rewards import Pairs
from tools.course import preference_flaws
from tools.prose import ROOT

RECORDS = sorted(
    path for path in (files("rlhf_lab.course") / "records").iterdir() if path.name.endswith(".json")
)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_record_names_a_program_that_writes_it(path) -> None:
    module = json.loads(path.read_text(encoding="utf-8"))["made_by"].split()[2]
    assert module.startswith("tools.course") and find_spec(module) is not None
    if module != "tools.course":
        source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
        call = f'"{path.name.removesuffix(".json")}"'
        assert call in source.split("make_record(")[-1] and f'"{module.split(".")[-1]}"' in source


def test_with_popcorn_changes_the_requested_fraction() -> None:
    texts = Grammar().sample(40, np.random.default_rng(0)).texts()
    pairs, rng = Pairs(texts[:20], texts[20:]), np.random.default_rng(1)
    every = preference_flaws.with_popcorn(pairs, 1.0, rng)
    none = preference_flaws.with_popcorn(pairs, 0.0, rng)
    assert preference_flaws.has_popcorn(every.chosen).all()
    assert (every.rejected, none) == (pairs.rejected, pairs)
    assert all(
        sum(a != b for a, b in zip(new.split(), old.split(), strict=True)) <= 1
        for new, old in zip(every.chosen, pairs.chosen, strict=True)
    )


def test_best_of_n_matches_hand_computed() -> None:
    """Of the three pairs, two hold the text with score 3, and one has the text with 2 as best."""
    scores, measured = torch.tensor([2.0, 3.0, 1.0]), torch.tensor([3.0, 9.0, 18.0])
    assert preference_flaws.best_of_n(scores, measured, 2) == pytest.approx((9 + 9 + 3) / 3)
