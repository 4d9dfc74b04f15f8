"""Pictures of probes: every drawn number is the one that a hand-written table names."""

import re
from html import unescape
from itertools import count
from unittest.mock import MagicMock

import pytest
import torch

from rlhf_lab.probes import Run
from rlhf_lab.views import collect, records
from rlhf_lab.views.pictures import Html, Picture, Table
from rlhf_lab.views.probe_pictures import (
    OF_RECORD,
    OVER_PHASES,
    PICTURE_ROWS,
    phase_pictures,
    record_pictures,
)
from rlhf_lab.views.records import Snapshot
from rlhf_lab.views.tokens import Strip
from tests.test_what_runs import count_opened

KINDS = {row.probe for row in PICTURE_ROWS} | OVER_PHASES.keys() | OF_RECORD.keys()
ENDS = ("", "_low", "_high")
NAMES = {"groups": ["g0", "g1"], "components": ["c0", "c1"], "sites": ["s0", "s1"]}
NAMES |= {"heads": ["L0H0", "L0H1"]} | dict.fromkeys(("slots", "keys", "queries"), ["A", "B"])
# the fields of each record with their shapes, then those of its tensors; every number is distinct
SHAPES = """
RunHealth | mean_reward true_reward optimal_reward kl_per_sequence optimal_kl_per_sequence
 beta_eff reward_std advantage_std explained_variance clip_fraction entropy_per_token grad_norm
 ratio_first_minibatch sequences explained_variance_low explained_variance_high |
KLByPosition | kl:2* k1_mean:2 k1_low:2 k1_high:2 k2_mean:2 k2_low:2 k2_high:2 k3_mean:2 k3_low:2
 k3_high:2 information:2 tokens_at:2 |
AttentionDrift | qk:2* ov:2* wo:2* tv_here:2* n | qk:1,2,2,4 ov:1,2,2,4 wo:1,2,2,4 tv:1,2,2,2
StepInfluence | step steps f_before f_after linear remainder kappa | rows:2,1,2 terms:2,1,2
 momentum:2 decay:2
StepLedger | step steps real_tokens kl_coef clipped_surrogate value_loss entropy_bonus kl_penalty
 objective | advantage:1,2 entropy:1,2 kl:1,2 logprob:1,2 old_logprob:1,2 ratio:1,2
 return:1,2 share:1,2 surrogate:1,2 value:1,2 value_loss:1,2 whitened:1,2
TextHeatmap | rewards:1 | advantage:1,2 true_advantage:1,2 kl:1,2 value:1,2 true_value:1,2
HackWatch | n orders:1 distinct_texts:1 distinct_reference:1 repeated_texts:1 repeated_reference:1
 overlap_texts:1 overlap_reference:1 reward* true_reward* gap* grammatical* reward_std
 alarm_z | promoted_mass:2 counts:2,2
ValueLens | held_out head_n lens_held_out ridge r2:2,2* head_correlation:2* raw_r2:2* tuned_r2:2*
 | lens:2,1,2 lens_tuned:2,1,2
Direction | accuracy:2,2* accuracy_frozen:2,2* accuracy_lda:2,2* accuracy_ablated:2,2*
 accuracy_erased:2,2* accuracy_shuffled:2,2* auc:2,2*
 cosine_with_reference:2,2* split_half_cosine:2,2* positive_projection:2,2*
 negative_projection:2,2* bayes_accuracy:2 |
FrozenProbe | position positive size:2 accuracy_frozen:2* gap:2* called:2* shift:2* cosine:2*
 split_half:2* moved_cosine:2* accuracy_control:2* bayes_accuracy:2* |
LogitShift | measured_shift shift:2 policy:2 reference:2 own_weights:2 inherited:2 scale:2
 read_out:2 defined_sequences | shift:2,1 reference:2,1 own_weights:2,1 inherited:2,1 scale:2,1
 read_out:2,1 measured:1
NeuronRank | n contribution:2* by_activation:2 activation:2 activation_shift:2 write:2
 mlp:2 b_out:2 | neuron_contribution:2,2
 neuron_activation_shift:2,2 neuron_write:2,2,2
WeightDelta | total_norm |
WordsMoved | n moved_mass parts:2* |
"""
SHAPES = dict(line.split(" | ", 1) for line in SHAPES.replace("\n ", " ").strip().splitlines())
EXTRA = {
    "KLByPosition": {"sequences": {"exact": 7, "estimated": 5}},
    "AttentionDrift": {"query": "B"},
    "StepInfluence": {"target": "logit difference", "term_names": ["surrogate", "kl"]},
    "HackWatch": {
        "promoted": [{"token": "fine", "won": 0.5, "low": 0.25, "high": 0.75, "reference": 0.125}],
        "taken_up": [{"token": "dull", "count": 3, "reference_count": 9, "log_odds": -1.5}],
        "alarms_by_logits": ["fine"], "alarms_by_texts": ["dull"],
    },
    "ValueLens": {"defined": [[True, False], [True, True]], "tuned_sites": ["s0", "s1"],
                  "r2_against": "V of the grammar"},
    "Direction": {"sequences": {"fitted": 8, "held": 4}, "informed": [False, True]},
    "FrozenProbe": {"sequences": {"fitted": 8, "held": 4}, "slot": "B"},
    "NeuronRank": {"neurons": ["L0N1", "L0N2"], "tokens": [["a"], ["b"]],
                   "token_activations": [[1.0], [2.0]]},
    "WordsMoved": {
        "first": "was - wasn't",
        "contrasts": [
            {"words": "was - wasn't", "at": "A", "fraction": 0.25, "mass": 0.5, "component": "c1"}
            | {"shift": 0.5, "shift_low": 0.25, "shift_high": 1.0}
        ],
        "word_table": [{"word": "was", "won": 0.125, "won_low": 0.0625, "won_high": 0.1875}],
    },
    "WeightDelta": {
        "rows": [
            {"name": "W", "norm": 5.0, "relative": 6.0, "stable_rank": 7.0, "k90": 8}
            | {"unchanged": 9.0, "unchanged_bf16": 10.0, "s": [3.0, 2.0]}
        ]
    },
}  # fmt: skip
# of the last record: a mark's label or the column of a table (# before it), if needed after the
# end of its picture's title, and the field (T.: of a tensor) with the index of its number; a star:
# with the ends of its interval
TITLES = """
RunHealth | reward > optimal reward, phase 3 | optimal_reward
RunHealth | # explained variance | explained_variance *
KLByPosition | phase 3, B | kl 1
KLByPosition | A, k1 | k1_mean 0 k1_low k1_high
KLByPosition | # k2 | k2_mean 1 k2_low k2_high
KLByPosition | # k3 | k3_mean 1 k3_low k3_high
AttentionDrift | L0H1, pattern (QK) | qk 1 *
AttentionDrift | L0H1, W_O | wo 1 *
AttentionDrift | # total variation | tv_here 1 *
StepInfluence | step 3 on the logit difference by cause > decay | T.decay sum
StepInfluence | kl | T.terms 1,0 sum
StepInfluence | g1, B | T.rows 1,0,1
StepInfluence | # kappa | kappa
StepLedger | # objective | objective
HackWatch | reward minus true reward > true reward, phase 3 | true_reward *
HackWatch | gap, phase 3 | gap *
HackWatch | different n-grams > policy, n = | distinct_texts 0
HackWatch | had before > policy, n = | repeated_texts 0
HackWatch | another text has > reference, n = | overlap_reference 0
HackWatch | # reference count | taken_up 0,reference_count
ValueLens | s0, A | r2 0,0 *
ValueLens | B | head_correlation 1 *
ValueLens | tuned lens > s1, A | T.lens_tuned 1,0,0
ValueLens | raw lens > s1, A | T.lens 1,0,0
ValueLens | # tuned lens | tuned_r2 1 *
Direction | s1, A | accuracy 1,0 *
Direction | Bayes' rule, B * | bayes_accuracy 1
Direction | accuracy of the direction > accuracy, phase 3 | accuracy 1,1 *
FrozenProbe | frozen in phase 0, phase 3 | accuracy_frozen 1 *
FrozenProbe | Bayes' rule, phase 3 | bayes_accuracy 0 *
FrozenProbe | of both directions, phase 3 | cosine 1 *
FrozenProbe | # gap | gap 1 *
LogitShift | phase 3: shift of logit(good - bad) by component > c1, shift | T.shift 1,0
LogitShift | c0, own weights | T.own_weights 0,0
LogitShift | c1, inherited from earlier components | T.inherited 1,0
LogitShift | c1, the scale of the norm | T.scale 1,0
LogitShift | c1, unembedding | T.read_out 1,0
LogitShift | shift, phase 3 | T.measured 0
NeuronRank | L0N2, contribution | contribution 1 *
NeuronRank | L0N1, by activation | by_activation 0
NeuronRank | L1 mlp, b_out | b_out 1
NeuronRank | L1 mlp, its neurons | T.neuron_contribution 1 sum
WeightDelta | W, direction, from 0 1 | rows 0,s,1
WeightDelta | # stable rank | rows 0,stable_rank
WordsMoved | c1 | parts 1 *
WordsMoved | moved mass, phase 3 | moved_mass
WordsMoved | # shift | contrasts 0,shift shift_low shift_high
WordsMoved | # won | word_table 0,won won_low won_high
"""


