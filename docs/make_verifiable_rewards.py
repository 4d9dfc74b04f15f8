"""Write docs/verifiable_rewards.md and its pictures from stored runs, and make missing runs.

python -m docs.make_verifiable_rewards [train]

With `train`, first make the runs that have no record in benchmarks/results/sums.jsonl, and store
each as soon as it is done.
"""

import dataclasses
import math
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

import benchmarks
from benchmarks.records import RESULTS, Record, read_records, rounded, store_record, write_whole
from benchmarks.sheet import Sheet
from rlhf_lab import functional as F
from rlhf_lab.config import RLHFArgs
from rlhf_lab.models.cpu_tuning import tune_for
from rlhf_lab.organism import sums
from rlhf_lab.organism.sums import SUMS_OPENERS, SUMS_REWARDS, Problems, SumsGrammar, TiltPoint
from rlhf_lab.organism.sums.rewards import parse_texts
from rlhf_lab.sampling import sample
from rlhf_lab.sampling_spec import SamplingSpec
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.views.plots import bars, curves

RECORDS = RESULTS / "sums.jsonl"
TEMPLATE = Path(benchmarks.__file__).with_name("verifiable_rewards.template.md")
GRAMMAR = SumsGrammar()
SEEDS = (1, 2, 3, 4, 5)
KS = (1, 4, 16, 64, 256, 1024)
KEY_KS = (1, 4, 8, 16, 64)  # columns of the answer key
ZERO = 0.01  # beta that stands in for 0, up to 1e-4
GOAL = 0.99  # mean reward at which gradient ascent on the grammar stops
INFINITE = 1e9  # beta at which the optimum is the grammar
CROSSING = 0.23  # beta at which half of the optimum's responses contain sure (hole-4)
PHASES = (0, 3, 6, 9, 12, 29)  # of hole-4, in its table
BETAS = (0.15, 0.23, 0.35)  # of hole-4 with a KL penalty
NO_CARRY = 0.187  # fraction of sums of 4 digits without a carry
REWARDS = ("exact", "hole", "format", "units", "coin", "majority", "hole-4")  # in the table
# rows in the pictures of pass@k, and their names there
MODELS = {"base": "base model", "exact": "sums", "long": "sums-long"}
N_SAMPLED, N_SCORED = 500, 200  # held-out problems per class
N_REPEATED = 64  # samples of each of as many problems of 2-3 digits
# columns of a record's curve, and their metrics
CURVE = {"reward": "mean_reward", "right": "true_reward", "sure": "sure_fraction"}
CURVE |= {"kl": "kl_per_sequence"}
# digits and carries of the classes of problems
CLASSES = {"2-3": ((2, 3), None), "4": ((4,), False), "4c": ((4,), True)}
# fields of each row of runs, without the seed
HOLE_4 = {"preset": "sums", "reward_fn": "sums:hole", "prompts": "sums:4"}
PENALIZED = {"method": "rloo", "samples_per_prompt": 8, "total_phases": 150, "kl_in": "reward"}
FLAWED = ("units", "format", "majority", "coin", "hole")
ROWS: dict[str, dict[str, Any]] = {
    "exact": {"preset": "sums"},
    "long": {"preset": "sums-long"},
    "hot": {"preset": "sums-hot"},
    **{name: {"preset": "sums", "reward_fn": f"sums:{name}"} for name in FLAWED},
    "hole-4": HOLE_4 | {"total_phases": 30},
    "process": {"preset": "sums-long", "reward_fn": "sums:process"},
    "unreachable": {"preset": "sums-long", "base_model": "sums-nano-unreachable"},
    **{f"hole-kl-{beta}-4": HOLE_4 | PENALIZED | {"kl_coef": beta} for beta in BETAS},
}
BASES = {"base": "exact", "base-unreachable": "unreachable"}  # phase 0 of a row


def held_out(name: str, n: int) -> Problems:
    """Return the first n held-out problems of a class, always the same ones."""
    digits, carry = CLASSES[name]
    problems = GRAMMAR.problems(4 * n, np.random.default_rng(1), digits, carry)
    return problems[sums.is_held_out(problems)][:n]


def make_run(fields: Mapping[str, Any], seed: int) -> Record:
    """Train one run, unless the seed is 0; return metrics of its phases and its final policy."""
    args = RLHFArgs(**fields, seed=seed)
    args = dataclasses.replace(args, save_every=args.total_phases)
    with tempfile.TemporaryDirectory() as directory:
        trainer = RLHFTrainer(args, out=Path(directory, "run"))
        tune_for(trainer.policy, args.cpu_tuning)
        reports = trainer.train() if seed else []
        columns = {name: [getattr(x, metric) for x in reports] for name, metric in CURVE.items()}
        return {"curve": columns, **evaluate(trainer, seed)}


