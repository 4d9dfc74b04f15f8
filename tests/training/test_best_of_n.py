"""Best-of-n: candidates, figures, the command, and the model that is fitted."""

import json
import math

import pytest
import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.organism import Grammar, best_of_n, build_graph, grammar_policy, smoothed
from rlhf_lab.rewards import CountReward, ResponseReward
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.best_of_n import Candidates, draw_candidates, exact_figures
from tests.bad_input.command_outcome import accepted


def make_trainer(reward_fn=None, **fields):
    args = RLHFArgs(**({"preset": "reel", "reward_fn": "smoothed", "batch_size": 8} | fields))
    return RLHFTrainer(args, reward_fn=reward_fn)


CANDIDATES = Candidates(
    prompts=["a", "b", "c"],
    responses=[["1", "2", "3"], ["4", "5", "6"], ["7", "8", "9"]],
    ended=torch.tensor([[True, True, True], [True, True, False], [False, True, True]]),
    rewards=torch.tensor([[0.0, 2.0, 5.0], [1.0, 1.0, 3.0], [9.0, 0.0, 0.0]]),
    true_reward=torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 1.0]]),
)


def test_figures_match_hand_computed():
    """Best of 3: 5, 3 and 9, whose true reward is 0; of 1, the means."""
    three, one = CANDIDATES.figures(3), CANDIDATES.figures(1)
    assert (three["reward"], three["true_reward"]) == pytest.approx((17 / 3, 0.0))
    assert three["kl_bound"] == pytest.approx(math.log(3) - 2 / 3)
    std = math.sqrt(((5 - 17 / 3) ** 2 + (3 - 17 / 3) ** 2 + (9 - 17 / 3) ** 2) / 2)
    assert three["reward_half"] == pytest.approx(4.302653 * std / math.sqrt(3))  # t, 2 degrees
    single = Candidates(["a"], [["1"]], torch.ones(1, 1) > 0, torch.tensor([[3.0]]), None)
    assert single.figures(1) == {"n": 1, "kl_bound": 0.0, "reward": 3.0, "reward_half": math.inf}
    assert (one["reward"], one["true_reward"]) == pytest.approx((21 / 9, 4 / 9))


def test_chosen_is_the_best_of_the_first_n_that_ended():
    """Of the first 2: 2 of a, the earlier 4 of b, and 7 of c, which did not end."""
    chosen = CANDIDATES.chosen(2)
    assert (chosen.prompts, chosen.texts) == (["a", "b"], ["2", "4"])
    with pytest.raises(ConfigError, match="Only 1 of 3 chosen responses ended"):
        CANDIDATES.chosen(3)


@pytest.mark.slow
def test_candidates_have_their_prompts_and_rewards(tmp_path, monkeypatch):
    monkeypatch.setattr("rlhf_lab.training.best_of_n.RESPONSES_AT_ONCE", 3)  # one prompt at a time
    (tmp_path / "p.txt").write_text("the film\nthis movie was\n")
    trainer = make_trainer(CountReward("the"), prompts=str(tmp_path / "p.txt"), gen_len=6)
    drawn, again, other = (draw_candidates(trainer, 5, 3, seed=seed) for seed in (1, 1, 2))
    assert len(drawn.prompts) == 5 and set(drawn.prompts) == {"the film", "this movie was"}
    for prompt, responses, rewards in zip(
        drawn.prompts, drawn.responses, drawn.rewards.tolist(), strict=True
    ):
        assert rewards == CountReward("the")([prompt + text for text in responses]).tolist()
    assert again.responses == drawn.responses != other.responses
    assert len(set(map(tuple, drawn.responses))) == 5
    reward = ResponseReward(lambda prompts, responses: [0.0] * len(prompts), whole_batch=True)
    with pytest.raises(ConfigError, match="depends on the whole batch"):
        draw_candidates(make_trainer(reward), 2, 2, seed=0)


@pytest.mark.slow
def test_exact_best_of_one_is_the_policy_and_of_many_the_best():
    policy = grammar_policy(build_graph(Grammar()))
    one, many = best_of_n(policy, smoothed, (1, 10**6))
    scores = smoothed.score(policy.graph.final_features())
    assert one.kl_per_sequence == pytest.approx(0.0, abs=1e-12)
    assert (one.proxy, many.proxy) == pytest.approx((policy.mean(scores), scores.max()))
    for fields in ({"temperature": 0.5}, {"top_k": 3}, {"prefix": "the film"}, {"gen_len": 6}):
        assert exact_figures(make_trainer(**fields), (2,)) == {}


def test_command_measures_and_fits_a_model_that_can_be_sampled(warm_python, tmp_path):
    out, fit = tmp_path / "figures.json", tmp_path / "fitted"
    words = "best-of-n reel-nano --reward-fn smoothed --n 1 4 --n-prompts 24 --steps 20"
    more = ["--batch-size", "8", "--out", str(out), "--fit", str(fit)]
    done = warm_python.run(["-m", "rlhf_lab", *words.split(), *more])
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
def test_run_is_sampled_before_or_after_training(tmp_path):
    run, few = str(tmp_path / "run"), ["--n", "1", "2", "--n-prompts", "4"]
    small = "--total-phases 1 --batch-size 16 --gen-len 6 --warmup-steps 0 --base-lr 1e-2".split()
    reward = "--reward-fn count:the,sentiment --reward-weights 1 1 --direction neg".split()
    accepted(["train", *reward, *small, "--out", run])
    before = accepted(["best-of-n", run, *few, "--reward-fn", "count:the"])
    after = accepted(["best-of-n", run, *few, "--reward-fn", "count:the", "--checkpoint", "last"])
    assert before.out != after.out
    known = ["--reward-fn", "smoothed", "--gen-len", "26", "--checkpoint", "last"]
    assert "(exact: " not in accepted(["best-of-n", run, *few, *known]).out  # of the grammar
