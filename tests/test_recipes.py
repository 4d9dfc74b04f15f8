"""The recipes in docs/recipes: each program runs and prints the output on its page."""

import copy
import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course.exercises.toys import toy_transformer
from rlhf_lab.diffing import WeightLine
from rlhf_lab.functional import kl_per_token, log_probs
from rlhf_lab.models import load_model
from tests.tiny_families import random_tokens, tiny_of

RECIPES = Path(__file__).parents[1] / "docs" / "recipes"
PAGES = sorted(path.stem for path in RECIPES.glob("*.md") if path.stem != "index")
assert len(PAGES) >= 8
DAILY = "attach_probe export_model from_ppo_config lens_by_layer own_reward sae_dictionary".split()
DAILY += ["watch_activation"]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "console", "text"}


class Step(NamedTuple):
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
    "name", [pytest.param(x, marks=[] if x in DAILY else pytest.mark.nightly) for x in PAGES]
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


def test_value_rows_match_hand_computed():
    """V = 2 relu(x - 1) - relu(-x) + 3; from a mean of -1 to 3 by parts that move by 1 and by 3.

    The first unit rises from 0 to 2 over 4: slope 1/2, times 2. The second falls from 1 to 0: slope
    -1/4, times -1. Each unit of x contributes 1.25, from V = 2 to V = 7.
    """
    head = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))
    values = ([[1.0], [-1.0]], [-1.0, 0.0], [[2.0, -1.0]], [3.0])
    with torch.no_grad():
        for weight, value in zip(head.parameters(), values, strict=True):
            weight.copy_(torch.tensor(value))
        parts = torch.tensor([[[1.0], [-1.0]], [[2.0], [-4.0]]]).double()
        rows, base = functions("value_by_component")["secant_value_rows"](head, parts)
    assert base.item() == 2 and rows[:, 0].tolist() == pytest.approx([1.25, 3.75])


@pytest.mark.slow
def test_gradients_of_terms_sum_to_the_trainers(tmp_path):
    args = RLHFArgs(preset="reel", total_phases=2, batch_size=8, gen_len=4, ent_coef=0.01)
    trainer, gaps = RLHFTrainer(args, out=tmp_path / "run"), []
    recipe = functions("gradient_terms")

    @trainer.on("after_backward")
    def compare(ctx):
        found = recipe["term_gradients"](trainer, ctx)
        assert found.keys() == recipe["TERMS"].keys()
        for name, weight in ctx.policy.named_parameters():
            total = sum(gradient[name] for gradient in found.values())
            gaps.append((total - weight.grad).abs().max().item())

    recipe["record_gradients"](trainer)
    trainer.train()
    assert len(gaps) > 20 and max(gaps) < 1e-6


def test_kl_by_component_finds_the_changed_mlp(llama_tokenizer):
    """Both splits of a changed MLP: all KL is by its weights and its output."""
    model = load_model(tiny_of("LlamaForCausalLM"), llama_tokenizer)
    moved, tokens = copy.deepcopy(model), random_tokens()[:, :12]
    with torch.no_grad():
        moved.blocks[1].mlp.W_out += 0.5
    states = torch.arange(12) < torch.tensor([11, 5, 8])[:, None]
    split, kl = functions("kl_by_component")["kl_by_component"](model, moved, tokens, states)
    exact = kl_per_token(*(log_probs(x(tokens).double()) for x in (moved, model)))
    assert kl == pytest.approx(exact[states].sum().item() / 3, rel=1e-4)
    for column in split.values():
        assert sum(column.values()) == pytest.approx(kl, rel=1e-3)
    assert split["weights"]["L1 mlp"] == pytest.approx(kl, rel=1e-3)
    assert split["output"]["L0 mlp"] == split["output"]["unembed"] == 0 < split["output"]["L1 mlp"]


@pytest.mark.slow
def test_probes_of_the_carry_find_a_written_label():
    """A hook adds a label to the residual stream after the first attention, at the last token."""
    recipe, model = functions("sums_carry"), load_model("sums-nano")
    tokens, pos, labels = recipe["probe_cases"](300, np.random.default_rng(0))["false c1 at #"]
    rows = iter(labels.split(64))

    def add_label(x, hook):
        x = x.clone()
        x[:, -1] += 5.0 * next(rows)[:, None] * torch.linspace(-1, 1, x.shape[-1])
        return x

    found = [recipe["probe_accuracy"](model, tokens, pos, labels)]
    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_mid", add_label)]):
        found.append(recipe["probe_accuracy"](model, tokens, pos, labels))
    without, written = (accuracies for accuracies, _ in found)
    assert without["0 pre"] == written["0 pre"] == pytest.approx(0.5, abs=0.1)
    assert max(without.values()) < 0.7
    assert written["0 mid"] == 1.0 and written["1 post"] > 0.95
    assert all(shuffled < 0.7 for _, shuffled in found)


def test_effects_of_tokens_are_summed_by_kind():
    """Four responses to 66 + 39: right, a lost carry, a wrong answer, and no steps."""
    responses = (
        "so 6 9 0 1 5 ; 6 3 1 1 0 ; 0 0 1 0 1 ; 0 0 0 0 0 ; # 0 1 0 5 <eos>",
        "so 6 9 0 1 5 ; 6 3 0 0 9 ; 0 0 0 0 0 ; 0 0 0 0 0 ; # 0 0 9 5 <eos>",
        "so 6 9 0 1 5 ; 6 3 1 1 0 ; 0 0 1 0 1 ; 0 0 0 0 0 ; # 0 1 0 4 <eos>",
        "so # 0 0 9 5 <eos>",
    )
    spelled = [f"<bos> 0 0 6 6 + 0 0 3 9 = {response}".split() for response in responses]
    spelled = [row + ["<eos>"] * (43 - len(row)) for row in spelled]
    rows = torch.zeros(2, 4, 32)
    rows[0, :, 0] = torch.tensor([1.0, 2.0, 4.0, 8.0])  # the openers
    rows[1, :, 9] = torch.tensor([10.0, 20.0, 40.0, 80.0])  # c1
    rows[1, 0, 15] = 0.5  # c2
    recipe = functions("sums_training")
    found = recipe["effect_by_kind"]({"tokens": spelled, "prefix_len": 11}, rows)
    expected = {"carry kept, right": 10.5, "carry kept, wrong": 40.0, "carry dropped": 20.0}
    assert found == pytest.approx(expected | {"other digit": 7.0, "no steps": 88.0})
    texts = recipe["carry_texts"](20, np.random.default_rng(0))
    assert texts.shape == (20, 20)  # up to b1: the next token is c1