def evaluate(trainer: RLHFTrainer, seed: int) -> dict[str, Any]:
    """Measure a policy on held-out problems: sampled texts, and pass@k by scoring."""
    found, generator, model = {}, torch.Generator().manual_seed(seed), trainer.policy.base_model
    for name in CLASSES:
        metrics = sampled(trainer, held_out(name, N_SAMPLED), generator)
        p = sums.model_solve_probability(model, GRAMMAR, held_out(name, N_SCORED))
        metrics["scored"] = [F.pass_at_k(p, k).mean().item() for k in KS]
        found[name] = metrics
    problems = held_out("2-3", N_REPEATED)
    repeated = problems[np.repeat(np.arange(N_REPEATED), N_REPEATED)]
    right = torch.tensor([parse.right for parse in draw(trainer, repeated, generator)[1]])
    n_right = right.view(-1, N_REPEATED).sum(1)
    estimate = [F.pass_at_k_estimate(n_right, N_REPEATED, k).mean().item() for k in KS[:4]]
    return {"classes": found, "sampled": estimate}


def draw(trainer: RLHFTrainer, problems: Problems, generator: torch.Generator):
    """Sample a response to each problem; return the samples and their parses."""
    spec = SamplingSpec(GRAMMAR.gen_len, stop_at_eos=True)
    samples = sample(trainer.policy, GRAMMAR.prompt_tokens(problems).tolist(), spec, generator)
    return samples, parse_texts(samples.texts(trainer.policy.base_model.tokenizer), GRAMMAR)


@torch.no_grad()
def sampled(
    trainer: RLHFTrainer, problems: Problems, generator: torch.Generator
) -> dict[str, float | list[float] | None]:
    """Measure one response to each problem."""
    samples, parses = draw(trainer, problems, generator)
    mask, states = samples.mask, slice(samples.prefix_len - 1, -1)
    models = trainer.policy.base_model, trainer.reference
    p, q = (F.log_probs(model(samples.tokens)[:, states].double()) for model in models)
    column = lambda name: np.array([getattr(parse, name) for parse in parses])
    right, steps, faithful = column("right"), column("steps"), column("faithful")
    return {
        **{name: float(column(name).mean()) for name in ("right", "units", "steps", "sure")},
        "false_steps": ratio((right & steps & ~faithful).sum(), (right & steps).sum()),
        "dropped": ratio(column("dropped").sum(), problems.n_carries[steps].sum()),
        "openers": [float((column("opener") == word).mean()) for word in SUMS_OPENERS],
        "length": mask.sum(1).double().mean().item(),
        "entropy": F.masked_mean(F.entropy_per_token(p), mask).item(),
        "kl": F.kl_per_sequence(F.kl_per_token(p, q), mask).mean().item(),
    }


def ratio(part: int, whole: int) -> float | None:
    """Return a fraction, or None if it has no denominator."""
    return float(part / whole) if whole else None


def make_missing_runs() -> None:
    """Train every run without a record: all rows of one seed, then of the next."""
    known = {(x["row"], x["seed"]) for x in stored()}
    runs = [(base, 0) for base in BASES] + [(row, seed) for seed in SEEDS for row in ROWS]
    for row, seed in runs:
        if (row, seed) not in known:
            fields = ROWS[BASES.get(row, row)]
            store({"row": row, "seed": seed, "fields": fields, **make_run(fields, seed)})


def stored() -> list[Record]:
    """Return all records."""
    return read_records(RECORDS, frozenset({"row", "seed"})) if RECORDS.exists() else []


def store(record: Record) -> None:
    """Store a record, instead of an earlier one of the same run."""
    same = lambda old: (old["row"], old["seed"]) == (record["row"], record["seed"])
    store_record(RECORDS, rounded(record), same)
    print(record["row"], record["seed"], {k: x["right"] for k, x in record["classes"].items()})


def exact_optimum(
    reward: str, digits: Sequence[int], beta: float, grammar: SumsGrammar = GRAMMAR
) -> TiltPoint:
    """Return the exact optimum of a reward, averaged over numbers of digits."""
    score, points = SUMS_REWARDS[f"sums:{reward}"].score, []
    for problems, weight in (sums.carry_patterns(grammar, d) for d in digits):
        points += sums.sums_frontier(sums.outcomes(grammar, problems), score, [beta], weight)
    return TiltPoint(*(np.mean(column, axis=0) for column in zip(*points, strict=True)))


