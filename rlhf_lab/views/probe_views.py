"""Pictures of the built-in probes: per probe, the fields that go to each picture."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from rlhf_lab.views import probe_drawings as drawings
from rlhf_lab.views.declared import (
    BarsOf,
    Calls,
    CurvesOf,
    CurvesOver,
    MatrixOf,
    MatrixOver,
    Note,
    StripOf,
    TableOf,
    TableOver,
)
from rlhf_lab.views.intervals import HOW
from rlhf_lab.views.probe_drawings import MOST_POSITIONS, NATS, tensor


def slots(at: Any) -> list[str]:
    """Return the names of the slots, or the positions."""
    return at.get("slots") or [str(i) for i in range(len(at["kl"]))]


def root(field: str) -> Any:
    """Return a field: the square root of another."""
    return lambda at: None if at.get(field) is None else [x**0.5 for x in at[field]]


def interval_columns(name: str) -> tuple[Any, Any, Any]:
    """Return a column: the three columns of a tensor."""
    return tensor(name, ..., 0), tensor(name, ..., 1), tensor(name, ..., 2)


def named_terms(at: Any) -> list[str]:
    """Return the terms of the objective as labels."""
    return [term.replace("_", " ") for term in at["terms"]]


def strips(*fields: str) -> tuple[StripOf, ...]:
    """Return a strip per field of a few samples, each exact one after its estimate."""
    return tuple(
        StripOf(
            field.replace("true_", "exact ").replace("_", " "),
            field,
            mask="truth_mask" if field.startswith("true_") else "mask",
            kind="sequential" if field in ("kl", "entropy", "true_value") else "diverging",
        )
        for field in fields
    )


VIEWS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "RunHealth": (
            CurvesOver(
                "reward",
                "mean_reward; true_reward; exact optimum at beta_eff: optimal_reward",
                "reward",
            ),
            CurvesOver(
                "KL from the reference",
                "kl_per_sequence; exact optimum at beta_eff: optimal_kl_per_sequence",
                "nats per sequence",
            ),
            CurvesOver("beta_eff: reward per nat of KL", "beta_eff", "raw reward per nat"),
            CurvesOver("spread", "reward_std; advantage_std", "standard deviation"),
            CurvesOver("learning", "explained_variance; clip_fraction", "fraction"),
            CurvesOver("entropy", "entropy_per_token", NATS),
            CurvesOver("norm of the gradient", "grad_norm", "objective per unit of weight"),
            CurvesOver("before the first step, furthest from 1", "ratio_first_minibatch", "ratio"),
            Calls(drawings.optimum_note, True),
            Note(
                "<p>Bands: 95 %, bootstrap over the {sequences} sequences of each phase.</p>", True
            ),
        ),
        "KLByPosition": (
            MatrixOver("KL from the reference, n = {sequences[exact]}", "kl", "slots", NATS),
            BarsOf(
                "exact KL and its estimators",
                slots,
                "exact, n = {sequences[exact]}: kl; k1: k1_mean k1_low k1_high; "
                "k2: k2_mean k2_low k2_high; k3: k3_mean k3_low k3_high",
                NATS,
                top=MOST_POSITIONS,
                note=(
                    "Whiskers: 95 %, bootstrap over the {sequences[exact]} sequences; the "
                    "estimators have the first {sequences[estimated]} of them."
                ),
            ),
            BarsOf(
                "standard deviation of the estimators",
                slots,
                {k: root(f"{k}_var") for k in ("k1", "k2", "k3")},
                NATS,
                top=MOST_POSITIONS,
            ),
            BarsOf(
                "information of a position about the reward",
                slots,
                "I_t: information",
                "reward squared",
                top=MOST_POSITIONS,
                note=(
                    "The mean square of the step that a token makes in the exact value, in "
                    "units of the reward squared; the sum is the variance of the reward."
                ),
            ),
            BarsOf("sequences with a token", slots, "sequences: tokens_at", top=MOST_POSITIONS),
        ),
        "AttentionDrift": (
            BarsOf(
                "change of the shift by head and cause, n = {n}",
                "heads",
                "pattern (QK): qk; values (OV): ov; W_O: wo",
                "logits",
                top=16,
            ),
            BarsOf(
                "total variation of the pattern at {query}",
                "heads",
                "total variation: tv_here",
                top=16,
            ),
            Calls(drawings.head_patterns),
        ),
        "ComponentTransplant": (
            BarsOf(
                "reward by component, {gain:+.3f} in all, n = {n}",
                "groups",
                {
                    "patched in": interval_columns("put_in"),
                    "patched out": interval_columns("taken_out"),
                    "Shapley": interval_columns("shapley"),
                },
                "reward",
            ),
        ),
        "GradTerms": (
            BarsOf(
                "norm of each term's gradient, step {step} of {steps}",
                "groups",
                lambda at: dict(zip(named_terms(at), at["norms"], strict=True)),
            ),
            MatrixOf(
                "cosines of the terms' whole gradients",
                tensor("cosines", ..., -1),
                named_terms,
                named_terms,
                kind="diverging",
                limits=(-1.0, 1.0),
            ),
            Calls(drawings.gradient_curves, True),
        ),
        "StepInfluence": (
            TableOver("effect of each recorded step", drawings.influence_columns),
            StripOf(
                "what each token did to the {target}",
                lambda at: at.tensors["rows"].sum(0),
                unit="moved",
                is_ordered=True,
                note=(
                    "The samples that moved it most; a row is a fraction of the step at the "
                    "actual denominator of Adam."
                ),
            ),
            MatrixOf(
                "change of the {target} by component and by the token's slot",
                lambda at: at.tensors["rows"].sum(1),
                "groups",
                "slots",
                kind="diverging",
            ),
            Note("<p>{note}</p>"),
        ),
        "StepLedger": (
            Calls(drawings.step_rows, True),
            StripOf(
                "step {step} of {steps}: what each token adds to the objective",
                "share",
                unit="share",
                is_ordered=True,
            ),
            Calls(drawings.heaviest_sequence),
        ),
        "TextHeatmap": (
            Note(
                "<p>Values and advantages are in the units that training uses; exact ones "
                "in those of the reward.</p>",
                True,
            ),
            *strips(
                *("advantage", "true_advantage", "value", "true_value", "return"),
                *("kl", "log_ratio", "entropy"),
            ),
            BarsOf(
                "rewards of the stored samples",
                lambda at: [f"text {i}" for i in range(len(at["rewards"]))],
                "reward: rewards",
            ),
        ),
        "HackWatch": (
            CurvesOver(
                "reward, true reward, and the fraction that is grammatical",
                "reward; true_reward; grammatical",
                "",
            ),
            CurvesOver("reward minus true reward", "gap", "reward"),
            CurvesOver(
                "spread of the rewards", "standard deviation: reward_std; saturated_below", ""
            ),
            drawings.repetition("distinct", "distinct-n: different n-grams"),
            drawings.repetition("repeated", "repeated-n: n-grams that their text has had before"),
            drawings.repetition("overlap", "overlap-n: n-grams that another text has"),
            Note(
                "<p>Bands: "
                + HOW
                + ", n = {n} texts of each phase and as many of the reference.</p>"
            ),
            Calls(drawings.alarms, True),
            Calls(drawings.moved_words),
        ),
        "KLAttribution": (
            BarsOf(
                "{kl:.3g} nats per sequence, through which output, n = {n}",
                "components",
                "output",
                "nats",
            ),
            BarsOf(
                "{kl:.3g} nats per sequence, by whose weights, n = {n}",
                "groups",
                "weights",
                "nats",
                note=(
                    "A component's output includes what earlier components sent it; its "
                    "weights include their effect through later components."
                ),
            ),
            MatrixOf(
                "KL through outputs, by the next token",
                "by_position",
                "components",
                "slots",
                "nats",
                kind="diverging",
            ),
        ),
        "ValueLens": (
            MatrixOf(
                "R2 of {r2_against}, linear probes, held out, n = {n}",
                drawings.defined_r2,
                drawings.sites,
                "slots",
                limits=(0.0, 1.0),
            ),
            drawings.best("r2", drawings.defined_r2, drawings.sites),
            BarsOf(
                "correlation of the value head with {r2_against}, n = {head_n}",
                "slots",
                "correlation: head_correlation",
                top=MOST_POSITIONS,
            ),
            MatrixOf(
                "value by layer, sequence 1, raw lens",
                drawings.first_lens("lens"),
                drawings.sites,
                "slots",
                kind="diverging",
            ),
            MatrixOf(
                "value by layer, sequence 1, tuned lens",
                drawings.first_lens("lens_tuned"),
                lambda at: drawings.sites(at, "tuned_sites"),
                "slots",
                kind="diverging",
            ),
            TableOf(
                "R2 of both lenses as a forecast of the value, n = {lens_held_out}",
                {
                    "layer": lambda at: drawings.sites(at, "tuned_sites"),
                    "raw lens": "raw_r2",
                    "tuned lens": "tuned_r2",
                },
            ),
            Calls(drawings.prefix_values),
            Calls(drawings.penalties),
        ),
        "ValueAttribution": (
            MatrixOf(
                "standard deviation of each component's part of the value",
                lambda at: list(map(list, zip(*at["sd"], strict=True))),
                "components",
                drawings.counted_slots,
            ),
            Calls(drawings.widest_slot),
        ),
        "Direction": (
            MatrixOf(
                "accuracy of the direction, held out, n = {n}",
                drawings.accuracies,
                drawings.accuracy_rows,
                drawings.marked_slots,
                note="Stars: the text up to there is informative about the label.",
                limits=(0.5, 1.0),
            ),
            drawings.best("accuracy", lambda at: at["accuracy"], drawings.sites),
            Calls(drawings.drift, True),
        ),
        "FrozenProbe": (
            Calls(drawings.frozen_curves, True),
            TableOf(
                "all sites",
                "site: sites; accuracy_frozen; gap; called; shift; cosine; "
                "floor of the cosine: split_half; cosine of the movement: moved_cosine; "
                "shuffled labels: accuracy_control; classes apart: size",
                note=(
                    "Below a floor of 0.8, a change of the axis cannot be distinguished from noise."
                ),
            ),
            Calls(drawings.steered),
        ),
        "LogitShift": (
            Calls(drawings.shift_bars),
            Calls(drawings.shift_causes),
            TableOf(
                "logit difference by component",
                {
                    "component": "components",
                    "reference": drawings.row_ends("reference"),
                    "policy": drawings.row_ends("policy", "reference", "shift"),
                    "shift": drawings.row_ends("shift"),
                },
                order="shift",
                note="Brackets: " + HOW + ".",
            ),
            Calls(drawings.shift_notes, True),
        ),
        "NeuronRank": (
            BarsOf(
                "shift by neuron, n = {n}",
                "neurons",
                "contribution; by_activation",
                "logits",
                note="Whiskers: " + HOW + ".",
            ),
            BarsOf(
                "shift by group of neurons",
                lambda at: [
                    f"{g} ({n})" for g, n in zip(at["groups"], at["group_size"], strict=True)
                ],
                "contribution: group_contribution",
            ),
            BarsOf(
                "shift by MLP",
                lambda at: [f"L{i} mlp" for i in range(len(at["mlp"]))],
                {
                    "its neurons": lambda at: at.tensors["neuron_contribution"].sum(1),
                    "b_out": "b_out",
                    "both": "mlp",
                },
            ),
            TableOf("neurons", drawings.neuron_columns),
            Calls(drawings.neuron_note),
        ),
        "WeightDelta": (
            TableOf(
                "the largest changes of weights",
                drawings.delta_columns,
                order="rows.norm",
                top=16,
            ),
            CurvesOf(
                "singular values of the largest changes",
                drawings.delta_spectra,
                "singular value",
                x_label="direction, from 0",
            ),
            CurvesOver("distance of the weights from the reference", "total_norm", ""),
        ),
        "WordsMoved": (
            CurvesOver("probability that words won per text", "moved_mass", "probability"),
            TableOf(
                "words that moved together, n = {n}",
                "contrasts.words; contrasts.at; "
                "mass: contrasts.mass contrasts.mass_low contrasts.mass_high; contrasts.fraction; "
                "shift: contrasts.shift contrasts.shift_low contrasts.shift_high; "
                "contrasts.component; part: contrasts.part contrasts.part_low contrasts.part_high",
                note="Mass: probability per text. Shift and part: logits at the first slot.",
            ),
            BarsOf("shift of {first} by component", "components", "parts", "logits", top=16),
            TableOf(
                "words by probability won",
                "word_table.word; won: word_table.won word_table.won_low word_table.won_high",
            ),
        ),
    }
)