def fill(numbers, sizes):
    """Nested lists of the given sizes with the next distinct numbers."""
    return [fill(numbers, sizes[1:]) for _ in range(sizes[0])] if sizes else next(numbers) / 8


def spelled(kind, numbers):
    """A record and its tensors by `SHAPES`; a star adds the two ends of an interval."""
    parts = []
    for listed in SHAPES[kind].partition(" | ")[::2]:
        found = {}
        for field in listed.split():
            name, _, sizes = field.rstrip("*").partition(":")
            shape = [int(x) for x in sizes.split(",") if x]
            for end in ENDS if field.endswith("*") else ENDS[:1]:
                found[name + end] = fill(numbers, shape)
        parts.append(found)
    return parts


def made(kind):
    """Two records of a probe, phases 2 and 3."""
    numbers, found = count(1), []
    settings = {"kind": kind, "word": "good", "other": "bad"}
    tokens = [["<p>", "A", "B"]]
    for phase in (2, 3):
        record, stored = spelled(kind, numbers)
        record |= NAMES | {"phase": phase, "tokens": tokens, "prefix_len": 1} | EXTRA.get(kind, {})
        if kind == "ValueLens":
            record |= {"held_out": 4, "head_n": 6, "n": 9}
        if "step" in record:
            record |= {"step": phase, "steps": 9}
        tensors = {k: torch.tensor(v) for k, v in stored.items()} | {"states": torch.ones(1, 2)}
        tensors |= {"mask": torch.ones(1, 2).bool(), "truth_mask": torch.tensor([[True, False]])}
        tensors |= {"clipped": torch.tensor([[0, 1]])} if kind == "StepLedger" else {}
        found.append(Snapshot(record, tensors, settings))
    return found


