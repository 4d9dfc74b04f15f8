"""Orders of parts by seven methods of model diffing, over trained seeds, and how far they agree."""

import json
import sys
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from benchmarks.principal import principal_shares, principal_table
from rlhf_lab.cli_runner import run_program
from rlhf_lab.config import RLHFArgs
from rlhf_lab.diffing import transplant
from rlhf_lab.diffing.effects import effects_of_parts, kendall_tau, layer_groups
from rlhf_lab.functional import Interval, bootstrap_means
from rlhf_lab.organism import true_reward
from rlhf_lab.probes import ReelTruth, Run
from rlhf_lab.training import RLHFTrainer

HERE = Path(__file__).parent
RESULTS, TEMPLATE = HERE / "results" / "diffing.jsonl", HERE / "diffing.template.md"
PRINCIPAL = HERE / "results" / "principal.jsonl"
PAGE = HERE.parent / "docs" / "diffing.md"
WORDS, REVIEWS, EVAL_SEED = ("loved", "hated"), 64, 5


def measure(runs: Path, seeds: int = 5, n: int = 128, out: Path = RESULTS) -> int:
    """Train the preset reel with each seed, unless it is there, and store each part's effects.

    Args:
        runs: Where the runs are, or go.
        seeds: How many, from 1 on.
        n: Reviews that each coalition of a transplant writes.
        out: The file of results, written anew.
    """
    torch.set_num_threads(1)
    rows = [measure_seed(runs / f"seed{seed}", seed, n) for seed in range(1, seeds + 1)]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return write_docs(out)


def measure_principal(runs: Path, seeds: int = 5, out: Path = PRINCIPAL) -> int:
    """Train as `measure` does, and store how far changes lie in their weights' own directions.

    Args:
        runs: Where the runs are, or go.
        seeds: How many, from 1 on.
        out: The file of results, written anew.
    """
    torch.set_num_threads(1)
    rows = []
    for seed in range(1, seeds + 1):
        run = trained_run(runs / f"seed{seed}", seed)
        ends = run.policy(0).base_model, run.policy("last").base_model
        rows.append({"seed": seed, "shares": principal_shares(*ends, seed)})
    out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return write_docs()


def trained_run(path: Path, seed: int) -> Run:
    """The preset reel with a seed, trained unless it is there."""
    if not (path / "run.json").is_file():
        RLHFTrainer(RLHFArgs(preset="reel", seed=seed), out=path).train()
    return Run(path)


def measure_seed(path: Path, seed: int, n: int) -> dict[str, object]:
    """One seed's effects of parts, with intervals over reviews, or samples of transplants."""
    run, truth = trained_run(path, seed), ReelTruth()
    base, tuned = run.policy(0).base_model, run.policy("last").base_model
    tokens = truth.reviews(REVIEWS, EVAL_SEED)[0]
    pos = truth.grammar.slot("VERB") - 1
    ids = tuple(base.tokenizer.encode(word, add_special_tokens=False)[0] for word in WORDS)
    found = effects_of_parts(base, tuned, tokens, pos, ids)
    intervals = {name: bootstrap_means(rows.T) for name, rows in found.items()}
    moved = transplant(base, tuned, layer_groups(base), true_reward, n, seed=1)
    intervals |= {
        "true reward, put in": moved.put_in(),
        "true reward, taken out": moved.taken_out(),
        "true reward, Shapley": moved.shapley(),
    }
    metrics = run.metrics()
    print(
        f"seed {seed}: true reward {moved.rewards[0].mean():.3f} -> {moved.rewards[-1].mean():.3f}"
    )
    return {
        "seed": seed,
        "parts": moved.groups,
        "n": n,
        "reviews": REVIEWS,
        "true_reward_gain": moved.gain.mean().item(),
        "kl_per_sequence": metrics[-1]["kl_per_sequence"],
        "effects": {name: _numbers(interval) for name, interval in intervals.items()},
    }


def write_docs(results: Path = RESULTS) -> int:
    """Write docs/diffing.md from the stored results, and print its tables.

    Args:
        results: The file of results.
    """
    rows, principal = (_read(path) for path in (results, PRINCIPAL))
    tables = {"parts": _parts_table(rows), "orders": _orders_table(rows), "tau": _tau_table(rows)}
    tables["principal"] = _markdown(principal_table([row["shares"] for row in principal]))
    page = TEMPLATE.read_text(encoding="utf-8")
    for name, table in tables.items():
        page = page.replace(f"{{{{{name}}}}}", table)
        print(table, end="\n\n")
    PAGE.write_text(page, encoding="utf-8")
    return 0


def _read(results: Path) -> list[dict]:
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]


def _numbers(interval: Interval) -> list[list[float]]:
    """Value, low and high of each part."""
    ends = torch.stack([interval.value, interval.low, interval.high], 1)
    return [[round(x, 5) for x in row] for row in ends.tolist()]


def _values(rows: list[dict], method: str) -> Float[Tensor, "seed part"]:
    return torch.tensor([[part[0] for part in row["effects"][method]] for row in rows])


def _parts_table(rows: list[dict]) -> str:
    """The effect of every part by every method: the mean of the seeds, and their range."""
    methods, parts = list(rows[0]["effects"]), rows[0]["parts"]
    lines = [["method", *parts]]
    for method in methods:
        values = _values(rows, method)
        cells = zip(values.mean(0), values.amin(0), values.amax(0), strict=True)
        lines.append([method, *(f"{m:+.3f} ({low:+.2f} to {high:+.2f})" for m, low, high in cells)])
    return _markdown(lines)


def _orders_table(rows: list[dict]) -> str:
    """The order of parts by each method, seed by seed; an equals sign where intervals overlap."""
    parts = rows[0]["parts"]
    lines = [["method", *(f"seed {row['seed']}" for row in rows)]]
    for method in rows[0]["effects"]:
        lines.append([method, *(_order(parts, row["effects"][method]) for row in rows)])
    return _markdown(lines)


def _order(parts: list[str], found: list[list[float]]) -> str:
    order = sorted(range(len(parts)), key=lambda i: -found[i][0])
    text = parts[order[0]]
    for before, after in zip(order, order[1:], strict=False):
        text += f" {'>' if found[before][1] > found[after][2] else '≈'} {parts[after]}"
    return text


def _tau_table(rows: list[dict]) -> str:
    """Kendall's tau of each two methods: the mean over seeds with its interval."""
    methods = list(rows[0]["effects"])
    lines = [["", *methods[1:]]]
    for i, first in enumerate(methods[:-1]):
        cells = []
        for j, second in enumerate(methods[1:], start=1):
            if j <= i:
                cells.append("")
                continue
            tau = kendall_tau(_values(rows, first), _values(rows, second))
            interval = bootstrap_means(tau)
            ends = f" [{interval.low:+.2f}, {interval.high:+.2f}]" if len(rows) > 1 else ""
            cells.append(f"{interval.value:+.2f}{ends}")
        lines.append([first, *cells])
    return _markdown(lines)


def _markdown(lines: list[list[str]]) -> str:
    head, *rest = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|" + "---|" * len(lines[0]), *rest])


if __name__ == "__main__":
    sys.exit(
        run_program(
            {"measure": measure, "measure-principal": measure_principal, "write-docs": write_docs},
            "python -m benchmarks.diffing",
        )
    )
