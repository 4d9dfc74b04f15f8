"""Pictures of probes: every drawn number is the one that a hand-written table names."""

import re
import sys
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from rlhf_lab import views
from rlhf_lab.config import RLHFArgs
from rlhf_lab.probes import Run
from rlhf_lab.probes.text_heatmap import FIELDS
from rlhf_lab.views.pictures import Bars, Curves, Matrix, Picture, Strip, Table
from rlhf_lab.views.probe_curves import HEALTH, OVER_PHASES
from rlhf_lab.views.probe_views import OF_RECORD
from rlhf_lab.views.svg import draw_picture
from rlhf_lab.views.tokens import tokens_html

KINDS = OVER_PHASES.keys() | OF_RECORD.keys()
ENDS = ("", "_low", "_high")
NAMES = {
    "slots": ["A", "B"],
    "groups": ["g0", "g1"],
    "components": ["c0", "c1"],
    "sites": ["s0", "s1"],
}
# the fields of each record with their shapes, then those of its tensors; every number is distinct
SHAPES = """
RunHealth | mean_reward true_reward optimal_reward kl_per_sequence optimal_kl_per_sequence
 beta_eff reward_std advantage_std explained_variance clip_fraction entropy_per_token grad_norm
 ratio_first_minibatch sequences explained_variance_low explained_variance_high |
KLByPosition | kl:2* k1_mean:2 k1_low:2 k1_high:2 k2_mean:2 k2_low:2 k2_high:2 k3_mean:2 k3_low:2
 k3_high:2 k1_var:2 k2_var:2 k3_var:2 information:2 tokens_at:2 |
AttentionDrift | qk:2* ov:2* wo:2* tv_here:2* n | qk:1,2,2,4 ov:1,2,2,4 wo:1,2,2,4 tv:1,2,2,2
ComponentTransplant | gain n | put_in:2,3 taken_out:2,3 shapley:2,3
GradTerms | step steps | norms:2,2 cosines:2,2,2
StepInfluence | step steps f_before f_after linear remainder kappa | rows:2,1,2 terms:2,1,2
 momentum:2 decay:2
StepLedger | step steps real_tokens kl_coef clipped_surrogate value_loss entropy_bonus kl_penalty
 objective | advantage:1,2 clipped:1,2 entropy:1,2 kl:1,2 logprob:1,2 old_logprob:1,2 ratio:1,2
 return:1,2 share:1,2 surrogate:1,2 value:1,2 value_loss:1,2 whitened:1,2
TextHeatmap | rewards:1 | advantage:1,2 true_advantage:1,2 kl:1,2 value:1,2 true_value:1,2
 entropy:1,2 return:1,2 log_ratio:1,2
HackWatch | n orders:1 distinct_texts:1 distinct_reference:1 repeated_texts:1 repeated_reference:1
 overlap_texts:1 overlap_reference:1 reward* true_reward* gap* grammatical* reward_std
 saturated_below saturated alarm_z | promoted_mass:2 counts:2,2
KLAttribution | kl n output:2* weights:2* | by_position:2,2
ValueLens | held_out head_n lens_held_out ridge r2:2,2* head_correlation:2* raw_r2:2* tuned_r2:2*
 continuations reliability correlation:2* | lens:2,1,2 lens_tuned:2,1,2 v_policy:2 v_policy_se:2
 estimates:2,2
ValueAttribution | sd:2,2* value_sd:2 dead |
Direction | accuracy:2,2* accuracy_frozen:2,2* accuracy_lda:2,2* accuracy_ablated:2,2*
 accuracy_erased:2,2* accuracy_shuffled:2,2* accuracy_random:2,2* auc:2,2*
 cosine_with_reference:2,2* split_half_cosine:2,2* positive_projection:2,2*
 negative_projection:2,2* bayes_accuracy:2 |
FrozenProbe | position positive size:2 accuracy_frozen:2* gap:2* called:2* shift:2* cosine:2*
 split_half:2* moved_cosine:2* accuracy_control:2* bayes_accuracy:2* true_reward:2* grammatical:2*
 surprise:2* true_reward_random:2* grammatical_random:2* surprise_random:2* alphas:2*
 random_alphas:2* |
LogitShift | measured_shift shift:2 policy:2 reference:2 own_weights:2 inherited:2 scale:2
 read_out:2 defined_sequences | shift:2,1 reference:2,1 own_weights:2,1 inherited:2,1 scale:2,1
 read_out:2,1 measured:1
NeuronRank | n contribution:2* by_activation:2 activation:2 activation_shift:2 write:2
 group_contribution:2 group_size:2 mlp:2 b_out:2 | neuron_contribution:2,2
 neuron_activation_shift:2,2 neuron_write:2,2,2
WeightDelta | total_norm |
WordsMoved | n moved_mass parts:2* |
"""
SHAPES = dict(line.split(" | ", 1) for line in SHAPES.replace("\n ", " ").strip().splitlines())
EXTRA = {
    "KLByPosition": {"sequences": {"exact": 7, "estimated": 5}},
    "AttentionDrift": {
        "heads": ["L0H0", "L0H1"],
        "keys": ["A", "B"],
        "queries": ["A", "B"],
        "query": "B",
    },
    "GradTerms": {"terms": ["kl_penalty", "value_loss"]},
    "StepInfluence": {
        "target": "logit difference",
        "term_names": ["surrogate", "kl"],
        "groups": ["g0", "g1"],
    },
    "HackWatch": {
        "promoted": [{"token": "fine", "won": 0.5, "low": 0.25, "high": 0.75, "reference": 0.125}],
        "taken_up": [{"token": "dull", "count": 3, "reference_count": 9, "log_odds": -1.5}],
        "alarms_by_logits": ["fine"],
        "alarms_by_texts": ["dull"],
    },
    "ValueLens": {
        "defined": [[True, False], [True, True]],
        "tuned_sites": ["s0", "s1"],
        "estimates": ["grammar", "head"],
        "prefix_rows": [64, 65],
        "prefix_pos": 1,
        "correlation_against": "V of the policy",
        "r2_against": "V of the grammar",
    },
    "ValueAttribution": {"positions": [3, 4], "n": [8, 9]},
    "Direction": {"sequences": {"fitted": 8, "held": 4}, "informed": [False, True]},
    "FrozenProbe": {
        "sequences": {"fitted": 8, "held": 4, "steered": 2},
        "steered_at": "s1",
        "slot": "B",
    },
    "NeuronRank": {
        "neurons": ["L0N1", "L0N2"],
        "group": ["up", "down"],
        "groups": ["up", "down"],
        "tokens": [["a"], ["b"]],
        "token_activations": [[1.0], [2.0]],
    },
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
            {
                "name": "W",
                "norm": 5.0,
                "relative": 6.0,
                "stable_rank": 7.0,
                "k90": 8,
                "unchanged": 9.0,
                "unchanged_bf16": 10.0,
                "s": [3.0, 2.0],
            }
        ]
    },
}
# of the last record: a mark's label, and the field (T.: of a tensor) with the index of its number;
# a star: with the ends of its interval
TITLES = """
RunHealth | mean reward, phase 3 | mean_reward
RunHealth | optimal reward, phase 3 | optimal_reward
RunHealth | optimal kl per sequence, phase 3 | optimal_kl_per_sequence
RunHealth | explained variance, phase 3 | explained_variance *
RunHealth | clip fraction, phase 3 | clip_fraction
RunHealth | grad norm, phase 3 | grad_norm
KLByPosition | phase 3, B | kl 1
KLByPosition | A, exact, n = 7 | kl 0 *
KLByPosition | A, k1 | k1_mean 0 k1_low k1_high
KLByPosition | B, k3 | k3_mean 1 k3_low k3_high
KLByPosition | B, k2 | k2_var 1 sqrt
KLByPosition | B | information 1
KLByPosition | A | tokens_at 0
AttentionDrift | L0H1, pattern (QK) | qk 1 *
AttentionDrift | L0H0, values (OV) | ov 0 *
AttentionDrift | L0H1, W_O | wo 1 *
AttentionDrift | L0H1 | tv_here 1 *
AttentionDrift | B, A | T.tv 0,0,1,0
ComponentTransplant | g1, patched in | T.put_in 1
ComponentTransplant | g0, patched out | T.taken_out 0
ComponentTransplant | g1, Shapley | T.shapley 1
GradTerms | g1, value loss | T.norms 1,1
GradTerms | g0, kl penalty | T.norms 0,0
GradTerms | kl penalty, value loss | T.cosines 0,1,1
GradTerms | value loss, phase 3 | T.norms 1,-1
StepInfluence | decay | T.decay sum
StepInfluence | surrogate | T.terms 0,0 sum
StepInfluence | g1, B | T.rows 1,0,1
HackWatch | reward, phase 3 | reward *
HackWatch | true reward, phase 3 | true_reward *
HackWatch | gap, phase 3 | gap *
HackWatch | policy, n = | distinct_texts 0
HackWatch | reference, n = | overlap_reference 0
HackWatch | standard deviation, phase 3 | reward_std
KLAttribution | c1 | output 1 *
KLAttribution | g0 | weights 0 *
KLAttribution | c0, B | T.by_position 0,1
ValueLens | s0, A | r2 0,0 *
ValueLens | s1, B | r2 1,1 *
ValueLens | B | head_correlation 1 *
ValueLens | s1, A | T.lens_tuned 1,0,0
ValueLens | s1, A | T.lens 1,0,0
ValueLens | text 64, policy | T.v_policy 0
ValueLens | text 65, grammar | T.estimates 1,0
ValueLens | grammar | correlation 0 *
ValueAttribution | c1, A, n = 8 | sd 0,1 *
ValueAttribution | B, n = 9 | value_sd 1
Direction | s1, A | accuracy 1,0 *
Direction | Bayes' rule, B * | bayes_accuracy 1
Direction | accuracy, phase 3 | accuracy 1,1 *
Direction | accuracy frozen, phase 3 | accuracy_frozen 1,1 *
Direction | split half cosine, phase 3 | split_half_cosine 1,1 *
Direction | negative projection, phase 3 | negative_projection 1,1 *
FrozenProbe | frozen in phase 0, phase 3 | accuracy_frozen 1 *
FrozenProbe | called positive, phase 3 | called 1 *
FrozenProbe | Bayes' rule, phase 3 | bayes_accuracy 0 *
FrozenProbe | shift, phase 3 | shift 1 *
FrozenProbe | frozen direction, alpha | true_reward 0 *
FrozenProbe | random directions, alpha | surprise_random 1 *
LogitShift | c1, shift | shift 1
LogitShift | c0, own weights | own_weights 0
LogitShift | c1, inherited from earlier components | inherited 1
LogitShift | c1, unembedding | read_out 1
LogitShift | c1, policy | policy 1
LogitShift | c0, reference | reference 0
LogitShift | shift, phase 3 | measured_shift
NeuronRank | L0N2, contribution | contribution 1 *
NeuronRank | L0N1, by activation | by_activation 0
NeuronRank | L1 mlp, b_out | b_out 1
NeuronRank | L0 mlp, both | mlp 0
WeightDelta | total norm, phase 3 | total_norm
WeightDelta | W, direction, from 0 1 | rows 0,s,1
WordsMoved | c1 | parts 1 *
WordsMoved | moved mass, phase 3 | moved_mass
"""
CELLS = """
RunHealth | beta eff | beta_eff
RunHealth | reward std | reward_std
RunHealth | explained variance | explained_variance *
HackWatch | won | promoted 0,won
HackWatch | reference count | taken_up 0,reference_count
WordsMoved | mass | contrasts 0,mass
WordsMoved | shift | contrasts 0,shift shift_low shift_high
WordsMoved | won | word_table 0,won won_low won_high
WeightDelta | stable rank | rows 0,stable_rank
FrozenProbe | gap | gap 0 *
ValueLens | raw lens | raw_r2 0 *
ValueLens | tuned lens | tuned_r2 0 *
ValueAttribution | dead | dead
StepLedger | = objective | objective
StepLedger | − value loss | value_loss
NeuronRank | activation | activation 0
NeuronRank | write | write 0
StepInfluence | f before | f_before
"""


