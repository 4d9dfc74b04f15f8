"""Every reference passes its check; every wrong answer is rejected and named."""

import dataclasses
import inspect
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from torch.distributions import Categorical, kl_divergence

from rlhf_lab import functional as F
from rlhf_lab.course import exercises
from rlhf_lab.course.exercise import Exercise, Slip
from rlhf_lab.course.grading import Judge, verdict_on
from rlhf_lab.course.mutants import mutant
from rlhf_lab.course.registry import all_exercises, find_exercise
from tools.course.stub import solution_source

EXERCISES = all_exercises()


@pytest.mark.slow
@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.name)
def test_the_reference_passes_and_every_wrong_answer_is_rejected_and_named(
    exercise: Exercise,
) -> None:
    assert 1 <= exercise.difficulty <= 5 and 1 <= exercise.minutes <= 40
    assert len({hint.strip() for hint in exercise.hints} - {""}) == 3
    judge = Judge(exercise)
    assert [outcome.error for outcome in judge.expected] == [None] * len(judge.cases)
    assert judge.verdict(exercise.reference).state == "passed"
    for slip in exercise.slips:
        verdict = judge.verdict(mutant(exercise, slip))
        assert (verdict.state, verdict.slip) == ("differs", slip.says)
        assert (verdict.difference.kind == "error") == slip.raises


def test_there_are_at_least_forty_slips_and_two_for_each_exercise() -> None:
    counts = [len(exercise.slips) for exercise in EXERCISES]
    assert sum(counts) >= 40 and min(counts) >= 2


def test_no_two_exercises_have_one_name_in_any_lesson() -> None:
    counts = Counter(exercise.name for exercise in all_exercises())
    assert [name for name, count in counts.items() if count > 1] == []


def test_phrases_are_shared_and_every_file_of_exercises_is_read() -> None:
    """A phrase is for words that two slips or more say; other words stand at their slip."""
    folder = Path(exercises.__path__[0])
    texts = {path.stem: tomllib.loads(path.read_text("utf-8")) for path in folder.glob("*.toml")}
    phrases = texts.pop("phrases")
    slips = [
        slip
        for text in texts.values()
        for written in text.values()
        if isinstance(written, dict)
        for slip in written["slips"]
    ]
    assert len(slips) == sum(len(exercise.slips) for exercise in EXERCISES)
    used = Counter(slip["phrase"] for slip in slips if "phrase" in slip)
    assert {name for name, n in used.items() if n > 1} == phrases.keys()
    said = Counter(slip["says"] for slip in slips if "says" in slip)
    assert said.keys().isdisjoint(phrases.values()) and set(said.values()) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("change", [lambda x: x.detach(), torch.neg, torch.zeros_like])
def test_terms_detached_negated_or_zero_are_rejected_and_named(change) -> None:
    for name in (
        "calc_kl_penalty",
        "calc_entropy_bonus",
        "calc_clipped_surrogate_objective",
        "calc_value_function_loss",
    ):
        exercise = find_exercise(name)
        wrong = lambda reference=exercise.reference, **kwargs: change(reference(**kwargs))
        verdict = verdict_on(exercise, wrong)
        assert verdict.state == "differs" and verdict.slip is not None


def _penalty(kl, kl_coef, mask=None, denominator=None):
    return kl_coef * kl.mean()


def _blanked_penalty(kl, kl_coef, mask=None, denominator=None):
    return kl_coef * F.zero_masked(kl, mask).mean()


def _multiplied_penalty(kl, kl_coef, mask=None, denominator=None):
    mask = torch.ones_like(kl) if mask is None else mask
    return kl_coef * (kl * mask).sum() / (denominator or mask.sum())


def _standardized(reward, eps=1e-5):
    return (reward - reward.mean()) / (reward.std() + eps)


def _plain_mean(x, mask=None, dim=None, denominator=None):
    return x.mean()


def _own_tokens(logits, tokens, prefix_len=None, temperature=1.0):
    start = prefix_len or 1
    logprobs = (logits / temperature).log_softmax(-1)[:, start:]
    return logprobs.gather(-1, tokens[:, start:, None])[..., 0]


