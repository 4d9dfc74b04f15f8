"""The table of algorithms at one KL: causes of the shift, and the component that matters most."""

from collections.abc import Sequence

from benchmarks.records import Record
from benchmarks.results.groups import Group
from benchmarks.results.prose import ALGORITHMS_TEXT, REPLICATES_TEXT
from benchmarks.sheet import Sheet

CAUSES = ("own_weights", "inherited", "scale", "read_out")
HEAD = ("algorithm", "true reward", "KL", "own weights", "inputs", "norm's scale", "unembedding")
FIRST_MLP = "L0 mlp"


def algorithms_part(found: Sequence[Group]) -> str:
    """Show true reward and causes of the shift of each algorithm, and what replicates."""
    rows = [
        [
            group.labels[0],
            group.spread(lambda r: r["true_reward"]),
            f"{group.mean(lambda r: r['kl']):.2f}",
            *(f"{group.mean(lambda r, c=cause: r['shift'][c]):+.2f}" for cause in CAUSES),
        ]
        for group in found
    ]
    records = [record for group in found for record in group.records]
    first = sum(best_graft(record) == FIRST_MLP for record in records)
    text = REPLICATES_TEXT.format(first, len(records))
    return "\n".join([ALGORITHMS_TEXT, Sheet(HEAD, rows).markdown(), text])


def best_graft(record: Record) -> str:
    """Return the component whose weight change adds most reward to the base model."""
    grafts = {name: record["grafts"][name][0] for name in record["relative"]}
    return max(grafts, key=grafts.get)
