"""Diagrams for the lessons, as templates of boxes and arrows."""

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from rlhf_lab.views.marks import Number
from rlhf_lab.views.pictures import Picture
from rlhf_lab.views.templates import render

LOOP = (
    "The loop of RLHF: the policy continues a prompt; the reward scores the text; the value head "
    "turns the score into an advantage per token; the objective weighs the advantages, minus the "
    "KL from the frozen reference; a gradient step changes the policy."
)
GAE = "From the last token to the first: an advantage is the error δ plus the next advantage × λ."


def loop_diagram() -> Picture:
    """Draw the loop of RLHF, with the lesson of each component."""
    return _diagram("loop.html", 380, LOOP)


def gae_diagram(rewards: Sequence[Number], values: Sequence[Number], decay: Number) -> Picture:
    """Draw the backward pass of GAE; gamma is 1, and decay is lambda."""
    return _diagram("gae.html", 162, GAE, rewards=rewards, values=values, decay=decay)


def patch_diagram(runs: Sequence[str], steps: Sequence[tuple[str, str]], patched: int) -> Picture:
    """Draw two runs on one text; the first run's output of a step replaces the second's."""
    alt = f"An activation of the {runs[0]} replaces that of the {runs[1]}."
    return _diagram("patch.html", 162, alt, runs=runs, steps=steps, patched=patched)


def _diagram(template: str, height: Number, alt: str, **values: Any) -> Picture:
    return Picture((880, height), [Markup(render(template, **values).replace("\n", ""))], alt)
