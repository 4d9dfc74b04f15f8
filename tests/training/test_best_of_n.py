"""The best-of-n command and what it stands on: candidates, figures, the model that is fitted."""

import json
import math

import pytest
import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.organism import Grammar, best_of_n, build_graph, grammar_policy, smoothed, true_reward
from rlhf_lab.rewards import CountReward, ResponseReward
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.best_of_n import (
    Candidates,
    draw_candidates,
    exact_figures,
    mean_and_half,
)
from tests.bad_input.command_outcome import accepted, rejected


def parts_of(reward_fn=None, **fields):
    args = RLHFArgs(**({"preset": "reel", "reward_fn": "smoothed", "batch_size": 8} | fields))
    return RLHFTrainer(args, reward_fn=reward_fn)


@pytest.fixture
def candidates():
    return Candidates(
        prompts=["a", "b", "c"],
        responses=[["1", "2", "3"], ["4", "5", "6"], ["7", "8", "9"]],
        ended=torch.tensor([[True, True, True], [True, True, False], [False, True, True]]),
        rewards=torch.tensor([[0.0, 2.0, 5.0], [1.0, 1.0, 3.0], [9.0, 0.0, 0.0]]),
        true_reward=torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 1.0]]),
    )


def test_figures_by_hand(candidates):
    """Best of 3: 5, 3 and 9, whose true reward is 0; of 1, the means."""
    figures = candidates.figures(3)
    assert (figures.reward, figures.true_reward) == pytest.approx((17 / 3, 0.0))
    assert figures.kl_bound == pytest.approx(math.log(3) - 2 / 3)
    std = math.sqrt(((5 - 17 / 3) ** 2 + (3 - 17 / 3) ** 2 + (9 - 17 / 3) ** 2) / 2)
    assert figures.reward_half == pytest.approx(4.302653 * std / math.sqrt(3))  # t, 2 degrees
    assert mean_and_half(torch.tensor([3.0])) == (3.0, math.inf)
    one = candidates.figures(1)
    assert (one.reward, one.true_reward) == pytest.approx((21 / 9, 4 / 9)) and one.kl_bound == 0


def test_the_best_of_the_first_n_that_ended_is_learned(candidates):
    """Of the first 2: 2 of a, the earlier 4 of b, and 7 of c, which did not end."""
    chosen = candidates.chosen(2)
    assert (chosen.prompts, chosen.texts) == (["a", "b"], ["2", "4"])
    with pytest.raises(ConfigError, match="Only 1 of 3 chosen responses ended"):
        candidates.chosen(3)


def test_answers_stand_with_their_prompts_and_are_judged_each(tmp_path):
    (tmp_path / "p.txt").write_text("the film\nthis movie was\n")
    parts = parts_of(CountReward("the"), prompts=str(tmp_path / "p.txt"), gen_len=6)
    drawn = draw_candidates(parts, 5, 3, seed=1)
    assert len(drawn.prompts) == 5 and set(drawn.prompts) == {"the film", "this movie was"}
    for prompt, answers, rewards in zip(
        drawn.prompts, drawn.responses, drawn.rewards.tolist(), strict=True
    ):
        texts = [prompt + answer for answer in answers]
        assert rewards == CountReward("the")(texts).tolist()
    again = draw_candidates(parts, 5, 3, seed=1)
    assert again.responses == drawn.responses
    assert draw_candidates(parts, 5, 3, seed=2).responses != drawn.responses


def test_a_reward_of_the_whole_batch_is_refused():
    reward = ResponseReward(lambda prompts, responses: [0.0] * len(prompts), whole_batch=True)
    with pytest.raises(ConfigError, match="depends on the whole batch"):
        draw_candidates(parts_of(reward), 2, 2, seed=0)