class Given(Run):
    """A run of these records and tensors that has no directory."""

    path, args, info = Path("run"), RLHFArgs(preset="reel"), {}

    def __init__(self, records, tensors, kind):
        suite = {"probes": [{"name": "probe", "kind": kind, "word": "good", "other": "bad"}]}
        self.store = SimpleNamespace(
            tensor_path=lambda name, phase: Path(__file__), read_suite=lambda: suite
        )
        self._records, self._tensors = records, tensors

    def records(self, name):
        return self._records

    def tensors(self, name, phase):
        return self._tensors[phase]

    def metrics(self):
        return []

    def samples(self, phase=None):
        return []


def module(name):
    return sys.modules[f"rlhf_lab.views.{name}"]


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
    """Two records of a probe, phases 2 and 3, in a run that exists in memory only."""
    numbers, records, tensors = count(1), [], {}
    tokens = [["<p>", "A", "B"]]
    for phase in (2, 3):
        record, stored = spelled(kind, numbers)
        record |= NAMES | {"phase": phase, "tokens": tokens, "prefix_len": 1} | EXTRA.get(kind, {})
        record |= (
            {"held_out": 4, "head_n": 6, "n": record.get("n", 9)} if kind == "ValueLens" else {}
        )
        if "step" in record:
            record |= {"step": phase, "steps": 9}
        masks = {
            "mask": torch.ones(1, 2, dtype=torch.bool),
            "truth_mask": torch.ones(1, 2, dtype=torch.bool),
        }
        tensors[phase] = {k: torch.tensor(v) for k, v in stored.items()} | masks
        tensors[phase]["states"] = torch.ones(1, 2)
        records.append(record)
    run = Given(records, tensors, kind)
    snapshot = module("records").Snapshot
    return [snapshot(run, "probe", record) for record in records]


