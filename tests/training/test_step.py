"""TRL's way of working: generate, score by any means, step, finish."""

import dataclasses
import math
import warnings

import pytest
import torch

from rlhf_lab.compat.trl import generation_spec
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.sampling import SamplingSpec
from rlhf_lab.training import RLHFTrainer
from tests.training.recorded_runs import copy_weights, is_equal, tensorboard_events

pytestmark = [pytest.mark.slow, pytest.mark.typed]

QUERIES = ["this movie", "the film was", "this film", "the plot"] * 2
SCORES = [float(n) for n in range(8)]


def encode(trainer: RLHFTrainer, texts: list[str]) -> list[torch.Tensor]:
    """Return token ids without BOS."""
    return [torch.tensor(trainer.tokenizer.encode(t, add_special_tokens=False)) for t in texts]


def take_steps(trainer: RLHFTrainer, phases: int) -> None:
    for _ in range(phases):
        responses = trainer.generate(QUERIES)
        trainer.step(QUERIES, responses, [float(len(text)) for text in responses])


def test_generate_returns_what_it_gets(make_trainer):
    """Texts for texts and ids for ids; for one prompt as a tensor, one row, as TRL documents it."""
    trainer = make_trainer(prepend_bos=False)
    prompts = encode(trainer, QUERIES)

    def generate(prompts, **settings):
        trainer.generated = 0  # the same noise
        return trainer.generate(prompts, **settings)

    texts, rows = generate(QUERIES), generate(prompts)
    assert all(isinstance(text, str) for text in texts) and [len(row) for row in rows] == [6] * 8
    assert trainer.tokenizer.batch_decode(rows, skip_special_tokens=True) == texts
    whole = generate(prompts, return_prompt=True)
    for prompt, response, both in zip(prompts, rows, whole, strict=True):
        assert torch.equal(both, torch.cat([prompt, response]))
    response, several = generate(prompts[0]), generate(prompts[:1])
    assert response.shape == (1, 6) and torch.equal(response[0], several[0])
    assert generate(["this film"], return_prompt=True)[0].startswith("this film ")
    assert generate(QUERIES) != trainer.generate(QUERIES)  # other noise


def test_generate_applies_settings_to_one_call(make_trainer):
    spec = SamplingSpec(gen_len=6, temperature=0.7, top_k=5, top_p=0.9, stop_at_eos=True)
    for settings, changes in (
        (dict(min_length=-1, do_sample=True, pad_token_id=0, eos_token_id=None), {}),
        (dict(max_new_tokens=3, temperature=2.0), {"gen_len": 3, "temperature": 2.0}),
        (dict(top_k=0.0, top_p=1.0), {"top_k": None, "top_p": None}),
        (dict(top_k=2, top_p=0.5), {"top_k": 2, "top_p": 0.5}),
        (dict(do_sample=False), {"top_k": 1, "top_p": None}),
        (dict(eos_token_id=[7, -1]), {"stop_tokens": (7,), "stop_at_eos": False}),
    ):
        assert generation_spec(spec, settings) == dataclasses.replace(spec, **changes)
    trainer, sizes = make_trainer(), set()
    trainer.policy.base_model.add_hook("hook_embed", lambda x, hook: sizes.add(len(x)))
    first = trainer.generate(QUERIES, do_sample=False, length_sampler=lambda: 4, batch_size=3)
    assert max(sizes) == 3
    trainer.policy.base_model.reset_hooks()
    assert first == trainer.generate(QUERIES, top_k=1, max_new_tokens=4)
    assert len(set(first[:4])) > 1 and first[:4] == first[4:]
    trainer.generated = 0
    texts = trainer.generate(QUERIES)
    assert not set(texts) & set(make_trainer({"prompts": QUERIES}).rollout_phase().texts)


