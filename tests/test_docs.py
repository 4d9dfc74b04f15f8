"""Pages in docs/: their programs run, and those that are made are up to date."""

import dataclasses
import math
import re
import runpy
from typing import Any

import pytest
import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.config.presets import PAPER_METHODS
from rlhf_lab.models.families import FAMILIES
from tools.prose import DOCS, page, quoted, rows

SHARED = ("from_torchtune", "from_openrlhf")
TRL_HEADING = "## Statistics"


@pytest.fixture
def run_page(tmp_path, monkeypatch):
    """Run our side of a page, its last program, in an empty directory, and return its names."""

    def run(guide: str) -> dict[str, Any]:
        monkeypatch.chdir(tmp_path)
        programs = re.findall(r"```python\n(.*?)```", page(guide), flags=re.DOTALL)
        numbers = programs[0] if guide in SHARED else ""  # that both sides share
        defined: dict[str, Any] = {}
        exec(compile(numbers + programs[-1], guide, "exec"), defined)
        return defined

    return run


@pytest.mark.slow
def test_coming_from_trl(run_page):
    """The formulas of the table read fields of the report; those without a difference are equal."""
    found = run_page("from_trl")
    report, args, stats = found["report"], found["args"], found["stats"]
    table = rows(page("from_trl").split(TRL_HEADING)[1].split("## Numerical")[0], 3)
    known = report.to_dict() | report.to_dict()["cost"] | {"vf_coef": args.vf_coef}
    for name, formula, difference in table:
        of_report, of_trl = eval(quoted(formula)[0], {}, known), stats[quoted(name)[0]]
        assert math.isfinite(of_report) and (difference or of_trl == of_report), name
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


def test_program_of_chat_rewards_words_that_are_not_repeated(run_page):
    rollout = run_page("chat")["rollout"]
    prompts = ("the film was", "this movie")
    begins = [next(p for p in prompts if t.startswith(p)) for t in rollout.texts]
    assert len(begins) == 16 and len(set(begins)) == 2
    for prompt, text, reward in zip(begins, rollout.texts, rollout.raw_rewards, strict=True):
        assert reward == -sum(word in prompt.split() for word in text.removeprefix(prompt).split())


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


def test_page_of_settings_is_up_to_date():
    made = runpy.run_path(str(DOCS / "make_settings.py"))["page"]()
    assert page("settings") == made, "run: python docs/make_settings.py"
    fields, methods = made.split("## Methods")
    named = [quoted(row[0])[0] for row in rows(fields, 3)]
    assert named == [field.name for field in dataclasses.fields(RLHFArgs)]
    assert [quoted(row[0])[0] for row in rows(methods, 3)] == list(PAPER_METHODS)


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


@pytest.mark.slow
def test_line_of_metrics_has_exactly_the_names_of_the_page(run_page):
    trainer = run_page("from_trl")["trainer"]
    line = trainer.run.read("metrics.jsonl")[-1]
    tables = rows(page("metrics"), 3)
    cost = line["cost"]
    assert {quoted(row[0])[0] for row in tables} == (line.keys() - {"cost"}) | cost.keys()
    halves = ("rollout", "learning")
    sampled, learned = (cost[f"{x}_seconds"] * cost[f"{x}_tokens_per_second"] for x in halves)
    assert learned / sampled == pytest.approx(trainer.args.batches_per_learning_phase)
