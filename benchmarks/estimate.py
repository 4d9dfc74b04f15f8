"""Estimates of the time and memory that a benchmark will take."""

from itertools import chain
from types import MappingProxyType

import psutil

from benchmarks import measure
from benchmarks.flops import phase_flops
from benchmarks.options import Bench
from benchmarks.work import Work

START_SECONDS, OVERHEAD_SECONDS, COMMAND_SECONDS = 10.0, 0.5, 25.0
TIMES_FLOOR = MappingProxyType({"ours": 2.0, "ours-residual": 2.0, "trl-0.11.4": 4.0})
"""A contestant's time over that of the arithmetic alone, at a guess."""
OTHERS_TIMES_FLOOR = 5.0


def estimated_seconds(options: Bench, work: Work, floor: float) -> float:
    """A guess at the time of everything, from the seconds of one phase's arithmetic."""

    def phase(name: str, times: float = 1.0) -> float:
        return OVERHEAD_SECONDS + TIMES_FLOOR.get(name, OTHERS_TIMES_FLOOR) * floor * times

    turns = 1 + options.repeats
    seconds = sum(START_SECONDS + turns * phase(name) for name in options.contestants)
    if options.growth:
        flops = sum(phase_flops(work).values())
        for grown in chain(*measure.grown(work).values()):
            times = sum(phase_flops(grown).values()) / flops
            seconds += START_SECONDS + turns * phase("ours", times)
    if options.generation:
        seconds += 2 * (START_SECONDS + turns * phase("ours", 0.3))
    if options.commands:
        seconds += options.repeats * COMMAND_SECONDS
    if options.probes:
        seconds += 2 * (START_SECONDS + work.run_turns * phase("ours"))
    return seconds


def memory_warning(options: Bench, work: Work) -> str:
    """A sentence where the contestants together may need more memory than is free, or nothing.

    Each holds policy, reference, gradients and two moments, and a few tensors over the vocabulary;
    one with a separate value model holds four more copies.
    """
    names = options.contestants
    copies = sum(9 if name == "trl-1.12" else 5 for name in names)
    logits = work.batch_size * work.gen_len * work.size.d_vocab
    needed = 4 * (copies * work.size.n_parameters + 6 * logits * len(names))
    free = psutil.virtual_memory().available
    if work.device != "cpu" or needed <= free:
        return ""
    return (
        f"the contestants may need {needed / 1e9:.0f} GB together and {free / 1e9:.0f} GB are "
        "free; name fewer with --against."
    )


def spoken(seconds: float) -> str:
    """A duration as one would say it."""
    return f"{seconds:.0f} seconds" if seconds < 90 else f"{seconds / 60:.0f} minutes"
