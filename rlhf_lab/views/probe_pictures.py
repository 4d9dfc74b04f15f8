"""Pictures of probes: a table of the fields that go to each, and what a table cannot declare."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rlhf_lab.probes import Run
from rlhf_lab.probes.store import records_file
from rlhf_lab.training.run_dir import reading
from rlhf_lab.views.pictures import Drawn, Html, Table, paragraph
from rlhf_lab.views.plots import curves, heatmap, heatmaps
from rlhf_lab.views.records import (
    PictureRow,
    Snapshot,
    curves_over,
    dict_table,
    read_snapshots,
    short_site,
)
from rlhf_lab.views.templates import formatted

# probe | kind | title | labels | LABEL=COLUMN ... | unit, as in `PictureRow`. In a LABEL, _ is a
# space, and __ is _.
PICTURES = """
RunHealth | curves | reward | | mean_reward true_reward optimal_reward
 best_reward_at_this_KL=best_reward_at_kl | reward
RunHealth | rows | exact optimum for each beta; the first row is the grammar | | answer_key |
RunHealth | curves | KL from the reference | | kl_per_sequence optimal_kl_per_sequence | nats per
 sequence
KLByPosition | bars | exact KL and k1, n = {sequences[exact]} and {sequences[estimated]} | slots |
 exact=kl k1 | nats per token
KLByPosition | table | estimators of the KL in nats, n = {sequences[estimated]} | |
 slot=kl_slots k1 k2 k3 information_about_the_reward=information |
AttentionDrift | bars | shift by head and cause, n = {n} | heads | pattern_(QK)=qk values_(OV)=ov
 W__O=wo | logits
AttentionDrift | table | total variation of the pattern at {query} | |
 head=heads total_variation=tv_here |
AttentionDrift | diverging | shift by head and key, all causes | heads keys | by_key | logits
StepInfluence | bars | effect of step {step} on the {target} by cause | causes_of_step |
 effect=effects |
StepInfluence | strip | what each token did to the {target} | diverging mask 3 | moved=rows:sum0 |
StepInfluence | diverging | change of the {target} by component and by the token's slot | groups
 slots | rows:sum1 |
StepLedger | strip | step {step}: what each token adds to the objective | diverging
 mask 3 | share=share |
TextHeatmap | strip | advantage | diverging mask | advantage |
TextHeatmap | strip | exact advantage in units of the reward | diverging truth_mask |
 exact_advantage=true_advantage |
TextHeatmap | strip | value | diverging mask | value |
TextHeatmap | strip | exact value in units of the reward | sequential truth_mask |
 exact_value=true_value |
TextHeatmap | strip | kl in nats | sequential mask | kl |
TextHeatmap | rows | each column, units first, as written and as true | | steps |
HackWatch | curves | reward minus true reward | | reward true_reward gap | reward
HackWatch | curves | kinds of texts | | grammatical steps dropped_carry direct sure | fraction
HackWatch | table | tokens, and probability that words won | | text=sides tokens=counts:sum1
 won=promoted_mass:moved |
HackWatch | rows | by the logits: probability won in states of the policy's texts | | promoted |
HackWatch | rows | by the texts: log odds compared with the reference's texts | | taken_up |
ValueLens | fraction | R2 of {r2_against}, linear probes, held out, n = {held_out} |
 short_sites slots | defined_r2 |
ValueLens | bars | correlation of the value head with {r2_against}, n = {head_n} | slots |
 correlation=head_correlation |
ValueLens | diverging | value by layer, first text, raw lens | short_sites slots | lens:first |
ValueLens | diverging | value by layer, first text, tuned lens | short_tuned_sites slots |
 lens_tuned:first |
ValueLens | table | R2 of both lenses as a forecast of the value | |
 layer=short_tuned_sites raw_lens=raw_r2 tuned_lens=tuned_r2 |
Direction | accuracy | accuracy of the direction, held out, n = {sequences[held]} (*: the text up to
 there is informative) | sites_and_bayes informed_slots | accuracies |
FrozenProbe | table | all sites | | sites=short_sites accuracy_frozen gap called shift cosine
 split_half moved_cosine accuracy_control size |
LogitShift | curves | shift of the logit difference | | shift=measured:mean | logits
LogitShift | bars | shift of logit({word} - {other}) by component | components | shift=shift:mean
 own_weights=own_weights:mean inherited_from_earlier_components=inherited:mean
 the_scale_of_the_norm=scale:mean unembedding=read_out:mean | logits
LogitShift | table | sum over components | | cause=causes logits=cause_sums |
WordsMoved | curves | probability that words won | | moved_mass | probability, summed over positions
WordsMoved | rows | words that moved together, n = {n} | | contrasts |
WordsMoved | bars | shift of {first} by component | components | shift=parts | logits
WordsMoved | rows | words by probability won, surest first (interval farthest from 0) | |
 word_table |