def test_finish_saves_and_ends_a_run_of_steps(make_trainer):
    """A run of steps resumes bitwise; a tenth of 1e-3 is the rate beyond the last phase."""
    fields = {"total_phases": 2, "warmup_steps": 0, "base_lr": 1e-3, "final_scale": 0.1}
    fields |= {"save_every": 5, "reward_scaling": "scale", "normalize_reward": False}
    trainer, whole, ends = make_trainer(loggers="tensorboard", **fields), make_trainer(**fields), []
    trainer.on("run_end")(lambda ctx: ends.append([report.phase for report in ctx.reports]))
    take_steps(trainer, 2)
    trainer.finish()
    trainer.finish()
    assert ends == [[0, 1]] and trainer.sinks[0].state == "closed"
    info = trainer.run.read_info()
    assert (info["status"], info["phases_done"], info.get("final")) == ("finished", 2, None)
    assert not (trainer.run.path / "run.lock").exists()
    assert len(tensorboard_events(trainer.run.path).Scalars("mean_reward")) == 2
    resumed = RLHFTrainer.resume(trainer.run.path)
    for each, steps in ((whole, 4), (resumed, 2)):
        with pytest.warns(UserWarning, match="beyond total_phases=2, where the sch") as caught:
            take_steps(each, steps)
        assert len([x for x in caught if "total_phases" in str(x.message)]) == 1
    assert is_equal(copy_weights(resumed.policy), copy_weights(whole.policy))
    rates = [line["base_lr"] for line in resumed.run.read("metrics.jsonl")]
    assert rates == pytest.approx([1e-3, 1e-4, 1e-4, 1e-4])


def test_with_finishes_the_run_and_unlocks_it_after_an_error(make_trainer):
    """Also if a save in progress fails."""
    with make_trainer(total_phases=4) as trainer:
        take_steps(trainer, 1)
    assert trainer.run.read_info()["status"] == "finished"
    broken, stopped = (make_trainer(total_phases=4, save_every=4) for _ in range(2))
    with pytest.raises(ZeroDivisionError), broken:
        take_steps(broken, 1)
        raise ZeroDivisionError
    assert broken.run.read_info()["status"] == "failed"
    assert not (broken.run.path / "run.lock").exists()
    take_steps(stopped, 1)
    stopped.recorder.writer.start(stopped.run.checkpoints, lambda: 1 / 0)
    with pytest.warns(UserWarning, match="division"), pytest.raises(KeyboardInterrupt), stopped:
        raise KeyboardInterrupt
    assert stopped.run.read_info()["status"] == "stopped"
    with make_trainer(total_phases=4, save_every=4) as left:
        for _ in left:
            break
    assert left.run.read_info()["status"] == "stopped"
    assert RLHFTrainer.resume(left.run.path).phase == 1


def test_error_of_an_older_trainer_keeps_the_status(make_trainer):
    older = make_trainer(total_phases=4, save_every=1)
    take_steps(older, 1)
    late, newer = (RLHFTrainer.resume(older.run.path) for _ in range(2))
    newer.start()
    with pytest.raises(RunError, match="Another trainer has taken over"):
        take_steps(older, 1)
    assert newer.run.read_info()["status"] == "running"
    with pytest.raises(KeyboardInterrupt), newer:
        raise KeyboardInterrupt
    assert newer.run.read_info()["status"] == "stopped"
    with RLHFTrainer.resume(older.run.path) as newest:
        take_steps(newest, 1)
    with pytest.raises(RunError, match="of phase 2 now, not of 1: another trainer has continued"):
        late.start()


