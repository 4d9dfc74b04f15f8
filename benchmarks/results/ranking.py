"""The picture of the results page: distance of each method from the optimum, in every seed."""

import math
from collections.abc import Sequence
from statistics import mean

from benchmarks.results.groups import Group, true_reward
from rlhf_lab.views import marks as m
from rlhf_lab.views.pictures import Picture

TITLE = "Distance of the true reward from the exact optimum at the same KL (log scale)"
KINDS = ("published method", "PPO and estimators with PPO's other settings")
TICKS = (0.01, 0.03, 0.1, 0.3, 1.0)
ROW, PLOT_WIDTH, COLUMN = 21, 330, 74  # pixels


def ranking(found: Sequence[Group]) -> str:
    """Plot the distance of each seed in a row per method, with means at the right, as SVG."""
    plain = [group for group in found if group.labels[1:] == ("all", "constant")]
    plain.sort(key=lambda group: mean(distances(group)))
    left = m.text_width(*(group.labels[0] for group in plain)) + 16
    right = left + PLOT_WIDTH
    width = right + 3 * COLUMN
    parts, top = m.header(TITLE, "", KINDS, width)
    low, high = (math.log(x) for x in (0.006, 1.1))
    across = lambda x: left + (math.log(x) - low) / (high - low) * PLOT_WIDTH
    first, bottom = top + 22, top + 22 + ROW * len(plain)
    for x in TICKS:
        ends = {"x1": across(x), "x2": across(x), "y1": first, "y2": bottom}
        parts += [
            m.tag("line", class_="axis", **ends),
            m.text(ends["x1"], bottom + 14, f"{x:g}", "", "middle"),
        ]
    for i, words in enumerate(("distance", "true reward", "KL, nats"), 1):
        parts.append(m.text(right + COLUMN * i - 6, first - 6, words, "soft", "end"))
    for i, group in enumerate(plain):
        name, y = group.labels[0], first + ROW * (i + 0.5)
        kind = int("method" not in group.records[0]["fields"])
        parts.append(m.text(left - 10, y + 4, name, "", "end"))
        for x in distances(group):
            parts.append(m.titled(m.marker(kind, across(x), y, kind, 3.2), name, x))
        kl = group.mean(lambda r: r["final"]["kl_per_sequence"])
        numbers = (f"{mean(distances(group)):.3f}", f"{group.mean(true_reward):.3f}", f"{kl:.2f}")
        for j, number in enumerate(numbers, 1):
            parts.append(m.text(right + COLUMN * j - 6, y + 4, number, "", "end"))
    return Picture((width, bottom + 24), parts, TITLE).svg + "\n"


def distances(group: Group) -> list[float]:
    """Return how far each seed is below the highest true reward at its KL."""
    return [record["best_true_reward"] - true_reward(record) for record in group.records]