@pytest.mark.slow
def test_samples_of_the_bundled_model_earn_what_is_exact_for_its_grammar():
    parts = parts_of()
    drawn = draw_candidates(parts, 64, 32, seed=3)
    for n, exact in exact_figures(parts, (1, 4, 16)).items():
        found = drawn.figures(n)
        assert abs(found.reward - exact["exact_reward"]) < 2 * found.reward_half + 0.02
        assert (
            abs(found.true_reward - exact["exact_true_reward"]) < 2 * found.true_reward_half + 0.02
        )
        assert exact["exact_kl"] <= found.kl_bound + 1e-9
    assert drawn.ended.float().mean() > 0.98


def test_the_exact_best_of_one_is_the_policy_and_of_many_the_best_review():
    policy = grammar_policy(build_graph(Grammar()))
    one, many = best_of_n(policy, smoothed, (1, 10**6))
    assert one.kl_per_sequence == pytest.approx(0.0, abs=1e-12)
    assert one.proxy == pytest.approx(policy.mean(smoothed.score(policy.graph.final_features())))
    assert many.proxy == pytest.approx(smoothed.score(policy.graph.final_features()).max())
    assert (
        best_of_n(policy, true_reward, (4,))[0].true_reward
        == best_of_n(policy, true_reward, (4,))[0].proxy
    )


@pytest.mark.parametrize(
    "fields", [{"temperature": 0.5}, {"top_k": 3}, {"prefix": "the film"}, {"gen_len": 6}]
)
def test_what_is_not_whole_reviews_of_the_grammar_has_no_exact_figures(fields):
    assert exact_figures(parts_of(**fields), (2,)) == {}


@pytest.mark.process
def test_through_the_door_of_the_command_line(warm_python, tmp_path):
    """A process measures, writes the figures, and fits a model that a process can sample."""
    out, fit = tmp_path / "figures.json", tmp_path / "fitted"
    words = [
        "best-of-n",
        "reel-nano",
        "--reward-fn",
        "smoothed",
        "--n",
        "1",
        "4",
        "--n-prompts",
        "24",
    ]
    words += ["--out", str(out), "--fit", str(fit), "--steps", "30", "--batch-size", "8"]
    done = warm_python.run(["-m", "rlhf_lab", *words])
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    one, four = found["figures"]
    assert (one["n"], four["n"], found["samples"]) == (1, 4, 8)
    assert four["reward"] > one["reward"] + 0.1 and four["true_reward"] > one["true_reward"] + 0.1
    assert four["kl_bound"] == pytest.approx(math.log(4) - 0.75) and 0 < four["exact_kl"] < 0.64
    assert "fine-tuned on 24 responses, the best of 4" in done.stdout
    assert '"method": "best_of_n"' in (fit / "README.md").read_text()
    drift = json.loads((fit / "tuning.json").read_text())["drift"]
    assert drift["true_reward_after"] > drift["true_reward_before"]
    done = warm_python.run(["-m", "rlhf_lab", "sample", str(fit), "-n", "2", "--prompt", "this"])
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_run_is_sampled_before_or_after_training(tmp_path):
    run, few = str(tmp_path / "run"), ["--n", "1", "2", "--n-prompts", "4"]
    small = "--total-phases 1 --batch-size 16 --gen-len 6 --warmup-steps 0 --base-lr 1e-2".split()
    accepted(["train", "--reward-fn", "count:the", *small, "--out", run])
    before = accepted(["best-of-n", run, *few])
    after = accepted(["best-of-n", run, *few, "--checkpoint", "last"])
    base = ["--reward-fn", "count:the", "--gen-len", "6"]
    untrained = accepted(["best-of-n", "reel-nano", *base, *few])
    assert before.out == untrained.out != after.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--n", "0"], "n=0"),
        (["--n", "4", "--samples", "3"], "samples=3 must be at least n=4"),
        (["--n-prompts", "0"], "n_prompts=0"),
        (["--reward-fn", "diversity:2"], "whole batch"),
        (["--reward-fn", "nothing"], "unknown"),
        (["--out", "no/such/place.json"], "Use a new file"),
        (["--fit", "."], "."),
    ],
)
def test_what_cannot_be_is_refused(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("x")
    rejected(["best-of-n", "reel-nano", *words], said)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
