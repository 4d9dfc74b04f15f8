"""Ten questions about a run, each answered by one sentence computed from its files."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rlhf_lab.probes import Run
from rlhf_lab.views.interventions import stored_interventions, summarize_intervention

Line = Mapping[str, Any]
QUESTIONS = (  # the question, and the section of the page that shows its numbers
    ("Is it learning, and is the true reward rising too?", "curve-mean_reward"),
    ("What does it cost, compared with the best?", "run_health"),
    ("Where is the KL?", "kl_by_position"),
    ("Which words moved most, and by which component?", "words_moved"),
    ("When did it change?", "words_moved"),
    ("Is it causal?", "interventions"),
    ("Is the reward hacked?", "samples"),
    ("Is the critic right?", "curve-explained_variance"),
    ("Is the optimizer healthy?", "curve-clip_fraction"),
    ("Does another seed agree?", "arguments"),
)
STALLED_KL = 0.01  # nats per sequence after three phases
VALUE_ESTIMATORS = ("one_step", "gae")  # advantages that are computed from values
MOST_KL, MOST_WORDS = 0.8, 3  # fraction of the KL and words of a side in an answer
HACKED_GAP = 0.5  # reward minus true reward of a sample


def answer_questions(run: Run) -> list[tuple[str, str, str]]:
    """Return question, answer and section; an answer without data names the command for it."""
    lines, args = run.metrics(), run.info["args"]  # also of other versions, with other settings
    names = map(run.find_probe, ("WordsMoved", "RunHealth", "KLByPosition", "ValueLens"))
    words, health, kl, lens = (run.records(name) if name else [] for name in names)
    best = _known(health, "optimal_reward") or _known(health, "best_reward_at_kl")
    places = {} if best else {"run_health": "curve-kl_per_sequence"}
    missing = "Not recorded: train with --probes."
    missing = "This run's probes do not record this." if run.probes() else missing
    if not lines:
        empty = "No phase is done yet."
        if run.info.get("phases_done"):
            empty = "metrics.jsonl is missing or empty. Restore it."
        answers = [empty] * len(QUESTIONS)
    else:
        answers = [
            answer_learning(lines),
            answer_cost(health, lines),
            answer_kl(kl) if kl else missing,
            *(answer_words(words) if words else [missing] * 2),
            answer_causes(stored_interventions(run)),
            answer_hacking(run.samples()),
            answer_critic(lines[-1], args, health, lens),
            answer_optimizer(lines),
            "One run is open. Train the same settings with another seed: --seed "
            f"{args['seed'] + 1 if isinstance(args.get('seed'), int) else 2}.",
        ]
    pairs = zip(QUESTIONS, answers, strict=True)
    return [(question, a, places.get(place, place)) for (question, place), a in pairs]


def _known(lines: Sequence[Line], name: str) -> list[tuple[int, float]]:
    return [(line["phase"], line[name]) for line in lines if line.get(name) is not None]


def answer_learning(lines: Sequence[Line]) -> str:
    """Return the change of the reward, the true reward, and the phase of half of the gain."""
    rewards, true = _known(lines, "mean_reward"), _known(lines, "true_reward")
    kl = _known(lines, "kl_to_initial_per_sequence") or _known(lines, "kl_per_sequence")
    (start, first), (end, last) = rewards[0], rewards[-1]
    if len(lines) == 1:
        also = f" and the true reward {true[0][1]:.3f}" if true else ""
        return f"One phase is done: before learning, the mean reward is {first:.3f}{also}."
    answer = f"The mean reward went from {first:.3f} (phase {start}) to {last:.3f} (phase {end})"
    answer += f", the true reward from {true[0][1]:.3f} to {true[-1][1]:.3f}" if true else ""
    if last > first:
        half = next(phase for phase, x in rewards if x >= (first + last) / 2)
        answer += f"; half of the gain by phase {half}"
    is_trained = len(lines) > 3 and any(line.get("base_lr") != 0 for line in lines)
    if is_trained and kl and abs(kl[-1][1]) < STALLED_KL:
        answer += f". The policy has hardly moved (KL {kl[-1][1]:.4f} nats): raise base_lr"
    return answer + "."


def answer_cost(health: Sequence[Line], lines: Sequence[Line]) -> str:
    """Return the KL, and the reward of the best policy at that price if it is known."""
    kl, best = _known(lines, "kl_per_sequence"), _known(health, "optimal_reward")
    if not kl:
        return "metrics.jsonl has no KL."
    answer = f"{kl[-1][1]:.3f} nats of KL per sequence in phase {kl[-1][0]}"
    if not best:
        known = "no exact optimum is recorded (Reel and sums with --probes have one)"
        for phase, reward in _known(health, "best_reward_at_kl")[-1:]:
            known = f"in phase {phase} the best policy with this KL has a reward of {reward:.3f}"
        return f"{answer}; {known}."
    (phase, reward), betas = best[-1], _known(health, "beta_eff")
    optimal_kl = dict(_known(health, "optimal_kl_per_sequence"))[phase]
    answer += f"; with the KL penalty of phase {phase} (beta_eff), the best possible policy has a "
    answer += f"reward of {reward:.3f} at {optimal_kl:.3f} nats"
    if known := dict(kl).get(phase):
        gap = round(known, 3) - round(optimal_kl, 3)  # of the numbers that are shown
        answer += f" (this run has {abs(gap):.3f} nats {'more' if gap > 0 else 'less'})"
    if len(betas) > 1:
        (start, first), (end, last) = betas[0], betas[-1]
        answer += f"; beta_eff went from {first:.3g} (phase {start}) to {last:.3g} (phase {end})"
    return answer + "."


def answer_kl(records: Sequence[Line]) -> str:
    """Return the positions that have most of the KL, and their fractions."""
    record = records[-1]  # its KL is per token, and late positions have fewer tokens
    n, tokens = record["sequences"]["exact"], record["tokens_at"]
    kl = [x * count / n for x, count in zip(record["kl"], tokens, strict=True)]
    slots, listed, total = record.get("slots"), [], sum(kl)
    if total <= 0:
        return f"The KL is 0 at every position in phase {record['phase']}."
    rest = total
    for i in sorted(range(len(kl)), key=lambda i: -kl[i])[:8]:
        if rest > (1 - MOST_KL) * total:
            listed.append(f"{slots[i] if slots else f'position {i}'} {kl[i] / total:.0%}")
            rest -= kl[i]
    return f"{', '.join(listed)} of {total:.3f} nats per sequence in phase {record['phase']}."


def answer_words(records: Sequence[Line]) -> tuple[str, str]:
    """Return the two largest contrasts of words with their component, and when words moved."""
    moved = [record for record in records if record["contrasts"]]
    recorded = f"; recorded in phases {', '.join(str(record['phase']) for record in records)}."
    if not moved:
        return (f"No word has moved beyond noise{recorded}",) * 2
    last = moved[-1]
    largest = sorted(last["contrasts"], key=lambda contrast: -contrast["fraction"])[:2]
    which = f"{'; '.join(map(_contrast, largest))}; in phase {last['phase']}."
    half = next(r["phase"] for r in moved if r["moved_mass"] >= last["moved_mass"] / 2)
    rate = lambda a, b: (b["moved_mass"] - a["moved_mass"]) / (b["phase"] - a["phase"])
    when = f"Half of the moved probability by phase {half}"
    if len(records) > 1:
        start, end = max(pairwise(records), key=lambda pair: rate(*pair))
        when += f", fastest from phase {start['phase']} to {end['phase']}"
    return which, when + recorded


def _contrast(contrast: Line) -> str:
    weights, sides = contrast["weights"], []
    for sign in (1, -1):
        side = sorted((w for w in weights if sign * weights[w] > 0), key=lambda w: -abs(weights[w]))
        more = ", ..." if len(side) > MOST_WORDS else ""
        sides.append(", ".join(side[:MOST_WORDS]) + more or "others")
    return (
        f"{sides[0]} instead of {sides[1]} at {contrast['at']}, {contrast['fraction']:.0%} of the "
        f"moved probability, {contrast['component']} {contrast['part']:+.3f} of "
        f"{contrast['shift']:+.3f} logits"
    )


def answer_causes(interventions: Sequence[Line]) -> str:
    """Return the intervention with the largest shift."""
    if not interventions:
        return "Not computed yet. Run `python -m rlhf_lab view RUN` and press Patch on its page."
    largest = max(interventions, key=lambda result: abs(result["shift"][0]))
    of_several = f"largest of {len(interventions)}: " * (len(interventions) > 1)
    return f"{of_several}{' - '.join(largest['words'])}: {summarize_intervention(largest)}"


def answer_hacking(samples: Sequence[Line]) -> str:
    """Return how many samples of the last phase have a reward far above the true reward."""
    if not samples:
        return "No sample is stored yet."
    phase = samples[-1]["phase"]
    true = [x for x in samples if x.get("true_reward") is not None]
    if not true or true[-1]["phase"] != phase:
        return "The true reward is not known here: read the samples, highest rewards first."
    hacked = [x for x in true if x["reward"] - x["true_reward"] > HACKED_GAP]
    now = [x for x in hacked if x["phase"] == phase]
    zeros = sum(x["true_reward"] == 0 for x in now)
    more = f" ({zeros} with a true reward of 0: ungrammatical or wrong)" * bool(zeros)
    if hacked:
        worst, n = Counter(x["phase"] for x in hacked).most_common(1)[0]
        more += f"; {len(hacked)} of {len(true)} of all phases, most in phase {worst} ({n})"
    return (
        f"{len(now)} of {sum(x['phase'] == phase for x in samples)} samples of phase {phase} have "
        f"a reward more than {HACKED_GAP:g} above the true reward{more}."
    )


def answer_critic(
    line: Line, args: Line, health: Sequence[Line] = (), lens: Sequence[Line] = ()
) -> str:
    """Return the explained variance, correlations with exact values, and if values are used."""
    value, name = line.get("explained_variance"), args.get("advantages", "gae")
    if args.get("vf_coef") == 0 or value is None:
        unknown = f"The explained variance of phase {line['phase']} is not known."
        return "No values are trained (vf_coef=0)." if args.get("vf_coef") == 0 else unknown
    unused = "" if name in VALUE_ESTIMATORS else f"; advantages={name!r} ignores them"
    same = health[-1] if health and health[-1]["phase"] == line["phase"] else {}
    ends = [same.get(f"explained_variance_{end}") for end in ("low", "high")]
    interval = "" if None in ends else f" [{ends[0]:.0%}, {ends[1]:.0%}]"
    exact = ""
    if lens and any(known := lens[-1].get("head_correlation") or ()):
        pairs = [pair for pair in zip(known, lens[-1]["slots"], strict=True) if None not in pair]
        (low, first), (high, last) = min(pairs), max(pairs)
        exact = f" In phase {lens[-1]['phase']} they correlate with {lens[-1]['r2_against']} by "
        exact += f"{low:.2f} ({first}) to {high:.2f} ({last})."
    error = ""
    if line.get("value_loss") is not None and args.get("vf_coef") and args.get("vf_clip") is None:
        size = (2 * line["value_loss"] / args["vf_coef"]) ** 0.5
        size *= line["reward_std"] if args.get("normalize_reward") else 1.0
        error = f"; their root mean square error is {size:.3g} in units of the reward"
    return (
        f"Values explain {value:.0%}{interval} of the variance of the returns in phase "
        f"{line['phase']}{error}{unused}.{exact}"
    )


def answer_optimizer(lines: Sequence[Line]) -> str:
    """Return the worst of the clip fraction, the first ratio and the gradient norm."""
    parts = []
    for name, label in (("clip_fraction", "clip fraction"), ("grad_norm", "gradient norm")):
        known = _known(lines, name)
        if known:
            phase, worst = max(known, key=lambda pair: pair[1])
            parts.append(f"largest {label} {worst:.3g} (phase {phase})")
    ratios = _known(lines, "ratio_first_minibatch")
    if ratios:
        phase, worst = max(ratios, key=lambda pair: abs(pair[1] - 1))
        parts.append(
            f"ratio before the first step differs by {worst - 1:+.1e} from 1 (phase {phase})"
        )
    return "; ".join(parts).capitalize() + "." if parts else "metrics.jsonl has no statistics."
