"""Pictures of probes: every drawn number is the one that a hand-written table names."""

import re
import sys
from contextlib import nullcontext
from html import unescape
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
from rlhf_lab.views.probe_curves import OVER_PHASES
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
    "heads": ["L0H0", "L0H1"],
    "keys": ["A", "B"],
    "queries": ["A", "B"],
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
HackWatch | n orders:1 distinct_texts:1 distinct_reference:1 repeated_texts:1 repeated_reference:1
 overlap_texts:1 overlap_reference:1 reward* true_reward* gap* grammatical* reward_std
 saturated_below saturated alarm_z | promoted_mass:2 counts:2,2
KLAttribution | kl n output:2* weights:2* | by_position:2,2
ValueLens | held_out head_n lens_held_out ridge r2:2,2* head_correlation:2* raw_r2:2* tuned_r2:2*
 | lens:2,1,2 lens_tuned:2,1,2
ValueAttribution | sd:2,2* value_sd:2 dead |
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
 group_contribution:2 group_size:2 mlp:2 b_out:2 | neuron_contribution:2,2
 neuron_activation_shift:2,2 neuron_write:2,2,2
WeightDelta | total_norm |
WordsMoved | n moved_mass parts:2* |
"""
SHAPES = dict(line.split(" | ", 1) for line in SHAPES.replace("\n ", " ").strip().splitlines())
EXTRA = {
    "KLByPosition": {"sequences": {"exact": 7, "estimated": 5}},
    "AttentionDrift": {"query": "B"},
    "GradTerms": {"terms": ["kl_penalty", "value_loss"]},
    "StepInfluence": {"target": "logit difference", "term_names": ["surrogate", "kl"]},
    "HackWatch": {
        "promoted": [{"token": "fine", "won": 0.5, "low": 0.25, "high": 0.75, "reference": 0.125}],
        "taken_up": [{"token": "dull", "count": 3, "reference_count": 9, "log_odds": -1.5}],
        "alarms_by_logits": ["fine"],
        "alarms_by_texts": ["dull"],
    },
    "ValueLens": {
        "defined": [[True, False], [True, True]],
        "tuned_sites": ["s0", "s1"],
        "r2_against": "V of the grammar",
    },
    "ValueAttribution": {"positions": [3, 4], "n": [8, 9]},
    "Direction": {"sequences": {"fitted": 8, "held": 4}, "informed": [False, True]},
    "FrozenProbe": {
        "sequences": {"fitted": 8, "held": 4},
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
            {"name": "W", "norm": 5.0, "relative": 6.0, "stable_rank": 7.0, "k90": 8}
            | {"unchanged": 9.0, "unchanged_bf16": 10.0, "s": [3.0, 2.0]}
        ]
    },
}
# of the last record: a mark's label, if needed after the end of its picture's title, and the field
# (T.: of a tensor) with the index of its number; a star: with the ends of its interval
TITLES = """
KLByPosition | phase 3, B | kl 1
KLByPosition | A, exact, n = 7 | kl 0 *
KLByPosition | A, k1 | k1_mean 0 k1_low k1_high
KLByPosition | B, k2 | k2_mean 1 k2_low k2_high
KLByPosition | B, k3 | k3_mean 1 k3_low k3_high
KLByPosition | A, k1 | k1_var 0 sqrt
KLByPosition | B, k2 | k2_var 1 sqrt
KLByPosition | B | information 1
KLByPosition | A | tokens_at 0
AttentionDrift | L0H1, pattern (QK) | qk 1 *
AttentionDrift | L0H0, values (OV) | ov 0 *
AttentionDrift | L0H1, W_O | wo 1 *
AttentionDrift | L0H1 | tv_here 1 *
ComponentTransplant | g1, patched in | T.put_in 1
ComponentTransplant | g0, patched out | T.taken_out 0
ComponentTransplant | g1, Shapley | T.shapley 1
GradTerms | g1, value loss | T.norms 1,1
GradTerms | g0, kl penalty | T.norms 0,0
GradTerms | kl penalty, value loss | T.cosines 0,1,1
GradTerms | value loss, phase 3 | T.norms 1,-1
StepInfluence | decay | T.decay sum
StepInfluence | momentum | T.momentum sum
StepInfluence | kl | T.terms 1,0 sum
StepInfluence | surrogate | T.terms 0,0 sum
StepInfluence | g1, B | T.rows 1,0,1
HackWatch | standard deviation, phase 3 | reward_std
HackWatch | saturated below, phase 3 | saturated_below
HackWatch | different n-grams > policy, n = | distinct_texts 0
HackWatch | different n-grams > reference, n = | distinct_reference 0
HackWatch | had before > policy, n = | repeated_texts 0
HackWatch | another text has > reference, n = | overlap_reference 0
KLAttribution | c1 | output 1 *
KLAttribution | g0 | weights 0 *
KLAttribution | c0, B | T.by_position 0,1
ValueLens | s0, A | r2 0,0 *
ValueLens | s1, B | r2 1,1 *
ValueLens | B | head_correlation 1 *
ValueLens | tuned lens > s1, A | T.lens_tuned 1,0,0
ValueLens | raw lens > s1, A | T.lens 1,0,0
ValueAttribution | c1, A, n = 8 | sd 0,1 *
ValueAttribution | B, n = 9 | value_sd 1
Direction | s1, A | accuracy 1,0 *
Direction | Bayes' rule, B * | bayes_accuracy 1
FrozenProbe | frozen in phase 0, phase 3 | accuracy_frozen 1 *
FrozenProbe | called positive, phase 3 | called 1 *
FrozenProbe | Bayes' rule, phase 3 | bayes_accuracy 0 *
FrozenProbe | shuffled labels, phase 3 | accuracy_control 1 *
FrozenProbe | frozen minus refitted, phase 3 | gap 1 *
FrozenProbe | of both directions, phase 3 | cosine 1 *
FrozenProbe | of two halves (floor), phase 3 | split_half 1 *
LogitShift | c1, shift | shift 1
LogitShift | c0, own weights | own_weights 0
LogitShift | c1, inherited from earlier components | inherited 1
LogitShift | c1, the scale of the norm | scale 1
LogitShift | c1, unembedding | read_out 1
LogitShift | c1, policy | policy 1
LogitShift | c0, reference | reference 0
LogitShift | shift, phase 3 | measured_shift
NeuronRank | L0N2, contribution | contribution 1 *
NeuronRank | L0N1, by activation | by_activation 0
NeuronRank | L1 mlp, b_out | b_out 1
NeuronRank | L0 mlp, both | mlp 0
NeuronRank | L1 mlp, its neurons | T.neuron_contribution 1 sum
NeuronRank | down (7.25) | group_contribution 1
WeightDelta | W, direction, from 0 1 | rows 0,s,1
WordsMoved | c1 | parts 1 *
"""
# unit (-: none) and titles of the pictures of each probe; {field}: of the record
PICTURES = """
RunHealth | reward | reward
RunHealth | nats per sequence | KL from the reference
RunHealth | fraction | learning
RunHealth | objective per unit of weight | norm of the gradient
KLByPosition | nats per token | KL from the reference, n = 7 /
 phase 3: exact KL and its estimators / phase 3: standard deviation of the estimators
