"""The performance page (docs/performance.md), generated from stored results alone."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from statistics import median

from benchmarks.goals import WHY_NOT_MET, goal_rows, trained_weights
from benchmarks.summary import (
    Stored,
    floor_distance,
    growth_exponent,
    probe_cost,
    rows,
    size_exponent,
)
from benchmarks.work import Work

INTRODUCTION = """\
# How fast a phase is, and what it needs

Written by `python -m benchmarks --write-docs` from the records named below; no figure here
is typed by hand. One phase: sample a batch, score it with a rule (how often a word occurs, so that
no reward model is timed), compare it with the reference, and learn from it in 2 passes of 4
minibatches with clipped surrogate, value loss, entropy, exact KL over the whole vocabulary,
gradient clipping and AdamW. Weights are random and shared by all; top-k is 10. Each contestant
runs in a process of its own, all take turns, the first turn does not count, and medians are shown.
A ratio is a contestant's time over this package's: above 1, this package is faster.
"""

CONTESTANTS = """\
## Who is compared, and where the work differs

- **ours**: `RLHFTrainer.rollout_phase()` and `.learning_phase()`. Log-probabilities are of the
  truncated distribution that sampled. No hook is attached.
- **ours-hooked**: the same while a hook listens to the policy's residual stream, in sampling and in
  every forward of learning; the packed form passes it.
- **ours-modules**: the same while a hook listens to an attention pattern, which the packed form
  does not pass, so that the hooked modules run.
- **naive** (`benchmarks/naive.py`): PPO on a HookedTransformer as a learner would finish the
  notebook: the same objective, with three forwards per rollout and the reference's logits kept over
  the whole vocabulary. A test holds its objective and gradients equal to ours.
- **trl-0.11.4** (`benchmarks/trl_step.py`): TRL's step-based PPOTrainer on the Hugging Face model,
  without hooks. The exact KL is inside the reward, by which it is computed once per rollout and not
  in every minibatch; the entropy is a statistic. Its gradient clipping works in its very first
  step only, because it keeps the parameters in an iterator that is then used up.
- **trl-1.12** (`benchmarks/trl_experimental.py`): TRL's experimental PPOTrainer. Its value function
  is a second model of the same size; it samples without top-k, estimates the KL from the sampled
  tokens, and does not clip gradients. Its gradient checkpointing, on by default, is off here.

The arithmetic alone: the floating-point operations of the matrix products that a phase cannot do
without, over the measured rate of matrix products of these shapes on the same machine.
"""


def page(results: Sequence[Stored], sources: Sequence[str]) -> str:
    """The whole page as Markdown, one part per stored result.

    Args:
        sources: for each result a link to the file that holds it.
    """
    parts = [INTRODUCTION, _overview(results), *_sizes(results), _goals(results)]
    for result, source in zip(results, sources, strict=True):
        parts += _one(result, source)
    return "\n".join([*parts, CONTESTANTS])


def _goals(results: Sequence[Stored]) -> str:
    table = _table(["goal", "bound", "measured", "met"], goal_rows(results))
    return f"## Goals\n\n{table}\n{WHY_NOT_MET}"


def label(result: Stored) -> str:
    """A result in a few words: shape, device, precision."""
    work = result["work"]
    return f"{work['shape']}, {work['device']}, {work['precision']}"


def _table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    lines = [list(head), ["---", *["---:"] * (len(head) - 1)], *map(list, body)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _overview(results: Sequence[Stored]) -> str:
    """Everybody's seconds, in one column for all results of one kind, the first of which counts."""
    first: dict[str, Stored] = {}
    for result in results:
        first.setdefault(label(result), result)
    results = list(first.values())
    found = [{r.name: r for r in rows(x["contestants"], Work(**x["work"]).tokens)} for x in results]
    names = dict.fromkeys(name for result in found for name in result)

    def cell(name: str, of: dict) -> str:
        if name not in of:
            return ""
        row = of[name]
        ratio = "" if row.ratio is None else f" ({row.ratio:.2f})"
        return f"{row.seconds:.3g}{ratio}"

    body = ([name, *(cell(name, of) for of in found)] for name in names)
    head = ["seconds per phase (ratio)", *first]
    return f"## At a glance\n\n{_table(head, body)}"


