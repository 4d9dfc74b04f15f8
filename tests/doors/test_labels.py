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
TOLD = {
    ("NEGATIVE", "POSITIVE"): 1,
    ("POSITIVE", "NEGATIVE"): 0,
    ("positiv", "negativ"): 0,
    ("NEG", "POS"): 1,
    ("pos_1", "neg_0"): 0,
    ("LABEL_0", "LABEL_1"): 1,
    ("LABEL_1", "LABEL_0"): 0,
    ("LABEL_0", "positive"): 1,
    ("not positive", "positive"): 1,
    ("non-negative", "negative"): 0,
    ("POSITIVE\n", "NEGATIVE\t"): 0,
    ("", "positive"): 1,
}
UNTOLD = [
    ("good", "bad"),
    ("neutral", "negative"),
    ("\u2b50", "\u2b50\u2b50\u2b50\u2b50\u2b50"),
    ("1 star", "5 stars"),
    (0, 1),
    ("true", "false"),
    ("toxic", "non-toxic"),
    ("positive", "positive"),
    ("pos", "positive"),
    ("negative", "very negative"),
    ("sentiment: positive", "sentiment: negative"),
    ("", ""),
    ("<b>good</b>", "\x1b[31mbad\u202e"),
]
GIVEN = {
    ("good", "bad"): ("good", 0),
    ("bad", "\u00c4ngstlich"): ("\u00e4ngstlich", 1),
    (0, 1): ("1", 1),
    ("very positive", "positive"): ("very positive", 0),
    ("-bad", "-good"): ("-good", 1),
}
NO_NAME = ["goods", "1", "positive"]


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


def paid(*options: str) -> float:
    """The reward of TEXT."""
    return float(accepted(["score", TEXT, "--reward-model", "model", *options]).out.split("\t")[0])


@pytest.mark.parametrize("labels", TOLD, ids=ascii)
def test_the_class_that_the_names_tell_is_rewarded(named, labels) -> None:
    probabilities = named(labels)
    wanted = probabilities[TOLD[labels]]
    assert abs(wanted - 0.5) > 0.01, "both classes would be paid alike"
    assert paid() == pytest.approx(wanted, abs=1e-4)
    assert paid("--direction", "neg") == pytest.approx(1 - wanted, abs=1e-4)


@pytest.mark.parametrize("labels", UNTOLD, ids=lambda labels: ascii(labels)[:60])
def test_names_that_do_not_tell_are_asked_about(named, labels) -> None:
    named(labels)
    shown = [visible(repr(label)) for label in labels]
    for command in (["score", TEXT, "--reward-model", "model"], TRAIN):
        with untouched(Path.cwd()):
            said = refused(command, "--positive-label", *shown).err
        assert "\x1b" not in said and "\u202e" not in said


@pytest.mark.parametrize("labels", GIVEN, ids=ascii)
def test_the_class_that_is_named_is_rewarded(named, labels) -> None:
    probabilities = named(labels)
    name, index = GIVEN[labels]
    option = f"--positive-label={name}"
    assert paid(option) == pytest.approx(probabilities[index], abs=1e-4)
    against = paid(option, "--direction", "neg")
    assert against == pytest.approx(probabilities[1 - index], abs=1e-4)


@pytest.mark.parametrize("name", NO_NAME)
def test_a_name_of_no_class_is_refused_with_both(named, name) -> None:
    named(("good", "bad"))
    with untouched(Path.cwd()):
        refused([*TRAIN, f"--positive-label={name}"], "'good'", "'bad'", f"{name!r} is not the")


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


@pytest.mark.process
def test_a_process_asks_for_the_class(named, warm_python) -> None:
    named(("good", "bad"))
    done = warm_python.run(["-m", "rlhf_lab", *TRAIN], cwd=Path.cwd())
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "--positive-label" in done.stderr and not Path("made").exists()
