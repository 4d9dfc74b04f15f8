"""The tables of a result: phases, stages, commands, probes."""

from statistics import median

from benchmarks.records import Record
from benchmarks.sheet import Sheet
from benchmarks.summary import probe_cost, rows
from benchmarks.work import Work


def sheets(result: Record) -> list[Sheet]:
    """All that a result holds."""
    work = Work(**result["work"])
    found = [_phases(result["contestants"], work, "ours", note=_optimizer_memory(work))]
    found.append(_stages(result, work))
    if "generation" in result:
        found.append(_phases(result["generation"], work, "ours-sampling", "Sampling alone:"))
    if "commands" in result:
        found.append(_commands(result["commands"]))
    if "probes" in result:
        found.append(_probes(result["probes"]))
    return found


def _phases(figures: Record, work: Work, base: str, title: str = "", note: str = "") -> Sheet:
    head = ["", "seconds", "fastest to slowest", "ratio", "rollout", "learning", "tokens/s"]
    head.append("peak memory over the models, MB")
    body = [
        [
            row.name,
            f"{row.seconds:.3f}",
            f"{row.fastest:.3f} to {row.slowest:.3f}",
            "" if row.ratio is None else f"{row.ratio:.2f}",
            f"{row.rollout:.3f}",
            f"{row.learning:.3f}",
            f"{row.tokens_per_second:.0f}",
            f"{row.over_model_bytes / 1e6:.0f}",
        ]
        for row in rows(figures, work.tokens, base)
    ]
    return Sheet(head, body, title, note)


def _optimizer_memory(work: Work) -> str:
    """The memory of gradients and Adam's moments, which training of all weights needs anyway."""
    trained = work.size.n_trained
    return (
        f"Of the peak memory over the models, {12 * trained / 1e6:.0f} MB are the gradients and "
        f"Adam's two moments of the {trained / 1e6:.1f} million weights of a HookedTransformer, "
        "whose embedding and unembedding are two matrices (12 bytes each)."
    )


def _stages(result: Record, work: Work) -> Sheet:
    found = rows(result["contestants"], work.tokens)
    stages = dict.fromkeys(stage for row in found for stage in row.stages)
    body = [
        [stage, *(f"{r.stages[stage]:.3f}" if stage in r.stages else "" for r in found)]
        for stage in stages
    ]
    return Sheet(["seconds of each stage", *(row.name for row in found)], body)


def _commands(seconds: dict[str, list[float]]) -> Sheet:
    body = [
        [name, f"{median(each):.2f}", f"{min(each):.2f} to {max(each):.2f}"]
        for name, each in seconds.items()
    ]
    return Sheet(["a command, as a process of its own", "seconds", "fastest to slowest"], body)


def _probes(figures: Record) -> Sheet:
    share, each = probe_cost(figures)
    phases = len(figures["ours-run"]["phases"]) - 1
    body = [[name, f"{seconds:.3f}"] for name, seconds in each.items()]
    body.append(["added to the run, measured", f"{share:.1%}"])
    return Sheet([f"the default probes in a run of {phases} phases", "seconds"], body)
