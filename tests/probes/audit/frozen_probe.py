"""Checks of FrozenProbe's record: readers fitted again, a row run anew, and texts written anew."""

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.functional.masks import at_least_float32
from rlhf_lab.models.hooked_transformer import HookPoint
from rlhf_lab.organism.rewards import grammatical, true_reward
from rlhf_lab.probes.frozen_probe import LEAST_SIZE
from rlhf_lab.probes.probe import Check, Observation, Record
from rlhf_lab.sampling import draw_token, sampling_noise
from rlhf_lab.sampling_spec import SamplingSpec
from tests.probes.audit.anew import as_float64, as_rows_say, gap, rounding
from tests.probes.audit.direction import Reader, fit_reader, larger_class, missed_right
from tests.probes.audit.intervals import check_widths

SITE_ERRORS = 3.5
FOUR_DECIMALS = 6e-5
"""What rounding to four decimals, as the intervals are stored, may change."""
SCORES = ("true_reward", "grammatical", "surprise")
ANEW = 2
"""Texts that are written anew."""


def bind_frozen_probe(seen: Observation, record: Record) -> list[Check]:
    """Hold the readers to fits of their own, a projection to a forward, and steering to a loop."""
    checks = _readers(seen, record)
    if as_rows_say(seen):
        checks.append(_projection(seen, record))
    if "bayes_accuracy" in record.values:
        checks.append(_bayes_of_prefixes(seen, record))
    if "steered_at" in record.values:
        checks += _means(record)
        if as_rows_say(seen):
            checks.append(_texts(seen, record))
    return checks


