"""Two models compared from memory and from disk, in one object with tables."""

import io
import json

import pytest
from rich.console import Console

from rlhf_lab.diffing import compare
from rlhf_lab.diffing.compare import load_end
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import TransformerWithValueHead


@pytest.fixture(scope="module")
def far(base, make_tuned):
    return make_tuned(base, size=0.3)


@pytest.mark.slow
def test_a_comparison_holds_and_is_shown_and_stored(base, far, reviews):
    found = compare(base, TransformerWithValueHead(far), reviews[:4], pos=25)
    assert all(check.ok for check in found.checks), found.checks
    shown = io.StringIO()
    console = Console(file=shown, width=200)
    for table in found.tables():
        console.print(table)
    assert all(name in shown.getvalue() for name in ("L1 attn", "patched out", "loved - hated"))
    stored = json.loads(json.dumps(found.to_dict()))
    assert stored["line"]["0.0"][0] == 0 and stored["n"] == 4
    assert stored["line"]["1.0"] == pytest.approx(stored["shift"], abs=1e-5)


def test_models_are_found_by_name_and_bad_texts_are_refused(base, reviews):
    assert load_end(base) is base
    assert load_end("reel-nano").cfg.n_layers == base.cfg.n_layers
    with pytest.raises(ConfigError, match="at least 2"):
        compare(base, base, reviews[:1])
    with pytest.raises(ConfigError, match="not one token"):
        compare(base, base, reviews[:2], words=("loved it", "hated"))
