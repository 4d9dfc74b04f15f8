"""The page of figures, written from stored results and from nothing else."""

from collections.abc import Sequence

from rlhf_lab.bench.summary import Stored


def page(results: Sequence[Stored], sources: Sequence[str]) -> str:
    """The whole page as Markdown."""
    return ""
