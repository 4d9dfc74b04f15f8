"""Preference tuning on Reel over seeds: the true reward's gain by DPO, KTO and ORPO, and their KL.

python -m benchmarks.preferences
python -m benchmarks.preferences --page
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.progress import track
from tyro.conf import FlagCreatePairsOff

from benchmarks.records import RESULTS, Record, read_records, rounded, store_record, write_whole
from benchmarks.results.records import bundled_digest
from rlhf_lab.cli_runner import run_program
from rlhf_lab.config.checks import AT_LEAST_1, check_range
from rlhf_lab.fitting import DPOLoss, DriftEvalConfig, FitConfig, KTOLoss, ORPOLoss
from rlhf_lab.models import load_model
from rlhf_lab.organism import REWARDS
from rlhf_lab.rewards import reel_pairs
from rlhf_lab.tuning import split_pairs, train_on_labels, train_on_pairs
from rlhf_lab.tuning_commands import PREFERENCES

METHODS = MappingProxyType(
    {
        "DPO": DPOLoss(),
        "DPO, `--beta 0.5`": DPOLoss(0.5),
        "IPO": DPOLoss(kind="ipo"),
        "KTO": KTOLoss(),
        "KTO, `--beta 0.5`": KTOLoss(0.5),
        "ORPO": ORPOLoss(),
        "ORPO, `--odds-weight 1`": ORPOLoss(1.0),
        "SFT on the chosen texts": ORPOLoss(0.0),
    }
)
N_PAIRS, DRIFT_TEXTS = 10_000, DriftEvalConfig(1024, 28)
KEYS = frozenset({"method", "seed", "weights", "n_pairs", "fitting", "loss", "drift", "accuracy"})
PAGE = Path("docs/preferences.md")
FIGURES = re.compile(r"(?<=<!-- figures -->\n\n).*?(?=\n\n<!-- end of figures -->)", re.DOTALL)
HEAD = """\
| method | true reward (lowest to highest) | KL, nats per text | accuracy |
| --- | ---: | ---: | ---: |"""


def run_key(method: str, seed: int) -> dict[str, Any]:
    """Return the entries that identify a run: it is done if a record has them."""
    return {
        "method": method,
        "seed": seed,
        "weights": bundled_digest(),
        "n_pairs": N_PAIRS,
        "own_texts": asdict(DRIFT_TEXTS),
        "fitting": replace(PREFERENCES, seed=seed).to_dict(),
        "loss": asdict(METHODS[method]),
    }


def tune(method: str, seed: int) -> dict[str, Any]:
    """Tune the bundled model on Reel's pairs, as the command does; returns its metrics."""
    loss = METHODS[method]
    fitting = FitConfig(**run_key(method, seed)["fitting"], show_progress=False)
    pairs, model = reel_pairs(N_PAIRS, seed), load_model("reel-nano")
    how = {"drift_eval": DRIFT_TEXTS, "true_reward_fn": REWARDS["true_reward"]}
    if isinstance(loss, KTOLoss):
        found = train_on_labels(model, split_pairs(pairs), fitting, loss, **how)
    else:
        found = train_on_pairs(model, pairs, fitting, loss, **how)
    return {"drift": rounded(asdict(found.drift)), "accuracy": rounded(found.values["accuracy"])}


def table(records: Sequence[Record]) -> str:
    """Format the table of the page: means over the seeds, and the range of the true reward."""
    lines = [HEAD]
    for method in METHODS:
        runs = [record for record in records if record["method"] == method]
        if not runs:
            continue
        rewards, kl = (
            [run["drift"][name] for run in runs]
            for name in ("true_reward_after", "kl_per_sequence")
        )
        accuracy = mean(run["accuracy"] for run in runs)
        lines.append(
            f"| {method} | {mean(rewards):.3f} ({min(rewards):.3f} to {max(rewards):.3f}) "
            f"| {mean(kl):.2f} | {accuracy:.3f} |"
        )
    seeds = len({record["seed"] for record in records})
    return "\n".join([*lines, "", f"Seeds per row: {seeds}."])


def measure(
    seeds: int = 5,
    records: Path = RESULTS,
    docs: Path = PAGE,
    page: FlagCreatePairsOff[bool] = False,
) -> int:
    """Tune the bundled model by each method over seeds, and write the page's table."""
    check_range(AT_LEAST_1, seeds=seeds)
    file = records / "preferences.jsonl"
    there = read_records(file, KEYS) if file.exists() else []
    questions = [run_key(method, seed) for seed in range(seeds) for method in METHODS]
    missing = [q for q in questions if not any(q.items() <= old.items() for old in there)]
    for question in track([] if page else missing, "tuning", console=Console()):
        which = question["method"], question["seed"]
        same = lambda old, which=which: (old["method"], old["seed"]) == which
        store_record(file, question | tune(*which), same)
    text = docs.read_text(encoding="utf-8")
    made = table(read_records(file, KEYS))
    write_whole(docs, FIGURES.sub(lambda _: made, text))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return run_program(measure, "benchmarks.preferences", arguments)


if __name__ == "__main__":
    sys.exit(main())
