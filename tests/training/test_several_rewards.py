"""Several rewards in a run: paid with weights, logged by name, shown and resumed."""

import json

import pytest
import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.organism import REWARDS
from rlhf_lab.rewards import ResponseReward
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.sinks import to_values
from tests.bad_input.command_outcome import rejected

TWO = {"reward_fn": "smoothed,length", "reward_weights": (1.0, 0.5), "gen_len": 26}


def test_the_sum_is_paid_and_each_is_logged_without_its_weight(make_trainer):
    trainer = make_trainer(**TWO)
    report = next(iter(trainer))
    line, samples = trainer.run.read("metrics.jsonl")[0], trainer.run.read("samples.jsonl")
    true_reward = sum(sample["reward/smoothed"] for sample in samples) / len(samples)
    length = sum(sample["reward/length"] for sample in samples) / len(samples)
    assert line["reward/smoothed"] == pytest.approx(true_reward)
    assert line["reward/length"] == pytest.approx(length) and true_reward != length
    assert line["mean_reward"] == pytest.approx(true_reward + 0.5 * length)
    assert report.reward_means == {
        "smoothed": line["reward/smoothed"],
        "length": line["reward/length"],
    }
    for sample in samples:
        assert sample["reward/smoothed"] == REWARDS["smoothed"]([sample["text"]]).item()
        by_weight = sample["reward/smoothed"] + 0.5 * sample["reward/length"]
        assert sample["reward"] == pytest.approx(by_weight)
    assert "reward_means" not in line


def test_one_reward_has_no_name_in_the_logs(make_trainer):
    trainer = make_trainer(reward_fn="true_reward")
    next(iter(trainer))
    assert not [name for name in trainer.run.read("metrics.jsonl")[0] if "/" in name]