KLByPosition | reward squared | phase 3: information about the reward
KLByPosition | - | phase 3: sequences with a token
AttentionDrift | logits | phase 3: change of the shift by head and cause, n = {n} /
 phase 3: change of the shift by head and key, all causes
AttentionDrift | - | phase 3: total variation of the pattern at B
ComponentTransplant | reward | phase 3: reward by component, {gain:+} in all, n = {n}
GradTerms | objective per unit of weight | norm of each term's whole gradient /
 phase 3: norm of each term's gradient, step 4 of 9
GradTerms | - | phase 3: cosines of the terms' whole gradients
StepInfluence | - | phase 3: effect of step 4 on the logit difference by cause /
 phase 3: change of the logit difference by component and by the token's slot
StepInfluence | moved | phase 3: what each token did to the logit difference
StepLedger | share | phase 3: step 4 of 9: what each token adds to the objective
HackWatch | reward | reward minus true reward / spread of the rewards
HackWatch | fraction | grammatical texts / distinct-n: different n-grams /
 repeated-n: n-grams that their text has had before / overlap-n: n-grams that another text has
KLAttribution | nats | phase 3: {kl:.3g} nats per sequence, through which output, n = {n} /
 phase 3: {kl:.3g} nats per sequence, by whose weights, n = {n} /
 phase 3: KL through outputs, by the next token
ValueLens | - | phase 3: R2 of V of the grammar, linear probes, held out, n = 4 /
 phase 3: correlation of the value head with V of the grammar, n = 6 /
 phase 3: value by layer, sequence 1, raw lens / phase 3: value by layer, sequence 1, tuned lens
ValueAttribution | - | phase 3: standard deviation of each component's part of the value /
 phase 3: standard deviation of the values
Direction | - | accuracy of linear probes / accuracy of controls / AUC / cosine /
 projection on the reference's direction / phase 3: accuracy of the direction, held out, n = 4
FrozenProbe | - | accuracy of linear probes / cosine /
 frozen probe minus refitted, and fraction called positive /
 shift along the frozen direction (classes are 0.50 apart)