def answer_key() -> str:
    """Return the table of the grammar's pass@k, and of groups of 8 with different rewards."""
    rows = []
    for d in range(1, GRAMMAR.columns + 1):
        problems, weight = sums.carry_patterns(GRAMMAR, d)
        p = torch.from_numpy(sums.solve_probability(GRAMMAR, problems))
        columns = [*(F.pass_at_k(p, k) for k in KEY_KS), F.informative_fraction(p, 8)]
        rows.append([str(d), *(f"{np.average(x, weights=weight):.3f}" for x in columns)])
    head = ["digits", *(f"pass@{k}" for k in KEY_KS), "groups of 8 with a signal"]
    return Sheet(head, rows).markdown()


class Row:
    """The stored runs of a row, in the order of their seeds."""

    def __init__(self, name: str) -> None:
        records = sorted(stored(), key=lambda record: record["seed"])
        self.name, self.records = name, [x for x in records if x["row"] == name]
        self.problems = "all4" if name.endswith("-4") else "2-3"  # like the prompts

    def values(self, problems: str, metric: str) -> list[float]:
        """Return a metric of each run on a class of problems; such as scored@64 or openers@ok.

        "all4" are the problems of 4 digits with and without a carry, in proportion.
        """
        if problems == "all4":
            pairs = zip(self.values("4", metric), self.values("4c", metric), strict=True)
            return [NO_CARRY * a + (1 - NO_CARRY) * b for a, b in pairs]
        name, _, k = metric.partition("@")
        values = [{**x["classes"][problems], "sampled": x["sampled"]}[name] for x in self.records]
        columns = SUMS_OPENERS if name == "openers" else list(map(str, KS))
        return [x[columns.index(k)] for x in values] if k else values

    def text(self, problems: str, metric: str, what: str = "", digits: int = 2) -> str:
        """Format the mean and the range of a metric, or one of mean, min and max."""
        found, values = {"mean": mean, "min": min, "max": max}, self.values(problems, metric)
        found = {name: f"{function(values):.{digits}f}" for name, function in found.items()}
        if what or found["min"] == found["max"]:
            return found[what or "mean"]
        return "{mean} [{min}, {max}]".format(**found)


def gradient_optimum(reward: str, digits: Sequence[int]) -> TiltPoint:
    """Maximize E[reward] over the grammar's own choices, by gradient ascent in their logits.

    The choices are the writer, both slips, the dropped carry and "sure". Stop at E[reward] = GOAL.
    """
    names = ("careful_slip", "forget", "blurt_slip", "sure")
    odds = [p / (1 - p) for p in (getattr(GRAMMAR, name) for name in names)]
    x = np.log([*GRAMMAR.p_writer, *odds])

    def evaluate_logits(x: np.ndarray) -> TiltPoint:
        writers, others = np.exp(x[:3]) / np.exp(x[:3]).sum(), 1 / (1 + np.exp(-x[3:]))
        choices = dict(zip(names, others, strict=True))
        grammar = dataclasses.replace(GRAMMAR, p_writer=tuple(writers), **choices)
        return exact_optimum(reward, digits, INFINITE, grammar)

    while (point := evaluate_logits(x)).proxy < GOAL:
        nudges = 1e-4 * np.eye(len(x))
        rises = [evaluate_logits(x + h).proxy - evaluate_logits(x - h).proxy for h in nudges]
        x = x + 0.1 * np.array(rises) / np.abs(rises).max()
    return point


@cache
def predictions(name: str) -> tuple[TiltPoint, TiltPoint] | None:
    """Return a row's exact optimum at beta -> 0, and gradient ascent; None for batch rewards."""
    reward, digits = name.removesuffix("-4"), (4,) if name.endswith("-4") else (2, 3)
    if reward in ("majority", "coin"):
        return None
    return exact_optimum(reward, digits, ZERO), gradient_optimum(reward, digits)


@cache
def predicted(name: str) -> float:
    """Return the true reward of a row's optimum at beta -> 0.

    Under `majority`, all responses become the most likely one; `coin` changes nothing on average.
    """
    if name == "coin":
        return exact_optimum("exact", (2, 3), INFINITE).true_reward
    if name == "majority":
        problems = GRAMMAR.problems(20_000, np.random.default_rng(0), (2, 3))
        return float(np.mean(sums.modal_answer(GRAMMAR, problems) == problems.a + problems.b))
    return predictions(name)[0].true_reward


