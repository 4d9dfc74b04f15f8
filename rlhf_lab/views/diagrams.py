"""Diagram of the RLHF loop for the lessons: boxes, arrows and their labels."""

from math import hypot

from rlhf_lab.views.marks import Number, document, element, text
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
    width, height = BOX
    for (x, y), words, lesson in BOXES:
        first, second = words.split("\n")
        place = {"x": x - width / 2, "y": y - height / 2, "width": width, "height": height}
        parts.append(element("rect", "paper s5", rx="6", **place))
        parts.append(text(x, y - 4, first, "title", "middle"))
        parts.append(text(x, y + 13, second, "", "middle"))
        if lesson:
            below = y - 32 if y < 100 else y + 38
            parts.append(text(x, below, f"lesson {lesson}", "soft", "middle"))
    return Picture(document(WIDTH, HEIGHT, "".join(parts), ALT), ALT)


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