LogitShift | logits | shift of logit(good - bad) / phase 3: logit difference by component /
 phase 3: shift of logit(good - bad) by component, n = 1
NeuronRank | logits | phase 3: shift by neuron, n = {n} / phase 3: shift by group of neurons /
 phase 3: shift by MLP
WeightDelta | - | distance of the weights from the reference
WeightDelta | singular value | phase 3: singular values of the largest changes
WordsMoved | logits | phase 3: shift of was - wasn't by component
WordsMoved | probability | probability that words won per text
""".replace("\n ", " ")
# fields of each record that are curves, and those that are columns, under their own names
NAMED = """
RunHealth | mean_reward true_reward optimal_reward kl_per_sequence optimal_kl_per_sequence
 explained_variance clip_fraction grad_norm | beta_eff reward_std advantage_std entropy_per_token
HackWatch | reward true_reward gap grammatical | saturated
Direction | accuracy accuracy_frozen accuracy_lda accuracy_ablated accuracy_erased accuracy_shuffled
 auc cosine_with_reference split_half_cosine positive_projection
 negative_projection | phase
FrozenProbe | shift | accuracy_frozen gap called shift cosine split_half moved_cosine
 accuracy_control size
StepLedger | - | clipped_surrogate value_loss entropy_bonus kl_penalty objective
StepInfluence | - | f_before f_after linear remainder kappa
NeuronRank | - | contribution by_activation activation activation_shift write
ValueAttribution | - | dead
WeightDelta | total_norm | total_norm
WordsMoved | moved_mass | moved_mass
""".replace("\n ", " ")
CELLS = """
HackWatch | won | promoted 0,won
HackWatch | reference count | taken_up 0,reference_count
WordsMoved | mass | contrasts 0,mass
WordsMoved | shift | contrasts 0,shift shift_low shift_high
WordsMoved | won | word_table 0,won won_low won_high
WeightDelta | stable rank | rows 0,stable_rank
ValueLens | raw lens | raw_r2 0 *
ValueLens | tuned lens | tuned_r2 0 *
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
        masks = dict.fromkeys(("mask", "truth_mask"), torch.ones(1, 2, dtype=torch.bool))
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


def titles(pictures, is_whole=False):
    """Titles of marks, after the titles of their pictures if `is_whole`."""
    found = []
    for p in pictures:
        if isinstance(p, Bars | Curves | Matrix | Picture):
            svg = unescape((p if isinstance(p, Picture) else draw_picture(p)).svg)
            before = f"{getattr(p, 'title', '')} > " if is_whole else ""
            found += [before + title for title in re.findall("<title>([^<]*)</title>", svg)]
    return found


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
    found = titles(pictures, is_whole=True)
    for _, label, where in (row for row in split_rows(TITLES) if row[0] == kind):
        expected = format_title(*read_value(at, where))
        label = label if " > " in label else f" > {label}"
        assert any(label in t and expected in t for t in found), (label, expected, found)
    labels, named = {row[1] for row in split_rows(TITLES) if row[0] == kind}, {"-"}
    for title in titles(pictures):  # curves that have the name of a field
        label, _, number = title.partition(", phase 3")
        if number and f"{label}, phase 3" not in labels and (found := last_number(at, label)):
            assert number == format_title(*found), title
            named.add(label.replace(" ", "_"))
    assert all(set(row[1].split()) <= named for row in split_rows(NAMED) if row[0] == kind)


def assert_cells_match(kind):
    pictures, at = drawn(kind)
    tables = [p for p in pictures if isinstance(p, Table)]
    for _, column, where in (row for row in split_rows(CELLS) if row[0] == kind):
        found = [(t, list(t.columns).index(column)) for t in tables if column in t.columns]
        cells = [row[i] for t, i in found for row in t.rows]
        value, ends = read_value(at, where)
        assert any(_is_cell(cell, value, ends) for cell in cells), (column, value, ends, cells)
    named = set()
    for table in tables:  # columns that have the name of a field
        if table.columns[0] == "token":  # its cells are tested below
            continue
        for column, cell in zip(table.columns, table.rows[-1], strict=True):
            label = column.lstrip("−+= ").lower()
            if label not in ("step", "tokens") and (found := last_number(at, label)):
                assert _is_cell(cell, *found), (label, cell, found)
                named.add(label.replace(" ", "_"))
    assert all(set(row[2].split()) <= named for row in split_rows(NAMED) if row[0] == kind)