def _sizes(results: Sequence[Stored]) -> list[str]:
    """Growth with the model's size, where results differ in nothing else."""

    def conditions(result: Stored) -> str:
        work = {name: v for name, v in result["work"].items() if name != "shape"}
        return f"{result['machine']}{sorted(work.items())}"

    body = []
    for _, same in groupby(sorted(results, key=conditions), conditions):
        group = list({result["work"]["shape"]: result for result in same}.values())
        if len(group) > 1 and all("ours" in result["contestants"] for result in group):
            shapes = ", ".join(result["work"]["shape"] for result in group)
            where = f"{group[0]['work']['device']}, {group[0]['work']['precision']}"
            body.append([f"{where}: {shapes}", f"{size_exponent(group):.2f}"])
    if not body:
        return []
    head = ["growth of our time with a phase's arithmetic", "exponent"]
    return [_table(head, body)]


def _one(result: Stored, source: str) -> list[str]:
    work = Work(**result["work"])
    found = [f"## {label(result)}\n", _circumstances(result, source)]
    found += [_phases(result["contestants"], work, "ours"), _states(work)]
    found += [_stages(result, work), _floor(result)]
    if "generation" in result:
        found += ["Sampling alone:\n", _phases(result["generation"], work, "ours-sampling")]
    if "growth" in result:
        found.append(_growth(result["growth"]))
    if "commands" in result:
        found.append(_commands(result["commands"]))
    if "probes" in result:
        found.append(_probes(result["probes"]))
    return found


def _circumstances(result: Stored, source: str) -> str:
    machine, work = result["machine"], result["work"]
    lines = [
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB; device "
        f"{machine['device']}; {machine['system']}, Python {machine['python']}, torch "
        f"{machine['torch']}, TransformerLens {machine['transformer_lens']}. Batch "
        f"{work['batch_size']}, prefix {work['prefix_len']}, {work['gen_len']} new tokens, "
        f"{work['threads']} threads each, {result['repeats']} turns.",
        f"From {source}, made by `{result['command']}`.",
        *(_versions(name, one) for name, one in result["contestants"].items()),
        *result["left_out"].values(),
    ]
    return "\n\n".join(lines) + "\n"


def _versions(name: str, one: Stored) -> str:
    return f"{name}: {', '.join(f'{package} {v}' for package, v in one['versions'].items())}."


def _phases(figures: Stored, work: Work, base: str) -> str:
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
    return _table(head, body)


def _states(work: Work) -> str:
    """Memory that training of all weights with Adam needs in any case."""
    trained = trained_weights(work.size)
    return (
        f"Of the peak memory over the models, {12 * trained / 1e6:.0f} MB are the gradients and "
        f"Adam's two moments of the {trained / 1e6:.1f} million weights of a HookedTransformer, "
        "whose embedding and unembedding are two matrices (12 bytes each).\n"
    )


def _stages(result: Stored, work: Work) -> str:
    found = rows(result["contestants"], work.tokens)
    stages = dict.fromkeys(stage for row in found for stage in row.stages)
    body = [
        [stage, *(f"{r.stages[stage]:.3f}" if stage in r.stages else "" for r in found)]
        for stage in stages
    ]
    return _table(["seconds of each stage", *(row.name for row in found)], body)


def _floor(result: Stored) -> str:
    flops, seconds = result["floor"]["flops"], result["floor"]["seconds"]
    body = [[part, f"{flops[part] / 1e9:.2f}", f"{seconds[part]:.3f}"] for part in flops]
    body.append(["all", f"{sum(flops.values()) / 1e9:.2f}", f"{sum(seconds.values()):.3f}"])
    table = _table(["the arithmetic alone", "GFLOP", "seconds"], body)
    if "ours" not in result["contestants"]:
        return table
    return f"{table}\nThis package takes {floor_distance(result):.2f} times as long.\n"


def _growth(growth: Stored) -> str:
    body = [
        [axis, str(one[0][axis]), str(one[-1][axis]), f"{growth_exponent(one, axis):.2f}"]
        for axis, one in growth.items()
    ]
    return _table(["growth of our time with", "from", "to", "exponent"], body)


def _commands(seconds: dict[str, list[float]]) -> str:
    body = [
        [name, f"{median(each):.2f}", f"{min(each):.2f} to {max(each):.2f}"]
        for name, each in seconds.items()
    ]
    head = ["a command, as a process of its own", "seconds", "fastest to slowest"]
    return _table(head, body)


def _probes(figures: Stored) -> str:
    share, each = probe_cost(figures)
    phases = len(figures["ours-run"]["phases"]) - 1
    body = [[name, f"{seconds:.3f}"] for name, seconds in each.items()]
    body.append(["added to the run, measured", f"{share:.1%}"])
    return _table([f"the default probes in a run of {phases} phases", "seconds"], body)
