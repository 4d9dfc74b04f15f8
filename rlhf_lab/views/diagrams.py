"""Diagrams of the lessons, drawn by matplotlib: boxes, arrows and the words on them."""

from typing import TYPE_CHECKING

from rlhf_lab.views.picture import Picture
from rlhf_lab.views.plots import COLORS, blank, finish

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Spot = tuple[float, float]
INK = "#222222"
BOXES: dict[str, tuple[Spot, str, str]] = {
    "prompt": ((0.6, 2.6), "prompt\n“this movie”", ""),
    "policy": ((2.6, 2.6), "policy\nwrites a review", "00"),
    "reward": ((5.2, 2.6), "reward\none number", "00"),
    "credit": ((7.6, 2.6), "credit\nadvantage per token", "03"),
    "reference": ((2.6, 0.6), "reference\nfrozen copy", "04"),
    "value": ((5.2, 0.6), "value head\nwhat to expect", "02"),
    "objective": ((7.6, 0.6), "objective\nto be maximised", "05"),
}
ARROWS: tuple[tuple[str, str, str], ...] = (
    ("prompt", "policy", ""),
    ("policy", "reward", "text"),
    ("reward", "credit", ""),
    ("value", "credit", ""),
    ("credit", "objective", ""),
    ("policy", "value", "residual\nstream"),
)


def loop_diagram() -> Picture:
    """The loop of RLHF: what is handed from where to where, with the lesson of each part."""
    figure, axes = blank(8.6, 3.6)
    axes.set_axis_off()
    axes.set_xlim(-0.5, 9.0)
    axes.set_ylim(-0.9, 3.5)
    for place, words, lesson in BOXES.values():
        _box(axes, place, words, lesson)
    for start, end, words in ARROWS:
        _arrow(axes, BOXES[start][0], BOXES[end][0], words)
    leash = {
        "arrowstyle": "<->",
        "color": COLORS[1],
        "linestyle": "--",
        "shrinkA": 22,
        "shrinkB": 22,
    }
    axes.annotate("", BOXES["policy"][0], BOXES["reference"][0], arrowprops=leash)
    axes.text(
        2.5,
        1.6,
        "KL: the leash,\na term of the\nobjective",
        color=COLORS[1],
        ha="right",
        va="center",
        fontsize=9,
    )
    step = {"arrowstyle": "->", "color": COLORS[2], "linewidth": 1.6}
    axes.plot([7.6, 7.6, 0.6, 0.6], [-0.12, -0.55, -0.55, 1.2], color=COLORS[2], linewidth=1.6)
    axes.annotate("", (0.6, 2.15), (0.6, 1.1), arrowprops=step)
    axes.text(
        4.2,
        -0.8,
        "gradient step (06), then the next phase with the changed policy",
        color=COLORS[2],
        fontsize=9,
        ha="center",
    )
    return finish(
        figure,
        "The loop of RLHF: a prompt goes to the policy, which writes a text; the reward scores it; "
        "the value head turns the score into an advantage per token; the objective weighs them, "
        "with the KL from the frozen reference as a leash; a gradient step changes the policy.",
    )


def _box(axes: "Axes", place: Spot, words: str, lesson: str) -> None:
    frame = {
        "boxstyle": "round,pad=0.45",
        "facecolor": "#F3F6FA",
        "edgecolor": INK,
        "linewidth": 0.8,
    }
    axes.text(*place, words, ha="center", va="center", fontsize=9, color=INK, bbox=frame)
    if lesson:
        y = place[1] + (0.55 if place[1] > 1 else -0.65)
        axes.text(place[0], y, f"lesson {lesson}", ha="center", fontsize=7, color=COLORS[0])


def _arrow(axes: "Axes", start: Spot, end: Spot, words: str) -> None:
    look = {"arrowstyle": "->", "color": INK, "shrinkA": 44, "shrinkB": 48}
    if start[0] == end[0]:
        look |= {"shrinkA": 20, "shrinkB": 30}
    axes.annotate("", end, start, arrowprops=look)
    if words:
        middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 0.12
        axes.text(*middle, words, fontsize=8, color=INK, ha="center", va="bottom")