def test_step_scores_the_texts_as_they_are(make_trainer):
    """Queries of 2 and 3 words, responses of 1 to 4: padding changes no log-probability."""
    trainer = make_trainer(temperature=0.7, normalize_reward=False, prepend_bos=False, top_k=3)
    responses = ["was good", "bad", "was really fine .", "the plot was"] * 2
    fresh, seen = make_trainer(prepend_bos=False).policy, []
    trainer.on("after_score")(lambda ctx: seen.append(ctx.rollout))
    report, (rollout,) = trainer.step(QUERIES, responses, SCORES), seen
    assert (report.mean_reward, trainer.phase) == (3.5, 1)
    assert report.reward_std == pytest.approx(math.sqrt(6.0))
    assert abs(report.ratio_first_minibatch - 1) < 1e-4 and report.kl_per_token < 1e-6
    assert trainer.run.read("metrics.jsonl") == [report.to_dict()]
    assert not is_equal(copy_weights(trainer.policy), copy_weights(fresh))
    assert rollout.texts == [f"{q} {r}" for q, r in zip(QUERIES, responses, strict=True)]
    assert rollout.raw_rewards.tolist() == SCORES
    for i, texts in enumerate(zip(QUERIES, responses, strict=True)):
        query, response = encode(trainer, texts)
        with torch.no_grad():
            logits, _ = fresh(torch.cat([query, response])[None])
        logprobs = (logits[0].double() / 0.7).log_softmax(-1)[len(query) - 1 : -1]
        expected = logprobs.gather(1, response[:, None])[:, 0].tolist()
        found = rollout.samples.logprobs[i][rollout.samples.mask[i]].tolist()
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("setting", [{"top_k": 2}, {"temperature": 2.0}])
def test_step_warns_after_generate_changed_the_probabilities(make_trainer, setting):
    trainer = make_trainer()
    responses = trainer.generate(QUERIES, **setting)
    with pytest.warns(UserWarning, match="the policy that sampled is another one"):
        trainer.step(QUERIES, responses, SCORES)
    responses = trainer.generate(QUERIES, top_k=0, top_p=1)
    trainer.generate(QUERIES, do_sample=False)  # to look at
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.step(QUERIES, responses, SCORES)
    with pytest.warns(UserWarning, match="responses begin with their queries"):
        trainer.step(QUERIES, [f"{q} {r}" for q, r in zip(QUERIES, responses, strict=True)], SCORES)


@pytest.mark.usefixtures("no_type_checks")
def test_generate_and_step_reject_what_does_not_fit(make_trainer):
    trainer, masks = make_trainer(), "response_masks must have one mask for each resp"
    for batch, complaint in (
        ((QUERIES[:3], QUERIES, SCORES), "queries has 3 entries, but batch_size=8"),
        ((QUERIES, ["", *QUERIES[1:]], SCORES), r"responses\[0\]=\[\] is empty"),
        ((QUERIES, [[9, 1, 1]] * 8, SCORES), "responses continue after a stop token"),
        (([[1, 1, 0, 9]] * 8, QUERIES, SCORES), r"queries\[0\] has padding"),
        ((QUERIES, QUERIES, [*SCORES[:7], math.nan]), r"scores\[7\] must be a finite .*, got nan"),
        ((QUERIES, [[9, 8]] * 8, SCORES, [[1]] * 8), masks),
        ((QUERIES, [[9, 8]] * 8, SCORES, [[0.5, 1]] * 8), masks),
    ):
        with pytest.raises(ConfigError, match=complaint):
            trainer.step(*batch)
    with pytest.raises(ConfigError, match="prompts must be a list"):
        trainer.generate("this movie")
    for settings, complaint in (
        ({"num_beams": 4}, "does not take num_beams=4"),
        ({"max_new_tokens": 0}, "gen_len=0 is out of range"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            trainer.generate(QUERIES, **settings)
    assert trainer.phase == 0
    assert trainer.step([""] * 8, [[9, 1]] * 8, SCORES).response_length == 2.0  # with a stop token
    for fields, complaint in (
        ({"advantages": "remax", "normalize_reward": False}, "needs scores of greedy responses"),
        ({"dynamic_sampling": 2, "samples_per_prompt": 2}, r"step\(\) .*dynamic_sampling samples"),
        ({"samples_per_prompt": 4}, "samples_per_prompt=4 requires .* Sort the batch by query"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            make_trainer(**fields).step(QUERIES, QUERIES, SCORES)