def drawn(kind):
    """All pictures of the two records: over phases, and of the last one."""
    records, pictures = made(kind), module("probe_pictures")
    over = pictures.pictures_over("probe", kind, records)
    return [*over, *pictures.draw_declared("probe", kind, records[-1])], records[-1]


def titles(pictures):
    kinds = [p for p in pictures if isinstance(p, Bars | Curves | Matrix | Picture)]
    svg = "".join((p if isinstance(p, Picture) else draw_picture(p)).svg for p in kinds)
    return [t.replace("&#x27;", "'") for t in re.findall("<title>([^<]*)</title>", svg)]


def read_value(at, where):
    """Number and ends of a field, by the words of a row of the table."""
    field, *words = where.split()
    index = words.pop(0).split(",") if words and re.match(r"[-\d]", words[0]) else []

    def read(name):
        if index and name not in at.record and not name.startswith("T."):  # next to the value
            return at.record[field][int(index[0])][name]
        found = at.record[name] if name[:2] != "T." else at.tensors[name[2:]].tolist()
        for i in index:
            found = found[i] if i.isalpha() or "_" in i else found[int(i)]
        return found

    value, ends = read(field), []
    if words == ["sqrt"]:
        value **= 0.5
    elif words == ["sum"]:
        value = torch.tensor(value).sum().item()
    elif words:
        ends = [read(x) for x in ([field + end for end in ENDS[1:]] if words == ["*"] else words)]
    return (value[0], value[1:]) if isinstance(value, list) else (value, ends)