def _bonus(entropy, ent_coef, mask=None, denominator=None):
    return ent_coef * entropy.mean()


def _value_loss(factor):
    def loss(values, returns, vf_coef, mask=None, old_values=None, clip=None, denominator=None):
        return factor(vf_coef) * ((values - returns) ** 2).mean()

    return loss


def _masked_mean(x, mask, denominator):
    return F.masked_mean(x, mask, denominator=denominator)


def _smaller_product(ratio, clipped, advantages):
    return torch.minimum(ratio * advantages, clipped * advantages)


def _smaller_ratio(ratio, clipped, advantages):
    return torch.minimum(ratio, clipped) * advantages


def _surrogate(whiten, smaller=_smaller_product, mean=lambda x, mask, denominator: x.mean()):
    def surrogate(
        logprobs,
        old_logprobs,
        advantages,
        clip_coef,
        mask=None,
        normalize=True,
        denominator=None,
        eps=1e-8,
    ):
        if normalize:
            advantages = whiten(advantages, mask)
        ratio = (logprobs - old_logprobs).exp()
        clipped = ratio.clip(1 - clip_coef, 1 + clip_coef)
        return mean(smaller(ratio, clipped, advantages), mask, denominator)

    return surrogate


def _advantages(values, rewards, mask=None):
    return torch.cat([values[:, 1:], rewards[:, None]], dim=1) - values


def _gae(values, token_rewards, gamma=1.0, lam=0.95, mask=None):
    out, last, gen = torch.zeros_like(values), 0, values.shape[1]
    for t in reversed(range(gen)):
        next_value = values[:, t + 1] if t + 1 < gen else 0
        delta = token_rewards[:, t] + gamma * next_value - values[:, t]
        out[:, t] = last = delta + gamma * lam * last
    return out


def _scale(rise, held):
    def scale(phase, warmup_steps, total_phases, final_scale):
        if phase < warmup_steps:
            return rise(phase, warmup_steps)
        progress = (phase - warmup_steps) / (total_phases - warmup_steps)
        return 1 - (1 - final_scale) * (min(1.0, progress) if held else progress)

    return scale


def _logprobs(logits, tokens, prefix_len=None, temperature=1.0):
    start = (prefix_len or 1) - 1
    logprobs = (logits / temperature).softmax(-1).log()
    return logprobs[:, start:-1].gather(-1, tokens[:, start + 1 :, None])[..., 0]


def _logs_of_picked(logits, tokens, prefix_len=None, temperature=1.0):
    start = (prefix_len or 1) - 1
    probs = (logits / temperature).softmax(-1)
    return probs[:, start:-1].gather(-1, tokens[:, start + 1 :, None])[..., 0].log()


def _entropy(logprobs):
    return Categorical(logits=logprobs).entropy()


def _kl(logprobs, ref_logprobs):
    return torch.nn.functional.kl_div(ref_logprobs, logprobs.exp(), reduction="none").sum(-1)


def _kl_of_logs(logprobs, ref_logprobs):
    logs = ref_logprobs, logprobs
    return torch.nn.functional.kl_div(*logs, reduction="none", log_target=True).sum(-1)


