"""Two models compared from memory and from disk, in one object with tables."""

import io
import json

import pytest
import torch
from rich.console import Console

from rlhf_lab.diffing import PatchPlace, Side, compare, patch_activations, truncate
from rlhf_lab.diffing.compare import load_end
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.models.tokenization import single_token
from tests.diffing.faults_compare import COMPARE_FAULTS
from tests.probes.planting import planted, told_by


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


def test_ranks_and_parts_stand_under_their_names(base, far, reviews):
    text, ids = reviews[:2, :10], [single_token(base.tokenizer, w) for w in ("loved", "hated")]
    found = compare(base, far, text, methods=("patching",), ranks=(0, 2), alphas=())
    sides = Side(base, text), Side(far, text)
    place = {"L0 attn": PatchPlace("blocks.0.hook_attn_out")}
    patched = patch_activations(*sides, place, -1, (ids[0], ids[1]))
    row = found.effects["patched in"].value[found.parts.index("L0 attn")].item()
    assert row == pytest.approx((patched.patched[0] - patched.start).mean().item(), abs=1e-6)
    with torch.no_grad():
        moved = truncate(base, far, 2)(text)[:, -1] - base(text)[:, -1]
    expected = (moved[:, ids[0]] - moved[:, ids[1]]).mean().item()
    assert found.truncated[2].value.item() == pytest.approx(expected, abs=1e-4)


def test_models_are_found_by_name_and_bad_texts_are_refused(base, reviews):
    assert load_end(base) is base
    assert load_end("reel-nano").cfg.n_layers == base.cfg.n_layers
    with pytest.raises(ConfigError, match="at least 2"):
        compare(base, base, reviews[:1])
    with pytest.raises(ConfigError, match="not one token"):
        compare(base, base, reviews[:2], words=("loved it", "hated"))


@pytest.mark.slow
@pytest.mark.parametrize("fault", COMPARE_FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_told(fault, request, no_type_checks):
    with planted(fault):
        told_by(globals()[fault.run], request)