def split_rows(table):
    return [[part.strip() for part in line.split(" | ")] for line in table.strip().splitlines()]


def format_title(value, ends):
    bracket = f" [{ends[0]:.9g}, {ends[1]:.9g}]" if ends else ""
    return f": {value:.9g}{bracket}"


def assert_titles_match(kind):
    pictures, at = drawn(kind)
    found = titles(pictures)
    for _, label, where in (row for row in split_rows(TITLES) if row[0] == kind):
        expected = format_title(*read_value(at, where))
        assert any(t.startswith(label) and expected in t for t in found), (label, expected, found)


def assert_cells_match(kind):
    pictures, at = drawn(kind)
    tables = [p for p in pictures if isinstance(p, Table)]
    for _, column, where in (row for row in split_rows(CELLS) if row[0] == kind):
        found = [(t, list(t.columns).index(column)) for t in tables if column in t.columns]
        cells = [row[i] for t, i in found for row in t.rows]
        value, ends = read_value(at, where)
        assert any(_is_cell(cell, value, ends) for cell in cells), (column, value, ends, cells)


def _is_cell(cell, value, ends):
    if isinstance(cell, float | int):
        return cell == pytest.approx(value) and not ends
    return str(cell).startswith(f"{value:.4g}") and all(f"{end:.3g}" in cell for end in ends)


FAULTS = {
    "deviation for variance": ("probe_views", "v**0.5 for v in", "v for v in"),
    "reference and policy": (
        "probe_curves",
        '"policy"), ("reference", "ref',
        '"reference"), ("reference", "pol',
    ),
    "tokens padded on the wrong side": ("records", "prompt + known", "known + prompt"),
    "refit for frozen": (
        "probe_curves",
        '"frozen in phase 0": cell("accuracy_frozen", i)',
        '"frozen in phase 0": lambda at: at["accuracy_frozen"][i] - at["gap"][i]',
    ),
    "phase off by one": (
        "records",
        "curves, ends = [at.phase for",
        "curves, ends = [at.phase + 1 for",
    ),
    "A and B": ("component_views", '"patched in": "put_in"', '"patched in": "taken_out"'),
    "low and high": ("records", '("", "_low", "_high")', '("", "_high", "_low")'),
    "quantile for maximum": (
        "probe_pictures",
        "quantile_limit(values)",
        "quantile_limit(values, 1.0)",
    ),
}
FAULTY = ("KLByPosition", "HackWatch", "FrozenProbe", "ComponentTransplant", "RunHealth")