def drawn(kind):
    """All pictures of the two records: over phases, and of the last one."""
    found = made(kind)
    return [*phase_pictures(kind, found), *record_pictures(found[-1])], found[-1]


def titles(pictures):
    """Titles of marks, after the titles of their pictures."""
    found = []
    for p in pictures:
        if isinstance(p, Picture):
            found += [f"{p.title} > {x}" for x in re.findall("<title>([^<]*)<", unescape(p.svg))]
    return found


def read_value(at, where):
    """Number and ends of a field, by the words of a row of the table."""
    field, *words = where.split()
    index = words.pop(0).split(",") if words and re.match(r"[-\d]", words[0]) else []

    def read(name):
        if index and name not in at and not name.startswith("T."):  # next to the value
            return at[field][int(index[0])][name]
        found = at[name] if name[:2] != "T." else at.tensors[name[2:]].tolist()
        for i in index:
            found = found[i] if i.isalpha() or "_" in i else found[int(i)]
        return found

    value, ends = read(field), []
    if words == ["sum"]:
        value = torch.tensor(value).sum().item()
    elif words:
        ends = [read(x) for x in ([field + end for end in ENDS[1:]] if words == ["*"] else words)]
    return (value[0], value[1:]) if isinstance(value, list) else (value, ends)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_mark_shows_the_field_of_the_table(kind):
    pictures, at = drawn(kind)
    found, tables = titles(pictures), [p for p in pictures if isinstance(p, Table)]
    rows = [[x.strip() for x in line.split(" | ")] for line in TITLES.strip().splitlines()]
    for _, label, where in (row for row in rows if row[0] == kind):
        value, ends = read_value(at, where)
        if label.startswith("# "):
            places = [(t, t.columns.index(label[2:])) for t in tables if label[2:] in t.columns]
            cells = [row[i] for t, i in places for row in t.rows]
            assert any(is_cell(cell, value, ends) for cell in cells), (label, value, ends, cells)
            continue
        label, expected = label if " > " in label else f" > {label}", format_title(value, ends)
        assert any(label in t and expected in t for t in found), (label, expected, found)
    named = [p.title for p in pictures if isinstance(p, Picture | Strip | Table)]
    assert not [x for x in named if "{" in x or x.startswith("phase ") and "phase 3: " not in x]


