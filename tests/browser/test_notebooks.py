"""A lesson in a real JupyterLab: a wrong answer is named, a right one turns green."""

RIGHT = "reward = at_least_float32(reward)\nreward = reward - reward[:1]\n"
MEAN, STD = "masked_mean(reward)", "masked_std(reward)"
THEMES = ("JupyterLab Dark", "JupyterLab Light")


def test_a_slip_is_named_and_a_right_answer_turns_green(open_notebook, legible, pictures):
    lesson = open_notebook("more/write_the_rest.ipynb")
    for start in ("import importlib.util", "%load_ext jaxtyping", "def normalize_reward("):
        lesson.run(start)  # what lies between needs the exercise before it
    assert "○ normalize_reward  not written yet" in lesson.run("check(normalize_reward)")

    stub = lesson.source("def normalize_reward(")
    body = f"{RIGHT}return (reward - {MEAN}) / ({STD} ** 2 + eps)".replace("\n", "\n    ")
    lesson.write("def normalize_reward(", stub.replace("raise NotImplementedError", body))
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
