"""The results page (docs/results.md), generated from stored records alone."""

from collections.abc import Sequence

from benchmarks.records import Record
from benchmarks.results.algorithm_table import algorithms_part
from benchmarks.results.groups import groups
from benchmarks.results.loopholes import learned_part, loophole_part
from benchmarks.results.methods import methods_part
from benchmarks.results.prose import INTRODUCTION
from benchmarks.results.real_models import real_part


def page(records: Sequence[Record]) -> str:
    """The whole page as Markdown; a part without records is left out."""
    parts = {
        "methods": methods_part,
        "loophole": loophole_part,
        "learned": learned_part,
        "algorithms": algorithms_part,
        "real": real_part,
    }
    found = ((write, groups(records, part)) for part, write in parts.items())
    return "\n".join([INTRODUCTION, *(write(those) for write, those in found if those)])