def _kl_of_distributions(logprobs, ref_logprobs):
    return kl_divergence(Categorical(logits=logprobs), Categorical(logits=ref_logprobs))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "written", "said"),
    [
        ("calc_kl_penalty", _penalty, "the mask is not used"),
        ("calc_entropy_bonus", _bonus, "the mask is not used"),
        ("calc_value_function_loss", _value_loss(lambda c: 0.5 * c), "the mask is not used"),
        ("calc_value_function_loss", _value_loss(lambda c: c), "the half is missing"),
        ("calc_value_function_loss", _value_loss(lambda c: 0.5), "the coefficient is missing"),
        ("calc_value_function_loss", _value_loss(lambda c: 1), "missing, and so is the half"),
        (
            "calc_clipped_surrogate_objective",
            _surrogate(lambda x, mask: (x - x.mean()) / (x.std() + 1e-8)),
            "the mask is not used",
        ),
        ("calc_clipped_surrogate_objective", _surrogate(F.whiten), "divides by all entries"),
        ("calc_kl_penalty", _blanked_penalty, "divides by all entries"),
        (
            "calc_clipped_surrogate_objective",
            _surrogate(F.whiten, _smaller_ratio, _masked_mean),
            "this takes the smaller ratio",
        ),
        ("calc_kl_penalty", _multiplied_penalty, "this multiplies by the mask"),
        ("normalize_reward", _standardized, "a batch of one reward gives nan"),
        ("masked_mean", _plain_mean, "the mask is not used"),
        ("get_logprobs", _own_tokens, "off by one"),
        (
            "calc_clipped_surrogate_objective",
            _surrogate(lambda x, mask: x),
            "the advantages are not whitened",
        ),
        ("compute_advantages", _advantages, "the mask is not used"),
        ("compute_gae", _gae, "the mask is not used"),
        ("lr_scale", _scale(lambda p, w: p / w, False), "the scale is 0 in phase 0"),
        ("lr_scale", _scale(lambda p, w: p / w, True), "the scale is 0 in phase 0"),
        ("lr_scale", _scale(lambda p, w: (p + 1) / w, False), "the warm-up is one phase too short"),
        ("lr_scale", _scale(lambda p, w: (p + 1) / (w + 1), False), "reached one phase too late"),
        ("get_logprobs", _logprobs, "the logarithm of a softmax"),
        ("get_logprobs", _logs_of_picked, "the logarithm of a softmax"),
        ("entropy_per_token", _entropy, "the log-softmax is taken again"),
        ("kl_per_token", _kl, "the gradient of kl_div is nan"),
        ("kl_per_token", _kl_of_logs, "the last step is missing"),
        ("kl_per_token", _kl_of_distributions, "the log-softmax is taken again"),
    ],
)
def test_what_a_learner_would_write_first_is_named(name: str, written, said: str) -> None:
    """Each ignores the mask, or what is rare, as plain code does; the first thing is named."""
    verdict = verdict_on(find_exercise(name), written)
    assert verdict.state == "differs"
    assert verdict.slip is not None and said in verdict.slip


def test_a_slip_whose_edit_is_not_in_the_reference_is_refused_but_does_not_stop_a_check() -> None:
    exercise = find_exercise("compute_returns")
    stale = Slip("stale", {"no such text": ""})
    with pytest.raises(ValueError, match="'no such text' occurs 0 times in compute_returns"):
        mutant(exercise, stale)
    edited = dataclasses.replace(exercise, slips=(stale, *exercise.slips))
    wrong = mutant(exercise, exercise.slips[0])
    assert verdict_on(edited, wrong).slip == exercise.slips[0].says


@pytest.mark.parametrize("name", [e.name for e in EXERCISES if inspect.isclass(e.reference)])
def test_no_method_of_a_class_is_annotated_with_the_class_itself(name: str) -> None:
    """A cell may be run twice, and the annotation would be held against the class of the first."""
    source = solution_source(find_exercise(name), set())
    annotations = re.findall(r"(?:->|:) *[\"'](\w+)[\"']", source)
    assert name not in annotations


def test_a_policy_defined_twice_can_still_be_moved(tmp_path: Path) -> None:
    shell = InteractiveShell()
    shell.run_cell("%load_ext jaxtyping\n%jaxtyping.typechecker beartype.beartype")
    imports = (
        "import torch\nfrom jaxtyping import Bool, Float, Int\nfrom torch import Tensor, nn\n"
        "from rlhf_lab.course.exercises.toys import toy_transformer\n"
    )
    policy = solution_source(find_exercise("TransformerWithValueHead"), {"torch", "nn", "Tensor"})
    for cell in (imports, *2 * [policy, "TransformerWithValueHead(toy_transformer()).to('cpu')"]):
        shell.run_cell(cell).raise_error()


@pytest.mark.slow
def test_judging_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for name in ("TransformerWithValueHead", "ReplayMemory", "kl_per_token"):
        exercise = find_exercise(name)
        verdict_on(exercise, mutant(exercise, exercise.slips[0]))
    assert torch.equal(before, torch.get_rng_state())