def last_number(at, label):
    """The last number of the field of a name, and the ends of its interval, or None."""
    parts = [at.get(label.replace(" ", "_") + end) for end in ENDS]
    for i, part in enumerate(parts):
        while isinstance(part, list) and part:
            part = part[-1]
        parts[i] = part if isinstance(part, float | int) else None
    return parts[0] and (parts[0], [x for x in parts[1:] if x is not None])


def assert_pictures_match(kind):
    pictures, at = drawn(kind)
    kinds = [p for p in pictures if isinstance(p, Bars | Curves | Matrix | Strip)]
    rows = [row for row in split_rows(PICTURES) if row[0] == kind]
    expected = [(unit, t.format_map(at.record)) for _, unit, all in rows for t in all.split(" / ")]
    assert sorted((p.unit or "-", p.title) for p in kinds) == sorted(expected)


def _is_cell(cell, value, ends):
    if isinstance(cell, float | int):
        return cell == pytest.approx(value) and not ends
    return str(cell).startswith(f"{value:.4g}") and all(f"{end:.3g}" in cell for end in ends)


FAULTS = {
    "deviation for variance": ("probe_views", "v**0.5 for v in", "v for v in"),
    "reference and policy": ("probe_curves", '(("texts", "pol', '(("texts", "ref'),
    "tokens padded on the wrong side": ("records", "prompt + known", "known + prompt"),
    "refit for frozen": (
        "probe_curves",
        'cell("accuracy_frozen", i)',
        'lambda at: at["accuracy_frozen"][i] - at["gap"][i]',
    ),
    "phase off by one": ("records", "ends = [at.phase for", "ends = [at.phase + 1 for"),
    "A and B": ("component_views", '"patched in": "put_in"', '"patched in": "taken_out"'),
    "low and high": ("records", '("", "_low", "_high")', '("", "_high", "_low")'),
    "quantile for maximum": ("probe_pictures", "limit(values)", "limit(values, 1.0)"),
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
    if kind != "TextHeatmap":
        assert_pictures_match(kind)


def test_the_table_covers_every_probe():
    covered = {row[0] for row in split_rows(PICTURES)} | {"TextHeatmap"}
    assert covered == KINDS == set(SHAPES) and len(covered) == 18


def test_derived_numbers_match_hand_computed():
    pictures, at = drawn("AttentionDrift")
    causes = sum(at.tensors[name][0, 1, 0].mean() for name in ("qk", "ov", "wo"))
    assert f"L0H1, A: {causes.item():.9g}" in titles(pictures)
    patterns = [float(t.split(": ")[1]) for t in titles(pictures[-1:])]
    assert patterns == at.tensors["tv"].flatten().tolist()
    assert "L0H0: 12.50, L0H1: 12.62" in pictures[-1].alt
    pictures, at = drawn("StepInfluence")
    (strip,) = (p for p in pictures if isinstance(p, Strip))
    rows = at.tensors["rows"]
    assert strip.rows[0][2] == [None, *(rows[0, 0] + rows[1, 0]).tolist()]


def test_tokens_have_their_own_values_and_prompts_none():
    pictures, at = drawn("TextHeatmap")
    strips = {p.title: p for p in pictures if isinstance(p, Strip)}
    assert len(strips) == 5 and set(FIELDS) <= at.tensors.keys()
    for field in at.tensors.keys() - {"mask", "truth_mask", "states"}:
        label = field.replace("true_", "exact ").replace("_", " ")
        (row,) = strips[f"phase 3: {label}"].rows
        assert row[0] == f"text 0, reward {at['rewards'][0]:.4g}" and row[1] == ["<p>", "A", "B"]
        assert row[2] == [None, *at.tensors[field][0].tolist()]
        assert strips[f"phase 3: {label}"].unit == label
    (row,) = next(p for p in drawn("StepLedger")[0] if isinstance(p, Strip)).rows
    assert row[2] == [None, *drawn("StepLedger")[1].tensors["share"][0].tolist()]
    page = module("probe_pictures").fragment(strips["phase 3: kl"])
    first, second = at.tensors["kl"][0].tolist()
    assert re.search(rf'title="kl {first:.9g}[^"]*">A<.*title="kl {second:.9g}[^"]*">B<', page)


def test_ledger_has_the_numbers_of_each_token():
    pictures, at = drawn("StepLedger")
    (table,) = (p for p in pictures if isinstance(p, Table) and p.columns[0] == "token")
    assert [row[0] for row in table.rows] == ["A", "B"] and len(table.columns) == 14
    for column in set(table.columns) - {"token", "clip binds"}:
        values = at.tensors[column.replace(" ", "_")][0].tolist()
        cells = [float(row[table.columns.index(column)]) for row in table.rows]
        assert cells == pytest.approx(values, abs=1e-3), column


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
