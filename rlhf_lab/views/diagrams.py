"""Diagrams for the lessons: boxes, arrows and their labels."""

from collections.abc import Mapping, Sequence
from math import hypot

from rlhf_lab.views.marks import Number, element, text
from rlhf_lab.views.pictures import Picture

Spot = tuple[Number, Number]
WIDTH, HEIGHT, BOX = 880, 380, (136.0, 48.0)
BOXES: tuple[tuple[Spot, str, str], ...] = (  # middle, words and lesson
    ((100, 70), "prompt\n“this movie”", ""),
    ((310, 70), "policy\ngenerates a review", "00"),
    ((540, 70), "reward\none number", "00"),
    ((770, 70), "credit\nadvantage per token", "05"),
    ((310, 250), "reference\nfrozen copy", "02"),
    ((540, 250), "value head\nexpected reward", "01"),
    ((770, 250), "objective\nto be maximized", "02"),
)
ARROWS: tuple[tuple[Spot, Spot, str], ...] = (
    ((172, 70), (238, 70), ""),
    ((382, 70), (468, 70), "text"),
    ((612, 70), (698, 70), ""),
    ((575.8, 222), (734.2, 98), ""),
    ((770, 98), (770, 222), ""),
    ((345.8, 98), (504.2, 222), "residual stream"),
)
ALT = (
    "The loop of RLHF: the policy continues a prompt; the reward scores the text; the value head "
    "turns the score into an advantage per token; the objective weighs the advantages, minus the "
    "KL from the frozen reference; a gradient step changes the policy."
)


def loop_diagram() -> Picture:
    """Draw the loop of RLHF, with the lesson of each component."""
    parts = []
    for (x1, y1), (x2, y2), words in ARROWS:
        parts.append(arrow([(x1, y1), (x2, y2)], "s5"))
        if words:
            shift = 0 if y1 == y2 else 54  # next to a slanted arrow
            parts.append(text((x1 + x2) / 2 + shift, (y1 + y2) / 2 - 7, words, "soft", "middle"))
    kl = [(310.0, 98.0), (310.0, 222.0)]
    parts += [arrow(kl, "s1", "6 4"), arrow(kl[::-1], "s1", "6 4")]
    for i, line in enumerate(("KL penalty,", "a term of", "the objective")):
        parts.append(text(300, 150 + 15 * i, line, "", "end"))
    step = [(770.0, 290.0), (770.0, 330.0), (100.0, 330.0), (100.0, 98.0)]
    words = "gradient step, then the next phase with the changed policy"
    parts += [arrow(step, "s2"), text(435, 350, words, "", "middle")]
    for (x, y), words, lesson in BOXES:
        parts.append(box((x, y), words))
        if lesson:
            below = y - 32 if y < 100 else y + 38
            parts.append(text(x, below, f"lesson {lesson}", "soft", "middle"))
    return Picture((WIDTH, HEIGHT), parts, ALT)


def factor_diagram(names: Sequence[str], factors: Mapping[str, Sequence[Number]]) -> Picture:
    """Draw groups of bars next to each other, such as two factors and their product."""
    parts, wide, pitch = [], WIDTH / len(factors), (WIDTH / len(factors) - 20) / len(names)
    for i, (title, numbers) in enumerate(factors.items()):
        parts.append(text(wide * (i + 0.5) - 10, 16, title, "title", "middle"))
        for j, (name, y) in enumerate(zip(names, numbers, strict=True)):
            x, tall = wide * i + pitch * (j + 0.5), 110 * y / max(numbers)
            place = {"x": x - 14, "y": 150 - tall, "width": 28, "height": tall}
            parts.append(element("rect", f"f{(5, 2, 0)[i % 3]}", **place))
            parts.append(text(x, 146 - tall, f"{y:.3g}", "", "middle"))
            parts.append(text(x, 164, name, "soft", "middle"))
    alt = "; ".join(f"{k}: {[float(f'{y:.3g}') for y in ys]}" for k, ys in factors.items())
    return Picture((WIDTH, 172), parts, alt)


def patch_diagram(runs: Sequence[str], steps: Sequence[str], patched: int) -> Picture:
    """Draw two runs on one text; the first run's output of a step replaces the second's."""
    pitch, parts = 780 / len(steps), []
    for y, run in zip((30, 130), runs, strict=True):
        parts.append(text(8, y + 4, run, "title"))
        for i, words in enumerate(steps):
            x, kind = 100 + pitch * (i + 0.5), "s1" if y == 130 and i > patched else "s5"
            parts.append(box((x, y), words, pitch - 28, kind))
            if i:
                parts.append(arrow([(x - pitch / 2 - 14, y), (x - pitch / 2 + 14, y)], kind))
    x, alt = 100 + pitch * (patched + 1), "this activation replaces the one below"
    parts += [arrow([(x, 30), (x, 126)], "s1"), text(x + 8, 84, alt)]
    alt = f"After {steps[patched]} in the {runs[0]}, {alt}, in the {runs[1]}".replace("\n", " ")
    return Picture((WIDTH, 162), parts, alt)


def gae_diagram(rewards: Sequence[Number], values: Sequence[Number], decay: Number) -> Picture:
    """Draw the backward pass of GAE; gamma is 1, and decay is lambda."""
    parts, lines, ahead, later = [], [], [*values, 0], 0.0
    for t in reversed(range(len(values))):
        x, delta = 90 + 220 * t, rewards[t] + ahead[t + 1] - values[t]
        error = f"δ = {delta:.2f}\n{rewards[t]:g} + {ahead[t + 1]:g} − {values[t]:g}"
        more, later = f"{delta:.2f} + {decay:g} × {later:.3f}", delta + decay * later
        lines.append(f"advantage {later:.3f}\n{more}".replace("-", "−"))
        parts += [box((x, 30), error.replace("-", "−")), box((x, 130), lines[-1])]
        parts.append(arrow([(x, 54), (x, 106)], "s5"))
        parts += [arrow([(x - 68, 130), (x - 152, 130)], "s1")] * (t > 0)
    alt = "From the last token to the first: " + "; ".join(lines).replace("\n", " = ")
    return Picture((WIDTH, 162), parts, alt)


def box(middle: Spot, words: str, width: Number = BOX[0], kind: str = "s5") -> str:
    """Return a rounded box with two lines of words."""
    (x, y), height, (first, second) = middle, BOX[1], words.split("\n")
    place = {"x": x - width / 2, "y": y - height / 2, "width": width, "height": height}
    lines = text(x, y - 4, first, "title", "middle") + text(x, y + 13, second, "", "middle")
    return element("rect", f"paper {kind}", rx="6", **place) + lines


def arrow(points: list[Spot], kind: str, dashes: str = "") -> str:
    """Return a line with a head at its end."""
    (x1, y1), (x2, y2) = points[-2:]
    length = hypot(x2 - x1, y2 - y1)
    ux, uy = (x2 - x1) / length, (y2 - y1) / length
    head = [(x2, y2)] + [(x2 - 9 * ux + s * 4 * uy, y2 - 9 * uy - s * 4 * ux) for s in (1, -1)]
    listed = [" ".join(f"{x:.1f},{y:.1f}" for x, y in spots) for spots in (points, head)]
    dash = {"stroke-dasharray": dashes} if dashes else {}
    line = element("polyline", kind, points=listed[0], **dash)
    return line + element("polygon", f"f{kind[1:]}", points=listed[1])