NeuronRank | bars | shift by neuron, n = {n} | neurons | contribution by_activation | logits
NeuronRank | table | neurons | | neurons contribution by_activation activation activation_shift
 write most_active_at=active |
NeuronRank | bars | shift by MLP | layers | its_neurons=neuron_contribution:sum1 b__out=b_out
 both=mlp | logits
WeightDelta | rows | the largest changes of weights | norm | rows |
"""
LAST_RECORDS = 20
REPETITION = {
    "distinct": "different n-grams",
    "repeated": "n-grams that their text has had before",
    "overlap": "n-grams that another text has",
}
AT_A_CELL = "accuracy accuracy_frozen accuracy_lda accuracy_ablated accuracy_erased "
AT_A_CELL += "accuracy_shuffled auc cosine_with_reference split_half_cosine positive_projection "
AT_A_CELL += "negative_projection"
# columns of a ledger, and their digits
LEDGER = dict.fromkeys("old_logprob logprob ratio advantage whitened return value kl".split(), 3)
LEDGER |= {"entropy": 3, "surrogate": 5, "value_loss": 5, "share": 5}
Pictures = Iterable[Drawn | None]


def _parse(line: str) -> PictureRow:
    probe, kind, title, labels, columns, unit = (part.strip() for part in line.split("|"))
    pairs = [word.partition("=") for word in columns.split()]
    spaced = lambda label: label.replace("_", " ").replace("  ", "_")
    by_label = {spaced(label): column or label for label, _, column in pairs}
    return PictureRow(probe, kind, title, labels.split(), by_label, unit)


PICTURE_ROWS = tuple(map(_parse, PICTURES.replace("\n ", " ").strip().splitlines()))


def _kl_map(records: Sequence[Snapshot]) -> Pictures:
    cols = max((at.get("slots") or () for at in records), key=len)
    title = f"KL from the reference, n = {records[-1]['sequences']['exact']}"
    phases = [f"phase {at['phase']}" for at in records]
    yield heatmap([at["kl"] for at in records], phases, cols, title, unit="nats per token")


def _repetition(records: Sequence[Snapshot]) -> Pictures:
    for name, title in REPETITION.items():
        series = {
            f"{label}, n = {n}": (f"{name}_{key}", i)
            for i, n in enumerate(records[-1]["orders"])
            for key, label in (("texts", "policy"), ("reference", "reference"))
        }
        yield curves_over(records, f"{name}-n: {title}", series, "fraction")
    by = ("alarms_by_logits", "alarms_by_texts")
    alarms = [at for at in records if any(map(at.get, by))]
    rows = [[at["phase"], *(", ".join(at[x]) or "–" for x in by)] for at in alarms]
    note = (
        "An alarm is a word that is twice as likely as in the reference, and "
        f"{records[-1]['alarm_z']:.4g} standard errors more."
    )
    columns = ["phase", "by the logits", "by the texts alone"]
    yield Table(columns, rows, "alarms", note) if rows else paragraph("No alarm.")


def _drift(records: Sequence[Snapshot]) -> Pictures:
    """Yield all fields at the most accurate cell of the first record, of equal ones the last."""
    first = records[0]
    cells = [(x, i, j) for i, row in enumerate(first["accuracy"]) for j, x in enumerate(row)]
    (_, i, j), counts = max(cells), first["sequences"]
    yield paragraph(
        f"At {short_site(first['sites'][i])}, {first.slots(j + 1)[j]}, the most accurate of "
        f"{len(cells)} cells in the first record; fitted to {counts['fitted']} sequences, "
        f"evaluated on {counts['held']} others."
    )
    columns = {name.replace("_", " "): (name, i, j) for name in AT_A_CELL.split()}
    rows = [[at["phase"], *(formatted(*at.read(x)) for x in columns.values())] for at in records]
    yield Table(["phase", *columns], rows, "at this cell")
    for label in ("accuracy", "cosine with reference") if len(records) > 1 else ():
        yield curves_over(records, f"{label} of the direction", {label: columns[label]})


def _frozen_curves(records: Sequence[Snapshot]) -> Pictures:
    """Yield the frozen and the refitted probe at the most accurate site of the first record."""
    first = records[0]
    pairs = zip(first["accuracy_frozen"], first["size"], strict=True)
    known = [x if size > 1e-3 else 0.0 for x, size in pairs]
    i = max(range(len(known)), key=known.__getitem__)
    counts, where = first["sequences"], first.get("slot") or f"position {first['position']}"
    yield paragraph(
        f"At {first['sites'][i]}, {where}, the most accurate of {len(known)} sites in the first "
        f"record; fitted to {counts['fitted']} sequences, counted on {counts['held']} others, of "
        f"which {first['positive']:.0%} are positive."
    )
    accuracies = {
        "frozen in phase 0": ("accuracy_frozen", i),
        "refitted": ("refitted", i),
        "shuffled labels": ("accuracy_control", i),
        "Bayes' rule": ("bayes_accuracy", 0),
    }
    yield curves_over(records, "accuracy of linear probes", accuracies)
    note = "With halves below 0.8, a turn of the direction cannot be distinguished from noise."
    cosines = {"of both directions": ("cosine", i), "of two halves": ("split_half", i)}
    yield curves_over(records, "cosine", cosines, note=note)


def _patterns(at: Snapshot) -> Pictures:
    chosen = sorted(range(len(at["heads"])), key=lambda i: -at["tv_here"][i])[:16]
    tv = at.tensors["tv"].flatten(0, 1)
    grids = {f"{at['heads'][i]}: {at['tv_here'][i]:.2f}": tv[i].tolist() for i in sorted(chosen)}
    title = f"phase {at['phase']}: half the mean difference of patterns, queries by keys"
    yield heatmaps(grids, at["queries"], at["keys"], title)


def _ledger(at: Snapshot) -> Pictures:
    """Yield every column of the tokens of the sequence that adds most to the objective."""
    tensors, share = at.tensors, at.tensors["share"]
    i = share.abs().sum(1).argmax().item()
    texts, rows = at["tokens"][i][at["prefix_len"] :], []
    for t in tensors["mask"][i].nonzero().flatten().tolist():
        cells = [f"{tensors[name][i, t] + 0.0:z.{n}f}" for name, n in LEDGER.items()]
        rows.append([texts[t].strip(), "yes" if tensors["clipped"][i, t] else "no", *cells])
    note = (
        f"Sequence {i} adds {share[i].sum():.6f}; all {int(tensors['mask'].sum())} tokens of the "
        f"minibatch together give the objective, {at['objective']:.6f}. A large advantage need "
        "not be a large gradient: a token of log-probability 0 cannot become more likely."
    )
    columns = ["token", "clip binds", *(name.replace("_", " ") for name in LEDGER)]
    yield Table(columns, rows, note=note)


def _singular_values(at: Snapshot) -> Pictures:
    rows = sorted(at["rows"], key=lambda row: -row["norm"])[:6]
    series = {row["name"]: (list(range(len(row["s"]))), row["s"]) for row in rows}
    title = f"phase {at['phase']}: singular values of the largest changes"
    yield curves(series, title, "direction, from 0", "singular value") if rows else None


OVER_PHASES = {"KLByPosition": _kl_map}
OVER_PHASES |= {"HackWatch": _repetition, "Direction": _drift, "FrozenProbe": _frozen_curves}
OF_RECORD = {"AttentionDrift": _patterns, "StepLedger": _ledger, "WeightDelta": _singular_values}
NO_WORDS = [paragraph("No word has moved beyond noise.")]
OF_RECORD["WordsMoved"] = lambda at: [] if at.get("contrasts") else NO_WORDS


def phase_pictures(kind: str | None, records: Sequence[Snapshot]) -> Iterator[Drawn]:
    """Yield the pictures that take all records, then a table of their plain numbers."""
    rows = [row for row in PICTURE_ROWS if row.probe == kind and row.kind == "curves" and records]
    pictures = [curves_over(records, row.title, row.columns, row.unit) for row in rows]
    pictures += OVER_PHASES[kind](records) if kind in OVER_PHASES and records else ()
    yield from filter(None, pictures)
    numbers = number_table(records)
    if not records or len(numbers.columns) > 1:
        yield numbers


def record_pictures(at: Snapshot) -> Iterator[Drawn]:
    kind = at.settings.get("kind")
    rows = [row for row in PICTURE_ROWS if row.probe == kind and row.kind != "curves"]
    yield from filter(None, (row.draw(at) for row in rows))
    yield from filter(None, OF_RECORD[kind](at) if kind in OF_RECORD else ())


def probe_pictures(run: Run, name: str) -> list[Drawn]:
    """Return the pictures of one probe: over phases, then of the last record.

    Raises:
        RunError: If no such probe recorded anything, or its records lack a field.
    """
    with reading(run.path / records_file(name)):
        kind, records = run.kinds().get(name), read_snapshots(run, name)
        last = [picture for at in records[-1:] for picture in record_pictures(at)]
        return [*phase_pictures(kind, records), *last]


def number_table(records: Sequence[Mapping[str, Any]]) -> Table | Html:
    """Return the plain numbers and words of the last records, with intervals in brackets."""
    if not records:
        return paragraph("It recorded nothing.")
    cut = f"The last {LAST_RECORDS} of {len(records)}." * (len(records) > LAST_RECORDS)
    return dict_table(records[-LAST_RECORDS:], note=cut)
