"""The first lessons in a real JupyterLab: wrong answers are named, right ones turn green."""

import re

import pytest

RIGHT = "reward = at_least_float32(reward)\nreward = reward - reward[:1]\n"
MEAN, STD = "masked_mean(reward)", "masked_std(reward)"
THEMES = ("JupyterLab Dark", "JupyterLab Light")


def test_a_slip_is_named_and_a_right_answer_turns_green(open_notebook, solve, legible, pictures):
    lesson = open_notebook("more/write_the_rest.ipynb")
    for start in ("import importlib.util", "%load_ext jaxtyping", "def normalize_reward("):
        lesson.run(start)  # what lies between needs the exercise before it
    assert "○ normalize_reward  not written yet" in lesson.run("check(normalize_reward)")

    solve(lesson, "normalize_reward", f"{RIGHT}return (reward - {MEAN}) / ({STD} ** 2 + eps)")
    lesson.run("def normalize_reward(")
    shown = lesson.run("check(normalize_reward)")
    assert "✗ normalize_reward" in shown
    assert "likely: this divides by the variance: divide by the standard deviation" in shown
    assert "Traceback" not in shown
    for theme in THEMES:
        lesson.theme(theme)
        legible(lesson.page, ".jp-OutputArea-output")
        lesson.picture(pictures / f"slip_{theme.split()[1]}.png", "check(normalize_reward)")

    slipped = lesson.source("def normalize_reward(")
    lesson.write("def normalize_reward(", slipped.replace("** 2 ", ""))
    lesson.run("def normalize_reward(")
    assert "✓ normalize_reward  8 cases" in lesson.run("check(normalize_reward)")
    mark = lesson.cell("check(normalize_reward)").get_by_text("✓").first
    red, green, blue = mark.evaluate("el => getComputedStyle(el).color.match(/\\d+/g).map(Number)")
    assert green > red and green > blue
    for theme in THEMES:
        lesson.theme(theme)
        legible(lesson.page, ".jp-OutputArea-output")
        lesson.picture(pictures / f"right_{theme.split()[1]}.png", "check(normalize_reward)")


@pytest.mark.nightly
def test_start_runs_once_its_functions_are_written(open_notebook, solve, legible, pictures):
    lesson = open_notebook("00_start.ipynb")
    solve(
        lesson,
        "masked_mean",
        "x = at_least_float32(x)\n"
        "counted = zero_masked(torch.ones_like(x), mask).sum(dim)\n"
        "count = torch.as_tensor(counted if denominator is None else denominator)\n"
        "return zero_masked(x, mask).sum(dim) / count.masked_fill(count == 0, 1)",
    )
    solve(lesson, "my_reward", "return torch.zeros(len(texts), 1)")
    lesson.run_until("check(my_reward)")
    output = lesson.shown("check(my_reward)")
    assert "Type-check error" in output and "Traceback" not in output

    counts = "torch.tensor([1.0 * t.count('superb') for t in texts])"
    zeros = lesson.source("def my_reward(").replace("torch.zeros(len(texts), 1)", counts)
    lesson.write("def my_reward(", zeros)
    asked = lesson.source("which_mean = predictions")
    lesson.write("which_mean = predictions", asked.replace("...", '"38 / 9"'))
    lesson.run_all()
    progress = lesson.done("predictions.show()")
    for name in ("masked_mean", "my_reward"):
        assert re.search(rf"{name} .* ✓ passed", progress)
    assert "as you predicted" in lesson.shown("nearest = ")
    assert re.search(r"with penalty: reward \d", lesson.shown("for report in trainer"))
    for theme in THEMES:
        lesson.theme(theme)
        legible(lesson.page, ".jp-OutputArea-output")
        lesson.picture(pictures / f"start_{theme.split()[1]}.png", "for report in trainer")
        lesson.picture(pictures / f"progress_{theme.split()[1]}.png", "predictions.show()")
