"""TRL's way of working: generate, score by whatever means, step."""

import json
import math
import warnings

import pytest
import torch
from tensorboard.backend.event_processing import event_accumulator

from rlhf_lab.compat import trl_stats
from rlhf_lab.errors import ConfigError
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.sinks import Sink

pytestmark = pytest.mark.typed

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
def test_one_prompt_as_a_tensor_is_answered_by_one_row(make_trainer):
    """TRL's documented call: a tensor with one dimension is one prompt, not one for each id."""
    trainer, same = make_trainer(), make_trainer()
    prompt = ids(trainer, ["this film"])[0]
    answer = trainer.generate(prompt)
    assert answer.shape == (1, 6)
    assert torch.equal(answer[0], same.generate([prompt])[0])
    whole = trainer.generate(prompt, return_prompt=True)
    assert whole.shape == (1, len(prompt) + 6) and torch.equal(whole[0, : len(prompt)], prompt)


@pytest.mark.slow
def test_prompts_come_along_when_asked_for_without_their_padding(make_trainer):
    trainer, same = make_trainer(), make_trainer()
    prompts = ids(trainer, ["this film", "the film was really"])
    whole = trainer.generate(prompts, return_prompt=True)
    answers = same.generate(prompts)
    for prompt, answer, both in zip(prompts, answers, whole, strict=True):
        assert torch.equal(both, torch.cat([prompt, answer]))
    texts = make_trainer(prepend_bos=False).generate(["this film"], return_prompt=True)
    assert texts[0].startswith("this film ")


@pytest.mark.slow
def test_settings_of_one_call_leave_the_next_as_it_was(make_trainer):
    trainer, plain = make_trainer(), make_trainer()
    greedy = trainer.generate(QUERIES, do_sample=False, max_new_tokens=3)
    assert len({text for text in greedy[:4]}) > 1  # other prompts, other answers
    assert greedy[:4] == greedy[4:]
    assert trainer.generate(QUERIES, top_k=1, max_new_tokens=3) == greedy
    assert trainer.generate(QUERIES, temperature=1e-4, max_new_tokens=3) == greedy
    rows = trainer.generate(ids(trainer, QUERIES), length_sampler=lambda: 4, batch_size=3)
    assert [len(row) for row in rows] == [4] * 8
    plain.generated = trainer.generated
    assert trainer.generate(QUERIES) == plain.generate(QUERIES)


@pytest.mark.slow
def test_trls_usual_settings_are_those_of_a_plain_call(make_trainer):
    trainer, plain = make_trainer(), make_trainer()
    usual = dict(min_length=-1, top_k=0.0, top_p=1.0, do_sample=True, pad_token_id=0)
    assert trainer.generate(QUERIES, **usual) == plain.generate(QUERIES)


