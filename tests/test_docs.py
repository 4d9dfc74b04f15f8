"""Pages in docs/: their names and tests exist, and their programs run."""

import ast
import contextlib
import dataclasses
import functools
import io
import json
import re
import runpy
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from beartype.door import is_bearable

from rlhf_lab.__main__ import parse
from rlhf_lab.compat import trl_stats
from rlhf_lab.config import RLHFArgs
from rlhf_lab.models.families import FAMILIES
from rlhf_lab.training import Cost, LearningStats, PhaseReport, RolloutStats
from tests.pages import DOCS, ROOT, page, quoted, resolve, rows
from tools.reel.__main__ import main as reel

FEATURES = page("features")
OUTSIDE = "## What does not fit this lab"
COMMAND = "python -m "
PROGRAMS = {"rlhf_lab": parse, "tools.reel": reel}


HERE, THERE = FEATURES.split(OUTSIDE)
FEATURE_ROWS = rows(HERE, 4)
PRESENT = [row for row in FEATURE_ROWS if row[1] != "not yet"]


def check_command(program: str, *words: str) -> None:
    """Check that the help of a program has this command and its options."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.raises(SystemExit):
        PROGRAMS[program]([*words, "--help"])
    command = " ".join(word for word in words if not word.startswith("--"))
    assert shown.getvalue().split("usage: ")[1].startswith(f"{program} {command} ")
    assert all(word in shown.getvalue().split() for word in words if word.startswith("--"))


def check_name(name: str) -> None:
    """Check that a name is a command, a field with a valid value, or a path."""
    if name.startswith(COMMAND):
        check_command(*name.removeprefix(COMMAND).split())
    elif name.startswith("RLHFArgs."):
        field, _, value = name.removeprefix("RLHFArgs.").partition("=")
        hints = get_type_hints(RLHFArgs)
        assert field in {f.name for f in dataclasses.fields(RLHFArgs)}, name
        assert not value or is_bearable(ast.literal_eval(value), hints[field]), name
    else:
        resolve(name)


def names_of_ours() -> list[str]:
    """Return all names of this package in features.md, each once."""
    cells = [row[1] for row in PRESENT] + [row[2] for row in rows(THERE, 3)]
    names = (name for cell in cells for name in quoted(cell) if "*" not in name)
    return list(dict.fromkeys(names))


@pytest.mark.parametrize("name", names_of_ours())
def test_name_in_features_exists(name):
    check_name(name)


def test_each_capability_has_a_name_and_a_test_or_not_yet():
    assert len(FEATURE_ROWS) > 120
    for capability, here, shown, _ in FEATURE_ROWS:
        if here == "not yet":
            assert shown == "–", capability
        else:
            assert quoted(here) and quoted(shown), capability
    capabilities = [row[0] for row in FEATURE_ROWS]
    assert all(capabilities)


@functools.cache
def defined_tests(path: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_cited_tests_exist():
    for name in {name for row in PRESENT for name in quoted(row[2])}:
        path, _, test = name.partition("::")
        assert test.startswith("test_") and test in defined_tests(path), name


GUIDES = ("from_trl", "from_arena", "from_torchtune", "from_torchrl", "from_openrlhf")
SHARED = ("from_torchtune", "from_openrlhf")
TRL_HEADING = "## Statistics"


def our_program(guide: str) -> str:
    """Return the last program of a page, after the numbers that both sides share."""
    programs = re.findall(r"```python\n(.*?)```", page(guide), flags=re.DOTALL)
    return programs[0] + programs[-1] if guide in SHARED else programs[-1]


@pytest.fixture
def run_page(tmp_path, monkeypatch):
    """Run our side of a page in an empty directory, and return its names."""

    def run(guide: str) -> dict[str, Any]:
        monkeypatch.chdir(tmp_path)
        defined: dict[str, Any] = {}
        exec(compile(our_program(guide), guide, "exec"), defined)
        return defined

    return run


@pytest.mark.parametrize("guide", GUIDES)
def test_names_in_a_guide_exist(guide):
    names = page(guide).split("## Names")[1].split(TRL_HEADING)[0].split("## Facts")[0]
    cells = [row[1] for row in rows(names, 3)]
    assert len(cells) > 15
    for cell in cells:
        assert quoted(cell)
        for name in quoted(cell):
            check_name(name)


@pytest.mark.slow
def test_coming_from_trl(run_page):
    """The table has all statistics, and its formulas give those of a report."""
    found = run_page("from_trl")
    report, args, stats = found["report"], found["args"], found["stats"]
    table = rows(page("from_trl").split(TRL_HEADING)[1].split("## Facts")[0], 3)
    assert {name for row in table for name in quoted(row[0])} == stats.keys()
    formulas = {quoted(row[0])[0]: quoted(row[1])[0] for row in table if quoted(row[1])}
    of_report = trl_stats(report, args)
    assert formulas.keys() == of_report.keys()
    known = report.to_dict() | report.to_dict()["cost"] | {"vf_coef": args.vf_coef}
    for name, formula in formulas.items():
        assert of_report[name] == pytest.approx(eval(formula, {}, known)), name
    assert stats["ppo/mean_scores"] == pytest.approx(sum(found["scores"]) / 16)
    assert found["trainer"].phase == 2 and 0 < stats["objective/kl"] < 0.5
    assert stats["ppo/policy/approxkl"] < 0.01  # 6.6 with the rates of Reel


def test_coming_from_arena(run_page):
    """One-step advantages add up to reward minus first value, as the sampler recorded them."""
    found = run_page("from_arena")
    samples = found["samples"]
    assert samples.mask.all() and samples.tokens.shape == (8, 3 + 10)
    total = found["rewards"] - found["values"][:, 0]
    torch.testing.assert_close(found["advantages"].sum(1), total, atol=1e-5, rtol=0)
    torch.testing.assert_close(found["logprobs"], samples.logprobs, atol=1e-4, rtol=0)
    torch.testing.assert_close(found["values"], samples.values, atol=1e-4, rtol=0)


# computed token by token from the numbers on the page
LOSSES = {
    "from_torchtune": dict(policy_loss=0.205622, value_loss=0.384578, loss=0.244079),
    "from_openrlhf": dict(policy_loss=0.745417, value_loss=0.374, reward_loss=0.636108),
}


@pytest.mark.parametrize("guide", LOSSES)
def test_losses_of_a_guide_match_hand_computed(run_page, guide):
    found = run_page(guide)
    for name, expected in LOSSES[guide].items():
        assert found[name].item() == pytest.approx(expected, abs=1e-6), name


@pytest.mark.slow
def test_coming_from_torchrl(run_page):
    """Each row gets its clipped reward minus the coefficient times its log-ratios."""
    found = run_page("from_torchrl")
    rollout, samples, coefficient = found["rollout"], found["samples"], found["kl_coef"]
    for i, row in enumerate(samples.mask.tolist()):
        gaps = (samples.logprobs[i] - rollout.ref_logprobs[i]).tolist()
        kl = sum(gap for gap, counts in zip(gaps, row, strict=True) if counts)
        expected = rollout.raw_rewards[i].item() - coefficient * kl
        assert found["reward"][i].sum().item() == pytest.approx(expected, abs=1e-5)
    assert found["reward_kl"].abs().max() > 1e-5 and coefficient != 0.1
    assert found["actions"].shape == found["logprobs"].shape == (16, 8)


@pytest.mark.parametrize("name", ["features", "metrics", *GUIDES])
def test_linked_pages_and_tests_exist(name):
    for link in re.findall(r"\]\(([^)#]+)", page(name)):
        assert (DOCS / link).is_file(), link
    for path in re.findall(r"`(tests/[^`]+\.py)`", page(name)):
        assert (ROOT / path).is_file(), path


def test_linked_sections_of_lessons_exist():
    linked = re.findall(r"\[(\d\d): ([^\]]+)\]\(([^)]+)\)", page("from_arena"))
    assert len(linked) > 30
    for number, heading, link in linked:
        cells = json.loads((DOCS / link).read_text(encoding="utf-8"))["cells"]
        lines = "".join("".join(cell["source"]) + "\n" for cell in cells).splitlines()
        assert Path(link).name.startswith(number) and {f"## {heading}", f"### {heading}"} & {*lines}


def test_page_of_settings_is_up_to_date():
    made = runpy.run_path(str(DOCS / "make_settings.py"))["page"]()
    assert page("settings") == made, "run: python docs/make_settings.py"
    named = [quoted(row[0])[0] for row in rows(made, 5)]
    assert named == [field.name for field in dataclasses.fields(RLHFArgs)]


@pytest.mark.slow
def test_page_of_models_is_up_to_date():
    """Except for the measured gaps, which are below the tolerance of the tests."""
    made = runpy.run_path(str(DOCS / "make_models.py"))
    nothing = dict.fromkeys(FAMILIES, made["Figures"](0.0, 0.0))
    figure = re.compile(r"\d\.\de[+-]\d\d")
    found = page("models")
    assert figure.sub("", found) == figure.sub("", made["page"](nothing)), "run: docs.make_models"
    figures = [float(x) for x in figure.findall(found)]
    assert len(figures) == 2 * len(FAMILIES) and all(0 <= x < 1e-4 for x in figures)


METRICS = {
    "## The phase": PhaseReport,
    "## The rollout": RolloutStats,
    "## Learning": LearningStats,
    "## Cost": Cost,
}


@pytest.mark.parametrize("heading", METRICS)
def test_metrics_page_has_exactly_the_fields(heading):
    table = rows(page("metrics").split(heading + "\n")[1].split("\n## ")[0], 4)
    parts = {"rollout", "learning", "cost", "reward_means"}  # the last by the name of each reward
    fields = [f.name for f in dataclasses.fields(METRICS[heading]) if f.name not in parts]
    assert sorted(quoted(row[0])[0] for row in table) == sorted(fields)
    for _, formula, unit, where in table:
        assert formula and unit
        check_name(quoted(where)[0])


@pytest.mark.slow
def test_line_of_metrics_has_exactly_the_names_of_the_page(run_page):
    line = run_page("from_trl")["trainer"].run.read("metrics.jsonl")[-1]
    tables = rows(page("metrics"), 4)
    assert {quoted(row[0])[0] for row in tables} == (line.keys() - {"cost"}) | line["cost"].keys()
