"""The recipes in docs/recipes: each program runs and prints the output on its page."""

import copy
import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from rlhf_lab import RLHFArgs
from rlhf_lab.course.exercises.toys import toy_transformer
from rlhf_lab.diffing import WeightLine
from rlhf_lab.models import load_model
from tests.tiny_families import random_tokens, tiny_of

RECIPES = Path(__file__).parents[1] / "docs" / "recipes"
PAGES = sorted(path.stem for path in RECIPES.glob("*.md") if path.stem != "index")
assert len(PAGES) >= 8
LONG = "adapter_pieces compare_checkpoints compare_two_models inside_reward_model".split()
LONG += "leading_directions store_and_steer steer_at_equal_kl equal_kl reward_by_layer".split()
LONG += "resume_run own_prompts reader_in_training fisher_information attention_over_phases".split()
LONG += "ablate_head warm_up_value_head".split()
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "console", "text"}


class Step(NamedTuple):
    """Something that a reader runs, and what the page says it prints."""

    arguments: list[str]
    shown: str | None = None


def steps(page: str) -> list[Step]:
    """The programs and commands of a recipe, in its order."""
    found: list[Step] = []
    for language, body in BLOCK.findall(page):
        assert language in LANGUAGES, language
        if language == "python":
            found.append(Step(["-c", body]))
        elif language == "text":
            found[-1] = found[-1]._replace(shown=body)
        else:
            for line in body.splitlines():
                assert line.startswith("python "), line
                found.append(Step(shlex.split(line)[1:]))
    return found


def without_numbers(text: str) -> str:
    """What is printed with its numbers blanked, which differ from one processor to another."""
    return re.sub(r"\d+\.\d+", "N", text)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if x in LONG else []) for x in PAGES]
)
def test_a_recipe_runs_and_prints_what_its_page_shows(name, tmp_path, warm_python):
    text = (RECIPES / f"{name}.md").read_text(encoding="utf-8")
    if "from sae_lens import" in text and importlib.util.find_spec("sae_lens") is None:
        pytest.skip("SAELens is not installed; `pip install sae-lens` to run this recipe")
    found = steps(text)
    assert any(step.shown for step in found), "a recipe shows what it prints"
    for step in found:
        done = warm_python.run(step.arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        if step.shown is not None:
            assert without_numbers(done.stdout) == without_numbers(step.shown)


def functions(name: str) -> dict[str, Any]:
    """The functions of a recipe's program."""
    source = dict(BLOCK.findall((RECIPES / f"{name}.md").read_text(encoding="utf-8")))["python"]
    namespace = {"__name__": name}
    exec(source, namespace)
    return namespace


@pytest.mark.slow
def test_fisher_form_is_the_kl_of_a_small_step(llama_tokenizer):
    model = load_model(tiny_of("GPT2LMHeadModel"), llama_tokenizer)
    moved, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in moved.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=generator)
    recipe, tokens = functions("fisher_information"), random_tokens()[:, :10]
    line = WeightLine(model, moved, in_float64=True)
    whole = recipe["fisher_quadratic"](line, tokens, line.delta).sum()
    small = recipe["kl_of_step"](line, tokens, line.delta, 1e-3).sum()
    assert (small / 1e-6 / whole).item() == pytest.approx(1, abs=5e-3)


@pytest.mark.slow
def test_warm_up_changes_the_value_head_only(tmp_path):
    args = RLHFArgs(preset="reel", total_phases=3, warmup_steps=1, batch_size=8, gen_len=4)
    trainer = functions("warm_up_value_head")["with_warm_up"](args, 2, out=tmp_path / "run")
    before = {name: weight.clone() for name, weight in trainer.policy.named_parameters()}
    changed = []
    for _ in trainer:
        now = trainer.policy.named_parameters()
        changed.append({n.partition(".")[0] for n, x in now if not torch.equal(x, before[n])})
    assert changed == [{"value_head"}, {"value_head"}, {"value_head", "base_model"}]


@torch.no_grad()
def test_lens_divergence_matches_hand_computed():
    """Models of zeros: one gives word 0 ten times the weight of the other ten."""
    models = [toy_transformer(), toy_transformer()]
    for model in models:
        for weight in model.parameters():
            weight.zero_()
    models[0].unembed.b_U[0] = 2.3025851
    kl = functions("lens_by_layer")["lens_divergence"](*models, *torch.randn(2, 2, 1, 3, 8))
    # 1/2 log(11/2) + 10/20 log(11/20)
    torch.testing.assert_close(kl, torch.full((2, 1, 3), 0.5534566), atol=1e-6, rtol=1e-6)