def format_title(value, ends):
    bracket = f" [{ends[0]:.9g}, {ends[1]:.9g}]" if ends else ""
    return f": {value:.9g}{bracket}"


def is_cell(cell, value, ends):
    if isinstance(cell, float | int):
        return cell == pytest.approx(value) and not ends
    return cell == (f"{value:.4g} [{ends[0]:.3g}, {ends[1]:.3g}]" if ends else f"{value:.4g}")


def test_path_of_a_drawn_number_is_short():
    (row,) = (x for x in PICTURE_ROWS if x.probe == "WordsMoved" and x.kind == "bars")
    at = made("WordsMoved")[1]
    functions, files = count_opened(lambda: row.draw(at).fragment)
    assert functions <= 18 and files <= 5


def test_derived_numbers_match_hand_computed():
    pictures, at = drawn("AttentionDrift")
    causes = sum(at.tensors[name][0, 1, 0].mean() for name in ("qk", "ov", "wo"))
    assert any(f"> L0H1, A: {causes.item():.9g}" in title for title in titles(pictures))
    patterns = [float(t.split(": ")[-1]) for t in titles(pictures[-1:])]
    assert patterns == at.tensors["tv"].flatten().tolist()
    assert "L0H0: 12.50, L0H1: 12.62" in pictures[-1].alt
    pictures, at = drawn("ValueLens")
    assert not any(f"> s0, B: {at['r2'][0][1]:.9g}" in title for title in titles(pictures))
    (table,) = (p for p in drawn("LogitShift")[0] if isinstance(p, Table) and "cause" in p.columns)
    assert [row[0] for row in table.rows[1:4:2]] == ["own weights", "the scale of the norm"]
    pictures, at = drawn("StepInfluence")
    (strip,) = (p for p in pictures if isinstance(p, Strip))
    rows = at.tensors["rows"]
    assert strip.rows[0][2] == [None, *(rows[0, 0] + rows[1, 0]).tolist()]
    pictures, at = drawn("FrozenProbe")
    refitted = at["accuracy_frozen"][1] - at["gap"][1]
    assert any(f"refitted, phase 3: {refitted:.9g}" in title for title in titles(pictures))
    assert drawn("HackWatch")[0][1].title == "kinds of texts: grammatical"  # of several fields
    at["size"][1] = 0.0  # without a direction, its accuracy is ignored
    found = [x.fragment for x in phase_pictures("FrozenProbe", [at]) if isinstance(x, Html)]
    assert "At s0, B, the most accurate of 2 sites" in found[0]


def test_tokens_have_their_own_values_and_prompts_none(monkeypatch):
    pictures, at = drawn("TextHeatmap")
    monkeypatch.setattr(collect, "read_snapshots", lambda run, name: [at])
    columns = collect.collect_tokens(MagicMock(spec=Run))[3]["columns"]
    strips = {p.unit: p for p in pictures if isinstance(p, Strip)}
    assert len(strips) == 5 and strips["kl"].title == "phase 3: kl in nats"
    assert strips["exact value"].title == "phase 3: exact value in units of the reward"
    for field in at.tensors.keys() - {"mask", "truth_mask", "states"}:
        label = field.replace("true_", "exact ").replace("_", " ")
        (row,) = strips[label].rows
        assert row[0] == f"text 0, reward {at['rewards'][0]:.4g}" and row[1] == ["<p>", "A", "B"]
        values = at.tensors[field][0].tolist()
        values = [values[0], None] if field.startswith("true_") else values
        assert row[2] == [None, *values] and columns[label] == [values]
        assert strips[label].title.startswith(f"phase 3: {label}")
    (row,) = next(p for p in drawn("StepLedger")[0] if isinstance(p, Strip)).rows
    assert row[2] == [None, *drawn("StepLedger")[1].tensors["share"][0].tolist()]
    page = strips["kl"].fragment
    assert "<small>text 0, reward " in page
    first, second = at.tensors["kl"][0].tolist()
    assert re.search(rf'title="kl {first:.9g}[^"]*">A<.*title="kl {second:.9g}[^"]*">B<', page)


