"""TRL's way of working: generate, score by whatever means, step."""

import math

import pytest
import torch

from rlhf_lab.compat import trl_stats
from rlhf_lab.errors import ConfigError
from rlhf_lab.training import RLHFTrainer

QUERIES = ["this movie", "the film was", "this film", "the plot"] * 2
SCORES = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


def ids(trainer: RLHFTrainer, texts: list[str]) -> list[torch.Tensor]:
    """Token ids without BOS."""
    return [torch.tensor(trainer.tokenizer.encode(t, add_special_tokens=False)) for t in texts]


@pytest.mark.slow
def test_responses_come_in_the_kind_of_the_prompts(make_trainer):
    trainer = make_trainer(prepend_bos=False)
    as_texts = trainer.generate(QUERIES)
    again = make_trainer(prepend_bos=False)
    as_ids = again.generate(ids(again, QUERIES))
    assert all(isinstance(text, str) for text in as_texts)
    assert [len(row) for row in as_ids] == [6] * 8
    assert trainer.tokenizer.batch_decode(as_ids, skip_special_tokens=True) == as_texts


@pytest.mark.slow
def test_generating_again_has_other_noise_and_the_same_seed_the_same(make_trainer):
    first, second = make_trainer(), make_trainer()
    texts = [first.generate(QUERIES) for _ in range(2)]
    assert texts[0] != texts[1]
    assert [second.generate(QUERIES) for _ in range(2)] == texts


@pytest.mark.slow
def test_the_noise_of_a_call_is_that_of_no_other_purpose(make_trainer):
    trainer = make_trainer()
    sampled = [text.split()[-6:] for text in trainer.rollout_phase().texts]
    generated = [text.split() for text in trainer.generate([trainer.args.prefix] * 8)]
    assert sampled != generated


def by_hand(trainer: RLHFTrainer, query: list[int], response: list[int]) -> list[float]:
    """Log-probabilities of the response by a forward of its own, in float64."""
    with torch.no_grad():
        logits, _ = trainer.policy(torch.tensor([query + response]))
    logprobs = (logits[0].double() / trainer.args.temperature).log_softmax(-1)
    start = len(query) - 1
    return [logprobs[start + t, token].item() for t, token in enumerate(response)]


@pytest.mark.slow
def test_given_texts_are_scored_as_they_stand(make_trainer):
    """Queries of 2 and 3 words, responses of 1 to 4: padding changes no log-probability."""
    trainer = make_trainer(temperature=0.7, normalize_reward=False, prepend_bos=False, top_k=3)
    responses = ["was good", "bad", "was really fine .", "the plot was"] * 2
    seen = []
    trainer.on("after_score")(lambda ctx: seen.append(ctx.rollout))
    trainer.step(QUERIES, responses, SCORES)
    fresh, (rollout,) = make_trainer(temperature=0.7, prepend_bos=False), seen
    assert rollout.texts == [f"{q} {r}" for q, r in zip(QUERIES, responses, strict=True)]
    assert rollout.raw_rewards.tolist() == SCORES
    for i, (query, response) in enumerate(zip(QUERIES, responses, strict=True)):
        rows = [row.tolist() for row in ids(trainer, [query, response])]
        found = rollout.samples.logprobs[i][rollout.samples.mask[i]].tolist()
        assert found == pytest.approx(by_hand(fresh, *rows), abs=1e-5)


@pytest.mark.slow
def test_a_step_learns_logs_and_saves_like_a_phase(make_trainer, parameters_of):
    trainer = make_trainer(total_phases=3, kl_controller="adaptive")
    before = parameters_of(trainer.policy)
    report = trainer.step(QUERIES, trainer.generate(QUERIES), SCORES)
    after = parameters_of(trainer.policy)
    assert any(not torch.equal(after[name], before[name]) for name in before)
    assert abs(report.ratio_first_minibatch - 1) < 1e-4 and report.kl_per_token < 1e-6
    assert (report.mean_reward, trainer.phase) == (3.5, 1)
    assert trainer.run.read("metrics.jsonl") == [report.to_dict()]
    assert RLHFTrainer.resume(trainer.run.path).phase == 1


def stepped(trainer: RLHFTrainer, phases: int) -> None:
    for _ in range(phases):
        responses = trainer.generate(QUERIES)
        trainer.step(QUERIES, responses, [float(len(text)) for text in responses])


@pytest.mark.slow
def test_a_resumed_run_of_steps_goes_on_bit_for_bit(make_trainer, parameters_of, metrics_of):
    fields = {"total_phases": 3, "reward_scaling": "scale", "normalize_reward": False}
    whole, broken_off = make_trainer(**fields), make_trainer(**fields)
    stepped(whole, 3)
    stepped(broken_off, 2)
    again = RLHFTrainer.resume(broken_off.run.path)
    stepped(again, 1)
    assert metrics_of(again.run.path) == metrics_of(whole.run.path)
    ours, theirs = parameters_of(again.policy), parameters_of(whole.policy)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_stepping_on_scores_of_one_word_makes_it_likelier(make_trainer):
    """Responses with "good" score 1, all others 0."""
    trainer = make_trainer(total_phases=6, base_lr=3e-3, kl_coef=0.0, batch_size=64)
    queries, shares = ["this movie was"] * 64, []
    for _ in range(6):
        responses = trainer.generate(queries)
        good = [float("good" in text.split()) for text in responses]
        shares.append(sum(good) / 64)
        trainer.step(queries, responses, good)
    assert shares[-1] > shares[0] + 0.2


@pytest.mark.slow
def test_trls_names_have_trls_signs_and_units(make_trainer):
    trainer = make_trainer(vf_coef=0.5)
    report = trainer.step(QUERIES, trainer.generate(QUERIES), SCORES)
    stats = trl_stats(report, trainer.args)
    assert stats["ppo/mean_scores"] == 3.5
    assert stats["ppo/std_scores"] == pytest.approx(math.sqrt(6.0))
    assert stats["ppo/loss/policy"] == -report.clipped_surrogate
    assert stats["ppo/loss/value"] == pytest.approx(2 * report.value_loss)
    assert stats["ppo/loss/total"] == -report.objective
    assert stats["tokens/responses_len_mean"] == report.response_length
    assert stats["objective/kl_coef"] == 0.3
    assert all(isinstance(value, float) for value in stats.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("queries", "responses", "scores", "complaint"),
    [
        (QUERIES[:3], QUERIES, SCORES, "queries has 3 entries, but batch_size=8"),
        (QUERIES, QUERIES, SCORES[:7], "scores has 7 entries"),
        (QUERIES, ["", *QUERIES[1:]], SCORES, r"responses\[0\] is empty"),
        (QUERIES, QUERIES, [math.nan, *SCORES[1:]], "nan"),
    ],
)
def test_what_is_not_one_of_each_is_refused(make_trainer, queries, responses, scores, complaint):
    trainer = make_trainer()
    with pytest.raises(ConfigError, match=complaint):
        trainer.step(queries, responses, scores)
    assert trainer.phase == 0


def test_greedy_baselines_and_single_texts_are_refused(make_trainer):
    trainer = make_trainer(advantages="remax", normalize_reward=False)
    with pytest.raises(ConfigError, match="needs scores of greedy answers"):
        trainer.step(QUERIES, QUERIES, SCORES)
    with pytest.raises(ConfigError, match="prompts must be a list"):
        trainer.generate("this movie")
