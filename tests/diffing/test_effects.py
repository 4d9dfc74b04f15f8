"""Effects of components: changes of known components, and the comparison of two models."""

import copy
import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from rlhf_lab.diffing import Side, compare, graft, patch_activations, truncate
from rlhf_lab.diffing.compare import load_end
from rlhf_lab.diffing.effects import effects_of_parts, layer_groups
from rlhf_lab.errors import ConfigError
from rlhf_lab.identity import Check
from rlhf_lab.models import TransformerWithValueHead

WORDS, POS, HEAD = (5, 9), -3, "L0H2"


def difference(logits):
    return (logits[:, POS, WORDS[0]] - logits[:, POS, WORDS[1]]).double()


def test_a_changed_unembedding_gets_the_shift_by_every_method(base, far, reviews):
    belongs = lambda name: name.startswith(("ln_final.", "unembed."))
    tuned, text = graft(base, far, belongs), reviews[:4]
    shift = difference(tuned(text)) - difference(base(text))
    assert shift.abs().max() > 0.05 and layer_groups(base).names[-1] == "read-out"
    for method, rows in effects_of_parts(base, tuned, text, POS, WORDS).items():
        assert not rows[:-1].any(), method
        if method != "inherited":
            torch.testing.assert_close(rows[-1], shift, atol=1e-4, rtol=0)


def test_effects_sum_and_patch_the_unembedding(base, far, reviews, no_type_checks):
    text = reviews[:4]
    found = effects_of_parts(base, far, text, POS, WORDS)
    shift = difference(far(text)) - difference(base(text))
    torch.testing.assert_close(found["by weights"].sum(0), shift, atol=1e-3, rtol=0)
    swapped = copy.deepcopy(base)
    swapped.ln_final, swapped.unembed = far.ln_final, far.unembed
    expected = difference(swapped(text)) - difference(base(text))
    torch.testing.assert_close(found["patched in"][-1], expected, atol=1e-6, rtol=0)
    sides = Side(base, text), Side(far, text)
    for sign, method in ((1, "patched in"), (-1, "patched out")):
        places = {"L0 attn": "blocks.0.hook_attn_out", "embed": "blocks.0.hook_resid_pre"}
        patched = patch_activations(*sides[::sign], places, POS, WORDS)
        rows = sign * (patched.patched - patched.start)
        torch.testing.assert_close(found[method][[1, 0]], rows)


def test_a_comparison_matches_the_models_logits(base, far, reviews, no_type_checks):
    text = reviews[:4, :20]
    found = compare(base, TransformerWithValueHead(far), text, pos=POS, ranks=(2,), alphas=(0, 1))
    assert len(found.checks) == 2 and all(check.ok for check in found.checks)
    output = io.StringIO()
    Console(file=output, width=200).print(*found.tables())
    assert all(name in output.getvalue() for name in ("L1 attn", "patched out", "loved - hated"))
    stored = json.loads(json.dumps(found.to_dict()))
    assert stored["line"]["0.0"][0] == 0 and stored["n"] == 4
    assert stored["line"]["1.0"] == pytest.approx(stored["shift"], abs=1e-5)
    ids = [base.to_single_token(word) for word in ("loved", "hated")]
    moved = (far(text) - base(text))[:, POS].double()
    assert stored["shift"][0] == pytest.approx((moved[:, ids[0]] - moved[:, ids[1]]).mean().item())
    moved = (truncate(base, far, 2)(text) - base(text))[:, POS].double()
    expected = (moved[:, ids[0]] - moved[:, ids[1]]).mean().item()
    assert stored["truncated"]["2"][0] == pytest.approx(expected, abs=1e-4)
    effects = effects_of_parts(base, far, text, POS, (ids[0], ids[1]), ("patching",))
    for method, rows in effects.items():
        means = [value[0] for value in stored["effects"][method]]
        assert means == pytest.approx(rows.mean(1).tolist(), abs=1e-4)
    assert stored["parts"] == layer_groups(base).names


def test_compare_raises_on_bad_input(base, reviews, no_type_checks):
    assert load_end(base) is base and load_end("reel-nano").cfg.n_layers == base.cfg.n_layers
    with pytest.raises(ConfigError, match="not 2 or more rows"):
        compare(base, base, reviews[:1])
    for words, error in (
        (("loved it", "hated"), "not one token"),
        (("loved", base.to_single_token("loved")), "not different tokens"),
        ({"loved": float("nan"), "hated": -1}, "finite weights"),
        ("loved", "words='loved' are not different tokens"),
    ):
        with pytest.raises(ConfigError, match=error):
            compare(base, base, reviews[:2], words=words)
    for options, error in (
        ({"alphas": [float("nan")]}, r"alphas=\[nan\]"),
        ({"methods": ["magic"]}, r"Unknown methods \['magic'\]"),
    ):
        with pytest.raises(ConfigError, match=error):
            compare(base, base, reviews[:2], **options)


def test_compare_weighs_groups_of_words(base, far, reviews, no_type_checks):
    weights = {"loved": 0.5, "so": 0.5, "hated": -1.0}
    found = compare(base, far, reviews[:3], weights, methods=("split",), ranks=(), alphas=())
    assert found.words == ("loved, so", "hated")
    failed = replace(found, checks=[Check.at_most("small", 2.0, 1.0)])
    assert failed.to_dict()["checks"] == {"small": False}
    ids = [base.to_single_token(word) for word in weights]
    moved = (far(reviews[:3]) - base(reviews[:3]))[:, -1, ids].double().mean(0)
    expected = moved @ torch.tensor([*weights.values()]).double()
    assert found.shift.value.item() == pytest.approx(expected.item(), abs=1e-5)