def test_ledger_has_the_numbers_of_each_token():
    at = made("StepLedger")[1]
    at["tokens"] = [["<p>", "C", "D"], *at["tokens"]]
    # the second sequence has the larger numbers, which are negative
    at.tensors |= {
        name: torch.cat([0 * x, -x if x.is_floating_point() else x])
        for name, x in at.tensors.items()
    }
    (table,) = OF_RECORD["StepLedger"](at)
    assert [row[0] for row in table.rows] == ["A", "B"] and len(table.columns) == 14
    for column in set(table.columns) - {"token", "clip binds"}:
        values = at.tensors[column.replace(" ", "_")][1].tolist()
        cells = [float(row[table.columns.index(column)]) for row in table.rows]
        assert cells == pytest.approx(values, abs=1e-3), column
    binds = at.tensors["clipped"][1].bool().tolist()
    assert [row[1] for row in table.rows] == ["yes" if x else "no" for x in binds]


def test_matrix_notes_its_largest_cell_and_their_number():
    at = made("Direction")[1]
    ends = [[0.1, 0.5], [0.2, None]], [[0.3, 0.9], [0.8, None]]
    row = records.PictureRow("", "fraction", "t", ["sites", "slots"], {"x": "x"}, "")
    at |= {"sites": ["a", "b"], "slots": ["A", "B"]}

    def draw(values):
        values = values if isinstance(values, tuple) else (values, None, None)
        at.update(zip(("x", "x_low", "x_high"), values, strict=True))
        return row.draw(at)

    largest = "Largest of the 3 compared: 0.7 [0.5, 0.9] at a, B (95 %"
    assert draw(([[0.2, 0.7], [0.6, None]], *ends)).note.startswith(largest)
    assert "of the 4 compared: 0.8 at b, B" in draw(([[0.2, 0.7], [0.6, 0.8]], *ends)).note
    assert records.PictureRow("", "bars", "{no}", [], {"x": "no"}, "").draw(at) is None
    assert draw([[0.2]] * 2).note == "" == draw(([[None, None]] * 2, *ends)).note


def test_pictures_keep_the_largest_and_say_so():
    at = made("Direction")[1]
    record = {"phase": 3, "tokens": [["p", "a", "b"]] * 2, "mask": [[True, True], [True, False]]}
    record |= {"x": [1.0, *[-2.0] * 23, -3.0], "moved": [[1.0, 2.0], [-5.0, 9.0]]}
    record |= {"rewards": [7.0, 9.0]}
    record |= {"rows": [{"n": 1.0 * i} for i in range(-30, 3)]}
    at = Snapshot(record, at.tensors)
    draw = lambda kind, field, *labels: records.PictureRow(
        "", kind, "t", labels, {"x": field}, ""
    ).draw(at)
    picture = draw("bars", "x", "names")
    assert [x.split("> ")[1] for x in titles([picture])][22:] == ["23: -2", "24: -3"]
    assert "1 others sum to x +1." in picture.note and len(titles([picture])) == 24
    (row,) = draw("strip", "moved", "diverging", "mask", "1").rows
    assert row[0] == "text 1, reward 9" and row[2] == [None, -5.0, None]
    table = draw("rows", "rows", "n")
    assert table.rows[0] == [-30.0] and table.note == "The 24 largest of 33."


def test_large_values_do_not_set_the_color_scale():
    strip = Strip([("text", ["a"] * 201, [1.0] * 200 + [50.0])], "t", "kl", "sequential")
    page = strip.fragment
    assert "kl 50, beyond the scale" in page and page.count("beyond") == 1
    assert page.count("underline") == 1 and 'title="kl 1"' in page