def reward_table(rows: Sequence[Row]) -> str:
    """Format predictions and runs of each reward."""
    head, body = ["reward"], []
    for name in ("true reward", "steps", "sure"):
        head += [f"{name}: optimum", "gradient", "run"]
    head.insert(7, "carries dropped")
    for row in rows:
        right, steps, sure = (row.text(row.problems, name) for name in ("right", "steps", "sure"))
        dropped = row.text("2-3", "dropped") if row.problems == "2-3" else ""
        pairs = [[f"{predicted(row.name):.2f}", ""], ["", ""], ["", ""]]
        if points := predictions(row.name):
            exact = [[x.true_reward, sum(x.writers[:2]), x.sure] for x in points]
            pairs = [[f"{x:.2f}" for x in pair] for pair in zip(*exact, strict=True)]
        cells = [*pairs[0], right, *pairs[1], steps, dropped, *pairs[2], sure]
        body.append([f"`{row.name}`", *cells, str(len(row.records))])
    return Sheet([*head, "seeds"], body).markdown()


def phase_table(row: Row) -> str:
    """Format means over the seeds at single phases of a row."""
    curves = [record["curve"] for record in row.records]
    at = lambda name, phase: f"{mean(curve[name][phase] for curve in curves):.2f}"
    body = [[str(phase), *(at(name, phase) for name in CURVE)] for phase in PHASES]
    return Sheet(("phase", "reward", "true reward", "sure", "KL, nats"), body).markdown()


def penalty_table() -> str:
    """Format the exact optimum and the runs of hole-4 with a KL penalty."""
    head, body = ["beta"], []
    for name in ("sure", "true reward", "KL, nats"):
        head += [f"{name}: optimum", "run"]
    for beta in BETAS:
        best, row = exact_optimum("hole", (4,), beta), Row(f"hole-kl-{beta}-4")
        cells = [str(beta)]
        pairs = {"sure": best.sure, "right": best.true_reward, "kl": best.kl_per_sequence}
        for name, x in pairs.items():
            cells += [f"{x:.2f}", row.text("all4", name)]
        body.append(cells)
    return Sheet(head, body).markdown()


def pass_at_k_picture(problems: str, title: str) -> str:
    """Plot pass@k of three models, with ranges over the seeds."""
    series, bands = {}, {}
    for name, label in MODELS.items():
        columns = [Row(name).values(problems, f"scored@{k}") for k in KS]
        series[label] = ([int(math.log2(k)) for k in KS], list(map(mean, columns)))
        bands[label] = (list(map(min, columns)), list(map(max, columns)))
    return curves(series, title, "log2(k)", "pass@k", bands).svg + "\n"


def rewards_picture(rows: Sequence[Row]) -> str:
    """Plot the predicted true reward of each reward, next to the runs."""
    names, values = [row.name for row in rows], [row.values(row.problems, "right") for row in rows]
    series = {"exact optimum": list(map(predicted, names)), "runs": list(map(mean, values))}
    whiskers = {"runs": (list(map(min, values)), list(map(max, values)))}
    title = "True reward after training on each reward, mean and range over seeds"
    return bars(names, series, title, "", whiskers).svg + "\n"


def page() -> dict[str, str]:
    """Return the texts of the page and of its pictures, by file name."""
    rows = [row for row in map(Row, REWARDS) if row.records]
    text = TEMPLATE.read_text(encoding="utf-8")
    text = text.replace("<<answer key>>\n\n", answer_key() + "\n")
    text = text.replace("<<rewards>>\n\n", reward_table(rows) + "\n")
    text = text.replace("<<phases of hole-4>>\n", phase_table(Row("hole-4")))
    text = text.replace("<<hole-4 with a penalty>>\n", penalty_table())
    crossing = exact_optimum("hole", (4,), CROSSING)
    text = text.replace("<<crossing>>", f"{crossing.sure:.2f} (KL {crossing.kl_per_sequence:.2f})")
    fill = lambda found: Row(found[1]).text(found[2], found[3], found[4] or "", int(found[5] or 2))
    text = re.sub(r"<<(\S+) (\S+) (\S+?)(?: (mean|min|max))?(?: \.(\d))?>>", fill, text)
    pictures = {
        "verifiable-2-3.svg": pass_at_k_picture("2-3", "Sums of 2 and 3 digits"),
        "verifiable-4c.svg": pass_at_k_picture("4c", "Sums of 4 digits with a carry"),
        "verifiable-rewards.svg": rewards_picture(rows),
    }
    return {"verifiable_rewards.md": text} | pictures


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "train" in sys.argv[1:]:
        make_missing_runs()
    for name, text in page().items():
        write_whole(Path(__file__).with_name(name), text)