@pytest.mark.slow
def test_a_call_can_stop_at_tokens_of_its_own(make_trainer):
    trainer = make_trainer()
    prompts = ids(trainer, QUERIES)
    stop = trainer.generate(prompts, do_sample=False)[0][1].item()
    rows = trainer.generate(prompts, do_sample=False, eos_token_id=stop)
    assert rows[0].tolist()[-1] == stop and len(rows[0]) == 2
    assert all(stop not in row.tolist()[:-1] for row in rows)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"num_beams": 4}, "does not take num_beams=4"),
        ({"repetition_penalty": 1.2}, "does not take repetition_penalty"),
        ({"min_length": 5}, "does not take min_length=5"),
        ({"generate_ref_response": True}, "does not take generate_ref_response"),
        ({"max_new_tokens": 0}, "gen_len=0 is out of range"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(make_trainer, settings, complaint):
    trainer = make_trainer()
    with pytest.raises(ConfigError, match=complaint):
        trainer.generate(QUERIES, **settings)


def info_of(trainer: RLHFTrainer) -> dict:
    return json.loads((trainer.run.path / "run.json").read_text())


@pytest.mark.slow
def test_finish_ends_a_run_of_steps(make_trainer):
    """Saved though not due, told once to who listens, and the directory is let go of."""
    trainer, ends = make_trainer(total_phases=9, save_every=5), []
    trainer.on("run_end")(lambda ctx: ends.append([report.phase for report in ctx.reports]))
    stepped(trainer, 2)
    trainer.finish()
    trainer.finish()
    assert ends == [[0, 1]]
    info = info_of(trainer)
    assert (info["status"], info["phases_done"], info.get("final")) == ("finished", 2, None)
    assert not (trainer.run.path / "run.lock").exists()
    assert RLHFTrainer.resume(trainer.run.path).phase == 2
    stepped(trainer, 1)
    trainer.finish()
    assert ends == [[0, 1], [2]] and RLHFTrainer.resume(trainer.run.path).phase == 3


@pytest.mark.slow
def test_steps_beyond_the_last_phase_go_on_at_its_rates_with_one_warning(make_trainer):
    """total_phases=3 with final_scale=0.1: the rates stay at a tenth of 1e-3."""
    trainer = make_trainer(total_phases=3, warmup_steps=0, base_lr=1e-3, final_scale=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stepped(trainer, 3)
    with pytest.warns(UserWarning, match="beyond total_phases=3, where the schedule") as told:
        stepped(trainer, 2)
    assert len([each for each in told if "total_phases" in str(each.message)]) == 1
    trainer.finish()
    lines = trainer.run.read("metrics.jsonl")
    assert [line["phase"] for line in lines] == [0, 1, 2, 3, 4]
    assert [line["base_lr"] for line in lines] == pytest.approx([1e-3, 5.5e-4, 1e-4, 1e-4, 1e-4])
    longer = RLHFTrainer.resume(trainer.run.path, {"total_phases": 9})
    assert longer.phase == 5 and info_of(trainer)["status"] == "finished"


@pytest.mark.slow
def test_a_with_statement_finishes_and_an_error_lets_the_run_go(make_trainer):
    with make_trainer(total_phases=4) as trainer:
        stepped(trainer, 1)
    assert info_of(trainer)["status"] == "finished"
    with pytest.raises(ZeroDivisionError), make_trainer(total_phases=4) as broken:
        stepped(broken, 1)
        raise ZeroDivisionError
    assert info_of(broken)["status"] == "running"
    assert not (broken.run.path / "run.lock").exists()
    assert RLHFTrainer.resume(broken.run.path).phase == 1


@pytest.mark.slow
def test_an_iteration_that_was_left_is_finished_too(make_trainer):
    with make_trainer(total_phases=4, save_every=4) as trainer:
        for _ in trainer:
            break
    assert info_of(trainer)["status"] == "stopped"
    assert RLHFTrainer.resume(trainer.run.path).phase == 1


@pytest.mark.slow
def test_finish_closes_the_loggers(make_trainer):
    trainer = make_trainer(total_phases=4, loggers="tensorboard")
    stepped(trainer, 2)
    trainer.finish()
    reader = event_accumulator.EventAccumulator(str(trainer.run.path / "tensorboard"))
    assert len(reader.Reload().Scalars("mean_reward")) == 2
    sinks = [each for each in trainer.callbacks.listeners() if isinstance(each, Sink)]
    assert [sink.state for sink in sinks] == ["closed"] * len(sinks) and sinks


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
        (
            QUERIES,
            QUERIES,
            [*SCORES[:2], math.nan, *SCORES[3:]],
            r"scores\[2\] must be a finite number, got nan",
        ),
        (
            QUERIES,
            QUERIES,
            [math.inf, *SCORES[1:]],
            r"scores\[0\] must be a finite number, got inf",
        ),
        (
            [torch.ones(1, 3, dtype=torch.int64)] * 8,
            QUERIES,
            SCORES,
            r"queries\[0\]=.* has the shape \(1, 3\)",
        ),
    ],
)
def test_what_is_not_one_of_each_is_refused(make_trainer, queries, responses, scores, complaint):
    trainer = make_trainer()
    with pytest.raises(ConfigError, match=complaint):
        trainer.step(queries, responses, scores)
    assert trainer.phase == 0


def test_ids_of_one_text_are_not_taken_for_texts(make_trainer, no_type_checks):
    trainer = make_trainer()
    with pytest.raises(ConfigError, match=r"queries\[0\]=0 has the shape \(\)"):
        trainer.step(list(range(8)), QUERIES, SCORES)
    with pytest.raises(ConfigError, match=r"prompts\[0\]=3 has the shape \(\)"):
        trainer.generate([3, 4, 5])


def test_greedy_baselines_and_single_texts_are_refused(make_trainer):
    trainer = make_trainer(advantages="remax", normalize_reward=False)
    with pytest.raises(ConfigError, match="needs scores of greedy responses"):
        trainer.step(QUERIES, QUERIES, SCORES)
    with pytest.raises(ConfigError, match="prompts must be a list"):
        trainer.generate("this movie")