def _readers(seen: Observation, record: Record) -> list[Check]:
    """Both readers at every site by the normal equations, and what follows from them."""
    values, labels = record.values, seen.text.labels.cpu().numpy()
    cut, held = 2 * len(labels) // 3, labels[2 * len(labels) // 3 :]
    stored = {name: as_float64(record.tensors[name]).numpy() for name in ("d0", "threshold")}
    shuffled = record.tensors["control_labels"].cpu().numpy() > 0.5
    misses: dict[str, float] = {}
    columns: dict[str, list] = {"accuracy_frozen": [], "gap": [], "called": [], "shift": []}

    def miss(name: str, found: float) -> None:
        misses[name] = max(misses.get(name, 0.0), found) if found == found else found

    for i, site in enumerate(values["sites"]):
        x, first = (as_float64(acts[site]).numpy() for acts in (seen.acts, seen.reference_acts))
        frozen, refit = (fit_reader(acts[:cut], labels[:cut], "mean") for acts in (first, x))
        means = [first[:cut][labels[:cut] == side].mean(0) for side in (True, False)]
        scale = max(1.0, float(np.abs(first).max()))
        miss("size", abs(values["size"][i] - np.linalg.norm(means[0] - means[1])) / scale)
        if np.linalg.norm(means[0] - means[1]) < LEAST_SIZE:
            columns = {name: [*rows, None] for name, rows in columns.items()}
            continue  # where the token is always the same, rounding chooses the direction
        miss("d0", 1 - float(stored["d0"][i] @ frozen.direction))
        miss("threshold", abs(stored["threshold"][i] - frozen.threshold) / scale)
        moved = (x - first)[cut:]
        called, anew = (_calls(reader, x[cut:]) for reader in (frozen, refit))
        columns["accuracy_frozen"].append((called == held).astype(float))
        columns["gap"].append((called == held).astype(float) - (anew == held))
        columns["called"].append(called.astype(float))
        columns["shift"].append(moved @ frozen.direction)
        mean = moved.mean(0)
        if (size := np.linalg.norm(mean)) > 1e-4:
            miss("moved_cosine", abs(values["moved_cosine"][i] - mean @ frozen.direction / size))
        rows = [np.flatnonzero(labels[:cut] == side) for side in (True, False)]
        halves = [np.concatenate([of_class[half::2] for of_class in rows]) for half in (0, 1)]
        halves = [fit_reader(x[some], labels[some], "mean") for some in halves]
        miss("split_half", abs(values["split_half"][i] - halves[0].direction @ halves[1].direction))
        cosine = float(frozen.direction @ refit.direction)
        miss("cosine", abs(values["cosine"][i] - cosine))
        if "cosine_low" in values:
            ends = values["cosine_low"][i], values["cosine_high"][i]
            miss("cosine's interval", max(0.0, ends[0] - cosine - 0.05, cosine - ends[1] - 0.05))
        few = max(8, min(cut // 4, 4 * x.shape[1]))
        control = fit_reader(x[:few], shuffled[:few], "mean")
        found = missed_right(values["accuracy_control"][i], control, x[cut:], shuffled[cut:])
        miss("accuracy_control", found)
    checks = []
    near = 1.5 / len(held)  # one sequence may lie on a threshold
    there = [i for i, rows in enumerate(columns["gap"]) if rows is not None]
    columns = {name: [rows[i] for i in there] for name, rows in columns.items()}
    for name, rows in columns.items():
        column = np.array(rows).T
        slack = 1e-3 * max(1.0, np.abs(column).max()) if name == "shift" else near
        miss_of = gap([values[name][i] for i in there], column.mean(0))
        checks.append(Check.at_most(f"{name} is that of other fits", miss_of, slack))
    if "gap_low" in values:
        low, high = (
            [values[f"{name}_{end}"][i] for name in columns for i in there]
            for end in ("low", "high")
        )
        every = np.concatenate([np.array(rows).T for rows in columns.values()], 1)
        real: Bool[np.ndarray, "n col"] = np.ones_like(every, dtype=bool)
        checks.append(check_widths("readers", (low, high), every, real, FOUR_DECIMALS))
    for name, found in misses.items():
        checks.append(Check.at_most(f"{name} is that of other fits", found, 1e-3))
    reshuffled = int(shuffled.sum() != labels.sum() or (shuffled == labels).all())
    checks.append(Check.at_most("control labels are the labels in another order", reshuffled, 0))
    allowed = SITE_ERRORS * (0.25 / len(held)) ** 0.5
    best = max(0.0, max(values["accuracy_control"]) - larger_class(labels))
    checks.append(Check.at_most("no reader reads shuffled labels", best, allowed))
    return checks


def _calls(reader: Reader, x: Float[np.ndarray, "n d_model"]) -> Bool[np.ndarray, " n"]:
    return x @ reader.direction > reader.threshold


def _projection(seen: Observation, record: Record) -> Check:
    """One held-out sequence, run alone: its projection on the stored d0 at a stored site."""
    drawn, values = np.random.default_rng(seen.ctx.phase), record.values
    cut, sites = values["sequences"]["fitted"], values["sites"]
    row, i = int(drawn.integers(values["sequences"]["held"])), int(drawn.integers(len(sites)))
    tokens = seen.text.tokens[cut + row][None]
    kept: list[Tensor] = []

    def keep(act: Tensor, hook: HookPoint) -> None:
        kept.append(act)

    with seen.ctx.policy.base_model.hooks(
        fwd_hooks=[(sites[i], lambda act, hook: kept.append(act))]
    ):
        seen.ctx.policy(tokens)
    there = as_float64(kept[0])[0, values["position"]]
    found = float(there @ as_float64(record.tensors["d0"][i]))
    miss = abs(record.tensors["projection"][i][row].item() - found) / max(1.0, abs(found))
    return Check.at_most("a projection is that of a fresh forward", miss, 10 * rounding(seen))


def _bayes_of_prefixes(seen: Observation, record: Record) -> Check:
    """Bayes' rule from prefixes that end at the stored position, at the slot of the stored name."""
    values, tokens = record.values, seen.text.tokens[-record.values["sequences"]["held"] :]
    pos, labels = values["position"], seen.text.labels[-len(tokens) :].cpu()
    belief, _ = seen.truth.beliefs(tokens[:, : pos + 1])
    right = ((belief[:, -1].cpu() > 0.5) == labels).double().mean().item()
    other = seen.truth.grammar.slots[pos].name != values["slot"].split(" ")[0]
    miss = abs(values["bayes_accuracy"][0] - right) + other
    return Check.at_most("Bayes' accuracy is that of the prefixes", miss, 1e-4)


def _means(record: Record) -> list[Check]:
    """What is stored of the arms, against what their texts earned."""
    checks = []
    for name in [kind + arms for kind in SCORES for arms in ("", "_random")]:
        rows = as_float64(record.tensors[name])
        rows = rows.mean(1) if name.endswith("random") else rows
        found = record.values[name]
        checks.append(Check.at_most(f"{name} is its texts'", gap(found, rows.mean(-1)), 1e-4))
        if f"{name}_low" in record.values:
            ends = record.values[f"{name}_low"], record.values[f"{name}_high"]
            real = np.ones(rows.T.shape, dtype=bool)
            checks.append(check_widths(name, ends, rows.T.numpy(), real, FOUR_DECIMALS))
    return checks


def _texts(seen: Observation, record: Record) -> Check:
    """Continuations of an arm of each kind, held to `_written_anew`."""
    drawn, values, tensors = np.random.default_rng(seen.ctx.phase), record.values, record.tensors
    i = values["sites"].index(values["steered_at"])
    arm = int(drawn.integers(1, len(values["alphas"])))
    vector = values["alphas"][arm] * values["size"][i] * tensors["d0"][i]
    stored = [tensors[name][arm] for name in SCORES]
    miss = _written_anew(seen, record, vector, stored)
    arm = int(drawn.integers(len(values["random_alphas"])))
    k = int(drawn.integers(len(tensors["random"])))
    axis = tensors["random"][k] / tensors["random"][k].norm()
    vector = values["random_alphas"][arm] * values["size"][i] * axis
    stored = [tensors[f"{name}_random"][arm, k] for name in SCORES]
    miss = max(miss, _written_anew(seen, record, vector, stored))
    return Check.at_most("steered texts are written anew", miss, 20 * rounding(seen))


@torch.no_grad()
def _written_anew(
    seen: Observation, record: Record, vector: Float[Tensor, " d_model"], stored: list[Tensor]
) -> float:
    """By how much what some prefixes' continuations earn misses what is stored.

    They are written without a cache, with the vector at its place in every forward.
    """
    values = record.values
    site, pos, cut = values["steered_at"], values["position"], values["sequences"]["fitted"]
    n, left = len(stored[0]), max(1, seen.text.tokens.shape[1] - pos - 1)
    tokens = seen.text.tokens[cut : cut + n, : pos + 1][:ANEW]
    noise = sampling_noise(n, left, torch.Generator().manual_seed(1))[:, :ANEW].to(tokens.device)
    spec = SamplingSpec(left, seen.args.temperature, seen.args.top_k, seen.args.top_p)
    model, surprise = seen.ctx.policy.base_model, torch.zeros(len(tokens), device=tokens.device)

    def add(act: Tensor, hook: HookPoint) -> Tensor:
        act = act.clone()
        act[:, pos] += vector.to(act)
        return act

    for step in noise:
        with model.hooks(fwd_hooks=[(site, add)]):
            logits = at_least_float32(model(tokens)[:, -1])
        kept, ids = spec.candidates(logits)  # in whose order the noise is read
        place = draw_token(kept.log_softmax(-1), step)[:, None].clamp(max=kept.shape[-1] - 1)
        surprise -= kept.log_softmax(-1).gather(-1, place)[:, 0]
        tokens = torch.cat([tokens, place if ids is None else ids.gather(-1, place)], 1)
    texts = model.tokenizer.batch_decode(tokens, skip_special_tokens=True)
    found = true_reward(texts), grammatical(texts).float(), surprise
    return max(gap(s[:ANEW], f) for s, f in zip(stored, found, strict=True))