@pytest.mark.parametrize("fault", [*FAULTS, "none"])
def test_every_injected_fault_fails(fault, monkeypatch):
    where, old, new = FAULTS.get(fault, ("records", "class Snapshot", "class Snapshot"))
    names = ("records", "probe_curves", "component_views", "probe_views", "probe_pictures")
    for name in names:
        path = Path(views.__file__).with_name(f"{name}.py")
        source, copy = path.read_text(encoding="utf-8"), ModuleType(f"rlhf_lab.views.{name}")
        assert name != where or source.count(old) == 1
        monkeypatch.setitem(sys.modules, copy.__name__, copy)
        monkeypatch.setattr(views, name, copy, raising=False)
        exec(compile(source.replace(old, new if name == where else old), name, "exec"), vars(copy))
    with nullcontext() if fault == "none" else pytest.raises(AssertionError):
        for kind in FAULTY:
            assert_titles_match(kind)
        test_tokens_have_their_own_values_and_prompts_none()
        test_large_values_do_not_set_the_color_scale()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_mark_shows_the_field_of_the_table(kind):
    assert_titles_match(kind)
    assert_cells_match(kind)


def test_the_table_covers_every_probe():
    covered = {row[0] for row in split_rows(TITLES) + split_rows(CELLS)} | {"TextHeatmap"}
    assert covered == KINDS == set(SHAPES) and len(covered) == 18
    assert all(unit for _, _, unit in HEALTH)


def test_derived_numbers_match_hand_computed():
    pictures, at = drawn("AttentionDrift")
    causes = sum(at.tensors[name][0, 1, 0].mean() for name in ("qk", "ov", "wo"))
    assert f"L0H1, A: {causes.item():.9g}" in titles(pictures)
    pictures, at = drawn("StepInfluence")
    (strip,) = (p for p in pictures if isinstance(p, Strip))
    rows = at.tensors["rows"]
    assert strip.rows[0][2] == [None, *(rows[0, 0] + rows[1, 0]).tolist()]


def test_tokens_have_their_own_values_and_prompts_none():
    pictures, at = drawn("TextHeatmap")
    strips = {p.title: p for p in pictures if isinstance(p, Strip)}
    assert set(FIELDS) <= {title.removeprefix("phase 3: ").replace(" ", "_") for title in strips}
    for field, label in (("kl", "kl"), ("true_value", "exact value"), ("advantage", "advantage")):
        (row,) = strips[f"phase 3: {label}"].rows
        assert row[1] == ["<p>", "A", "B"] and row[2] == [None, *at.tensors[field][0].tolist()]
    (row,) = next(p for p in drawn("StepLedger")[0] if isinstance(p, Strip)).rows
    assert row[2] == [None, *drawn("StepLedger")[1].tensors["share"][0].tolist()]
    page = module("probe_pictures").fragment(strips["phase 3: kl"])
    first, second = at.tensors["kl"][0].tolist()
    assert re.search(rf'title="kl {first:.9g}[^"]*">A<.*title="kl {second:.9g}[^"]*">B<', page)


def test_matrix_notes_its_best_cell_and_how_many_were_compared():
    at = made("Direction")[1]
    ends = [[0.1, 0.5], [0.2, None]], [[0.3, 0.9], [0.8, None]]
    draw = lambda values: module("records").matrix(at, "t", values, ["a", "b"], ["A", "B"], held=40)
    best = "Best of the 3 compared: 0.7 [0.5, 0.9] at a, B (95 %, bootstrap over 40 held-out"
    assert draw(([[0.2, 0.7], [0.6, None]], *ends)).note.startswith(best)
    assert "of the 4 compared: 0.8 at b, B" in draw(([[0.2, 0.7], [0.6, 0.8]], *ends)).note
    assert draw([[0.2]]).note == "" == draw(([[None, None]], *ends)).note


def test_large_values_do_not_set_the_color_scale():
    values = [1.0] * 200 + [50.0]
    strip = Strip([("text", ["a"] * 201, values)], "t", "kl", "sequential")
    page = module("probe_pictures").fragment(strip)
    assert "kl 50, beyond the scale" in page and page.count("beyond") == 1
    assert 'title="kl 1"' in page
    assert "beyond" not in tokens_html(["a"], [1.0], "kl", limit=1.0).fragment
