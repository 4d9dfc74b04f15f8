"""The page of figures, written from stored results and from nothing else."""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from rlhf_lab.bench.summary import (
    Stored,
    floor_distance,
    growth_exponent,
    probe_cost,
    rows,
    size_exponent,
)
from rlhf_lab.bench.work import Work

INTRODUCTION = """\
# How fast a phase is, and what it needs

Written by `python -m rlhf_lab bench --write-docs` from the JSON files named below; no figure here
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
  truncated distribution that sampled. No hook is attached, so the packed form runs.
- **ours-hooked**: the same while a hook listens to the policy, in sampling and in every forward of
  learning, so that the hooked modules run.
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
    """The whole page as Markdown, one part per stored result."""
    parts = [INTRODUCTION, _overview(results), *_sizes(results), goals(results)]
    for result, source in zip(results, sources, strict=True):
        parts += _one(result, source)
    return "\n".join([*parts, CONTESTANTS])


def goals(results: Sequence[Stored]) -> str:
    """What this package set out to reach, beside what was measured, met or not."""
    found = {(r["work"]["shape"], r["work"]["precision"]): r for r in results}
    body = []
    for shape, precision, what, bound, measure in GOALS:
        result = found.get((shape, precision))
        value = None if result is None else measure(result)
        if value is None:
            body.append([f"{shape}, {precision}: {what}", _spoken(bound), "not measured", ""])
            continue
        met = value >= bound if bound > 0 else value <= -bound
        body.append(
            [
                f"{shape}, {precision}: {what}",
                _spoken(bound),
                f"{value:.2f}",
                "yes" if met else "no",
            ]
        )
    table = _table(["goal", "bound", "measured", "met"], body)
    return f"## Goals\n\n{table}\n{WHY_NOT_MET}"


def _spoken(bound: float) -> str:
    return f"at least {bound:g}" if bound > 0 else f"at most {-bound:g}"


def _times(name: str) -> Callable[[Stored], float | None]:
    """How many times as long as this package a contestant takes."""

    def measure(result: Stored) -> float | None:
        found = {
            row.name: row for row in rows(result["contestants"], Work(**result["work"]).tokens)
        }
        return found[name].ratio if name in found else None

    return measure


def _generation(result: Stored) -> float | None:
    if "generation" not in result:
        return None
    found = rows(result["generation"], Work(**result["work"]).tokens, "ours-sampling")
    return next(row.ratio for row in found if row.name == "hf-generate")


def _memory(result: Stored) -> float | None:
    found = {row.name: row for row in rows(result["contestants"], Work(**result["work"]).tokens)}
    if "naive" not in found:
        return None
    return found["ours"].over_model_bytes / found["naive"].over_model_bytes


def _working_memory(result: Stored) -> float | None:
    """The same without gradients and Adam's moments, which both hold."""
    found = {row.name: row for row in rows(result["contestants"], Work(**result["work"]).tokens)}
    if "naive" not in found:
        return None
    states = 12 * _trained(Work(**result["work"]))
    ours, naive = (found[name].over_model_bytes - states for name in ("ours", "naive"))
    return ours / naive


def _probe_share(result: Stored) -> float | None:
    return probe_cost(result["probes"])[0] if "probes" in result else None


def _growth_along(axis: str) -> Callable[[Stored], float | None]:
    """The exponent from 16 sequences on, or over all lengths."""

    def measure(result: Stored) -> float | None:
        if "growth" not in result:
            return None
        points = [one for one in result["growth"][axis] if axis != "batch_size" or one[axis] >= 16]
        return growth_exponent(points, axis)

    return measure


GOALS: tuple[tuple[str, str, str, float, Callable[[Stored], float | None]], ...] = (
    ("small", "fp32", "times faster than naive", 3.5, _times("naive")),
    ("small", "fp32", "times faster than trl-0.11.4", 2.7, _times("trl-0.11.4")),
    ("small", "fp32", "times faster than trl-1.12", 3.3, _times("trl-1.12")),
    ("small", "bf16", "times faster than naive in fp32", 5.0, _times("naive")),
    ("tiny", "fp32", "times faster than naive", 2.2, _times("naive")),
    ("tiny", "fp32", "times faster than trl-0.11.4", 1.9, _times("trl-0.11.4")),
    ("small", "fp32", "sampling, times faster than generate", 1.5, _generation),
    ("small", "fp32", "peak memory over the models, share of naive", -0.35, _memory),
    ("small", "fp32", "the same without the optimiser's state", -0.35, _working_memory),
    ("small", "fp32", "time over the arithmetic alone", -1.3, floor_distance),
    ("tiny", "fp32", "share that the default probes add", -0.1, _probe_share),
    ("small", "fp32", "share that the default probes add", -0.1, _probe_share),
    ("tiny", "fp32", "growth with the batch, exponent", -1.05, _growth_along("batch_size")),
    ("tiny", "fp32", "growth with the length, exponent", -1.05, _growth_along("gen_len")),
    ("small", "fp32", "growth with the batch, exponent", -1.05, _growth_along("batch_size")),
    ("small", "fp32", "growth with the length, exponent", -1.05, _growth_along("gen_len")),
)
"""Shape, precision, what, the bound (a positive one from below, a negative one from above) and how
to read it from a stored result."""

WHY_NOT_MET = """\
Why some are not met: naive's own products run at the speed of this machine's BLAS, which on it is
nearer to oneDNN than the goals took for granted, so that the arithmetic alone bounds the ratio;
what is left above it at `small` is the softmaxes over the vocabulary, the copies of weights into
packed form at every step, and the optimiser's passes over memory. At `tiny` it is Python and the
start of small operations. Gradients and Adam's moments of all weights are most of the memory of
every contestant.
"""


def label(result: Stored) -> str:
    """A result in a few words: shape, device, precision."""
    work = result["work"]
    return f"{work['shape']}, {work['device']}, {work['precision']}"


def _table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    lines = [list(head), ["---", *["---:"] * (len(head) - 1)], *map(list, body)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _overview(results: Sequence[Stored]) -> str:
    found = [{r.name: r for r in rows(x["contestants"], Work(**x["work"]).tokens)} for x in results]
    names = dict.fromkeys(name for result in found for name in result)

    def cell(name: str, of: dict) -> str:
        if name not in of:
            return ""
        row = of[name]
        ratio = "" if row.ratio is None else f" ({row.ratio:.2f})"
        return f"{row.seconds:.3g}{ratio}"

    body = ([name, *(cell(name, of) for of in found)] for name in names)
    head = ["seconds per phase (ratio)", *map(label, results)]
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
        f"From [{source}]({source}), made by `{result['command']}`.",
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
    """How much of the peak memory nobody who trains all weights with Adam can do without."""
    trained = _trained(work)
    return (
        f"Of the peak memory over the models, {12 * trained / 1e6:.0f} MB are the gradients and "
        f"Adam's two moments of the {trained / 1e6:.1f} million weights of a HookedTransformer, "
        "whose embedding and unembedding are two matrices (12 bytes each).\n"
    )


def _trained(work: Work) -> int:
    """The weights of a HookedTransformer of this shape, embedding and unembedding apart."""
    return work.size.n_parameters + work.size.d_model * work.size.d_vocab


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


def _probes(figures: Stored) -> str:
    share, each = probe_cost(figures)
    phases = len(figures["ours-run"]["phases"])
    body = [[name, f"{seconds:.3f}"] for name, seconds in each.items()]
    body.append(["added to the run, measured", f"{share:.1%}"])
    return _table([f"the default probes in {phases} phases", "seconds"], body)