def test_what_is_done_to_rewards_is_done_to_the_sum(make_trainer):
    """3 the's of weight 2 and 1 of weight 3 are clipped to 4, then standardized."""
    parts = {"reward_fn": {"a": lambda t: [3.0, 0.0] * 4, "b": lambda t: [1.0] * len(t)}}
    weights = {"reward_weights": (2.0, 3.0), "reward_clip": 4.0}
    asked = []
    parts["reward_fn"]["a"] = lambda t: asked.append(len(t)) or [3.0, 0.0] * (len(t) // 2)
    rollout = make_trainer(parts, normalize_reward=False, **weights).rollout_phase()
    assert rollout.raw_rewards.tolist() == [9.0, 3.0] * 4
    assert rollout.rewards.tolist() == [4.0, 3.0] * 4
    assert rollout.rewards_by_name["a"].tolist() == [3.0, 0.0] * 4
    assert asked == [2, 8], "once on trial, then once per batch"


@pytest.mark.slow
def test_final_figures_and_tables_have_each_reward(make_trainer):
    trainer = make_trainer(**TWO)
    trainer.train()
    final = trainer.run.read_info()["final"]
    by_weight = final["reward/smoothed"] + 0.5 * final["reward/length"]
    assert final["mean_reward"] == pytest.approx(by_weight)
    values = to_values(final, trainer.run.read("samples.jsonl"), "final/")
    assert all(
        list(row)[-2:] == ["reward/smoothed", "reward/length"] for row in values["final_samples"]
    )
    assert values["final/reward/smoothed"] == final["reward/smoothed"]


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_numbers(make_trainer, broken_off_and_resumed, metrics_of):
    fields = TWO | {"total_phases": 3}
    whole = make_trainer(**fields)
    whole.train()
    resumed = broken_off_and_resumed(make_trainer(**fields))
    assert metrics_of(whole.run.path) == metrics_of(resumed.run.path)
    assert whole.run.read("samples.jsonl") == resumed.run.read("samples.jsonl")


def test_replaced_prompts_bring_each_reward_of_the_answers_in_their_place(make_trainer):
    """The reward of each row is that of its own text, also where it was drawn again."""
    length = lambda texts: [float(len(text)) for text in texts]
    parity = lambda texts: [float(len(text) % 2) for text in texts]
    fields = {"samples_per_prompt": 2, "dynamic_sampling": 3, "reward_weights": (0.0, 1.0)}
    trainer = make_trainer({"reward_fn": {"length": length, "parity": parity}}, **fields)
    rollout = trainer.rollout_phase()
    assert rollout.resampled_prompts > 0
    assert rollout.rewards_by_name["length"].tolist() == length(rollout.texts)
    assert rollout.rewards_by_name["parity"].tolist() == parity(rollout.texts)
    assert rollout.raw_rewards.tolist() == parity(rollout.texts)


def test_a_reward_of_the_whole_batch_is_never_asked_about_a_part(make_trainer):
    sizes = []

    def spread(prompts, responses):
        sizes.append(len(responses))
        return [0.0] * len(responses)

    parts = {"reward_fn": {"spread": ResponseReward(spread, whole_batch=True)}}
    cut = {"generation_batch_size": 2, "micro_batch_size": 2}
    trainer = make_trainer(parts, **cut)
    trainer.run_phase()
    trainer.evaluate()
    assert set(sizes) == {8}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dynamic_sampling": 2, "samples_per_prompt": 2}, "dynamic_sampling=2 scores"),
        (
            {"advantages": "remax", "normalize_reward": False},
            "advantages=.remax. scores other texts than the batch",
        ),
        ({"labels_column": "label"}, "labels_column=.label. scores other texts"),
    ],
)
def test_a_reward_of_the_whole_batch_refuses_what_asks_about_a_part(
    make_trainer, tmp_path, fields, words
):
    if "labels_column" in fields:
        (tmp_path / "prompts.csv").write_text("prompt,label\nthis movie,was\n")
        fields = fields | {"prompts": str(tmp_path / "prompts.csv")}
    reward = ResponseReward(lambda prompts, responses: [0.0] * len(prompts), whole_batch=True)
    with pytest.raises(ConfigError, match=words):
        make_trainer({"reward_fn": reward}, **fields)


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    rows = [{"prompt": "this movie", "answer": "great"}, {"prompt": "the film", "answer": "bad"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_answers_go_with_their_prompts(make_trainer, questions):
    seen = []

    def note(prompts, responses, answers):
        seen.append(list(zip(prompts, answers, strict=True)))
        return [float(answer == "bad") for answer in answers]

    fields = {"prompts": str(questions), "answers_column": "answer", "samples_per_prompt": 4}
    parts = {"reward_fn": ResponseReward(note, answers=True)}
    rollout = make_trainer(parts, normalize_reward=False, **fields).rollout_phase()
    pairs = {("this movie", "great"), ("the film", "bad")}
    assert set(seen[-1]) == pairs and len(seen[-1]) == 8
    expected = [float(text.startswith("the film")) for text in rollout.texts]
    assert rollout.raw_rewards.tolist() == expected


def test_answers_that_cannot_be_read_are_refused(make_trainer, questions, tmp_path):
    fields = {"prompts": str(questions), "answers_column": "answer"}
    with pytest.raises(ConfigError, match="read by no reward of this run"):
        make_trainer(reward_fn="true_reward", **fields)
    with pytest.raises(ConfigError, match="prompts were passed"):
        make_trainer({"prompts": ["this movie"]}, reward_fn="exact_match", **fields)
    asks = ResponseReward(lambda p, r, a: [0.0] * len(p), answers=True)
    with pytest.raises(ConfigError, match="set answers_column"):
        make_trainer({"reward_fn": asks})
    twice = tmp_path / "twice.csv"
    twice.write_text("prompt,answer\nthis movie,a\nthis movie,b\n")
    with pytest.raises(ConfigError, match="has two answers, 'a' and 'b'"):
        make_trainer(reward_fn="exact_match", prompts=str(twice), answers_column="answer")


def test_a_reward_that_is_no_number_is_named_before_the_run(make_trainer):
    with pytest.raises(ConfigError, match="the reward 'bad': reward_fn returned"):
        make_trainer({"reward_fn": {"good": lambda t: [0.0] * len(t), "bad": lambda t: None}})


@pytest.mark.process
def test_through_the_door_of_the_command_line(warm_python, tmp_path, questions):
    """A process trains on three rewards of four kinds, and its pages show each."""
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    reward_fn = f"exact_match:ignore_case,diversity:2,regex:(?s).{{1,999}},json_schema:{tmp_path}"
    small = "--total-phases 2 --batch-size 8 --gen-len 6 --warmup-steps 1 --num-minibatches 2"
    words = ["train", *small.split(), "--reward-fn", f"{reward_fn}/schema.json,length"]
    words += ["--reward-weights", "1", "2", "0", "3", "0.5", "--answers-column", "answer"]
    words += ["--prompts", str(questions), "--out", str(tmp_path / "run")]
    done = warm_python.run(["-m", "rlhf_lab", *words])
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    found = json.loads(lines[-1])
    names = ["exact_match:ignore_case", "diversity:2", "regex:(?s).{1,999}"]
    names += [f"json_schema:{tmp_path}/schema.json", "length"]
    assert [name for name in found if "/" in name] == [f"reward/{name}" for name in names]
    weights = dict(zip(names, (1, 2, 0, 3, 0.5), strict=True))
    total = sum(weight * found[f"reward/{name}"] for name, weight in weights.items())
    assert found["mean_reward"] == pytest.approx(total)
    assert found["reward/regex:(?s).{1,999}"] == 1.0
    done = warm_python.run(["-m", "rlhf_lab", "report", str(tmp_path / "run")])
    page = (tmp_path / "run" / "report.html").read_text()
    assert done.returncode == 0 and "several rewards" in page and "diversity:2 0." in page
    done = warm_python.run(["-m", "rlhf_lab", "sample", str(tmp_path / "run"), "-n", "2"])
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 2, done.stderr


@pytest.mark.process
def test_scores_are_printed_by_name(warm_python):
    words = ["score", "good film", "bad film", "--reward-fn", "count:film,diversity:1"]
    done = warm_python.run(["-m", "rlhf_lab", *words, "--reward-weights", "2", "4"])
    assert done.stdout.splitlines() == [
        "4.0000\tcount:film 1.0000\tdiversity:1 0.5000\tgood film",
        "4.0000\tcount:film 1.0000\tdiversity:1 0.5000\tbad film",
    ], done.stderr


def test_doors_that_refuse(tmp_path):
    out = ["--out", str(tmp_path / "made")]
    rejected(
        ["train", "--reward-fn", "true_reward,length", "--reward-weights", "1", *out], "Set one"
    )
    rejected(["train", "--reward-fn", "regex:(", *out], "not a valid pattern")
    rejected(["train", "--reward-fn", "json_schema:nowhere.json", *out], "cannot read")
    rejected(["score", "x", "--reward-fn", "exact_match"], "answers_column")
    assert not (tmp_path / "made").exists()


def test_the_panel_shows_each_reward(make_trainer):
    from rich.console import Console

    from rlhf_lab.views.live import RunView

    trainer = make_trainer(**TWO)
    console = Console(record=True, width=100, height=40, file=open("/dev/null", "w"))
    with RunView(trainer, console) as view:
        trainer.run_phase()
    console.print(view.panel())
    shown = console.export_text()
    assert "reward/smoothed" in shown and "reward/length" in shown


def test_a_single_handed_in_reward_may_have_a_weight(make_trainer):
    trainer = make_trainer({"reward_fn": lambda t: [1.0] * len(t)}, reward_weights=(3.0,))
    assert trainer.rollout_phase().raw_rewards.tolist() == [3.0] * 8
    assert isinstance(trainer, RLHFTrainer) and isinstance(trainer.args, RLHFArgs)
    assert torch.is_tensor(trainer.rollout_phase().rewards_by_name["<lambda>"])
