"""Names of a classifier's two classes: the positive one is rewarded, or it is asked for."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf_lab.console import visible
from tests.doors.door import accepted, refused, untouched
from tests.doors.spoilt_models import classifier, settings
from tests.tiny_models import gpt2_tokenizer, save, tiny_gpt2

pytestmark = pytest.mark.usefixtures("no_type_checks")
TEXT = "w1 w7"
SMALL = "--total-phases 1 --batch-size 4 --num-minibatches 1 --warmup-steps 0 --gen-len 4"
TRAIN = f"train {SMALL} --prefix w1 --out made --base-model policy --reward-model model".split()
UNCLEAR = [("good", "bad"), ("<b>good</b>", "\x1b[31mbad\u202e"), ("x" * 300, "y")]


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A directory with a classifier and a policy, and the probability of each class of TEXT."""
    place = tmp_path_factory.mktemp("labels")
    model = classifier(place / "model", ("negative", "positive"))
    save(tiny_gpt2(), gpt2_tokenizer(), place / "policy")
    ids = AutoTokenizer.from_pretrained(model)(TEXT, return_tensors="pt").input_ids
    reader = AutoModelForSequenceClassification.from_pretrained(model)
    return place, reader(ids).logits.softmax(-1)[0].tolist()


@pytest.fixture
def named(rewards, tmp_path, monkeypatch):
    """Gives the classes names, in a working directory of this test; returns their probabilities."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(rewards[0], tmp_path, dirs_exist_ok=True)

    def give(labels):
        names = {"0": labels[0], "1": labels[1]}
        settings(id2label=names, label2id=...)(tmp_path / "model")
        return rewards[1]

    return give


def score(*options: str) -> float:
    """The reward of TEXT."""
    return float(accepted(["score", TEXT, "--reward-model", "model", *options]).out.split("\t")[0])


def test_score_rewards_positive_class(named) -> None:
    probabilities = named(("POSITIVE", "NEGATIVE"))
    assert abs(probabilities[0] - 0.5) > 0.01
    assert score() == pytest.approx(probabilities[0], abs=1e-4)
    assert score("--direction", "neg") == pytest.approx(probabilities[1], abs=1e-4)


@pytest.mark.parametrize("labels", UNCLEAR, ids=lambda labels: ascii(labels)[:60])
def test_commands_require_positive_label_for_unclear_names(named, labels) -> None:
    named(labels)
    printed = [visible(repr(label)) for label in labels]
    for command in (["score", TEXT, "--reward-model", "model"], TRAIN):
        with untouched(Path.cwd()):
            message = refused(command, "--positive-label", *printed).err
        assert "\x1b" not in message and "\u202e" not in message


def test_positive_label_chooses_the_class(named) -> None:
    probabilities = named(("-bad", "-good"))
    assert score("--positive-label=-good") == pytest.approx(probabilities[1], abs=1e-4)
    with untouched(Path.cwd()):
        words = "'-good'", "'-bad'", "'goods' is not the"
        refused([*TRAIN, "--positive-label=goods"], *words)


@pytest.mark.parametrize("direction", ["pos", "neg"])
def test_a_run_says_which_class_it_rewards(named, direction) -> None:
    """At the start, in run.json, in the report and when it goes on."""
    named(("bad", "good"))
    index = int(direction == "pos")
    label = ("bad", "good")[index]
    said = f"rewarding the class {label!r} of model"
    begun = accepted([*TRAIN, "--positive-label", "good", "--direction", direction])
    noted = json.loads(Path("made", "run.json").read_text())
    assert said in begun.out and noted["rewarded_class"] == {"index": index, "label": label}
    assert said in accepted(["resume", "made", "--total-phases", "2"]).out
    accepted(["report", "made"])
    assert f"the class {label}" in Path("made", "report.html").read_text()


def test_a_score_says_which_class_it_is_of(named) -> None:
    """Beside the scores, which other programs may read."""
    named(("bad", "good"))
    command = ["score", TEXT, "--reward-model", "model", "--positive-label", "good"]
    ending = accepted(command)
    assert ending.err == "rewarding the class 'good' of model\n" and ending.out.count("\n") == 1


def test_names_that_change_places_between_two_sittings_are_warned_of(named) -> None:
    named(("negative", "positive"))
    accepted(TRAIN)
    named(("positive", "negative"))
    said = accepted(["resume", "made", "--total-phases", "2"]).err
    assert "warning" in said and "class 1" in said and "class 0" in said


def test_another_reward_has_no_class(named) -> None:
    accepted([*TRAIN, "--reward-fn", "zero"])
    assert json.loads(Path("made", "run.json").read_text())["rewarded_class"] is None
