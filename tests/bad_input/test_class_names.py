"""Names of a classifier's two classes: the positive one is rewarded, or must be named."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf_lab.console import visible
from tests.bad_input.command_outcome import accepted, rejected, untouched
from tests.bad_input.spoiled_models import classifier, settings
from tests.tiny_models import gpt2_tokenizer, save, tiny_gpt2

pytestmark = pytest.mark.usefixtures("no_type_checks")
TEXT = "w1 w7"
SMALL = "--total-phases 1 --batch-size 4 --num-minibatches 1 --warmup-steps 0 --gen-len 4"
TRAIN = f"train {SMALL} --prefix w1 --out made --base-model policy --reward-model model".split()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A directory with a classifier and a policy, and the probability of each class of TEXT."""
    directory = tmp_path_factory.mktemp("labels")
    model = classifier(directory / "model", ("negative", "positive"))
    save(tiny_gpt2(), gpt2_tokenizer(), directory / "policy")
    ids = AutoTokenizer.from_pretrained(model)(TEXT, return_tensors="pt").input_ids
    plain = AutoModelForSequenceClassification.from_pretrained(model)
    return directory, plain(ids).logits.softmax(-1)[0].tolist()


@pytest.fixture
def name_classes(models, tmp_path, monkeypatch):
    """Return a function that names the classes and returns their probabilities."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(models[0], tmp_path, dirs_exist_ok=True)

    def name(first: str, second: str) -> list[float]:
        settings(id2label={"0": first, "1": second}, label2id=...)(tmp_path / "model")
        return models[1]

    return name


def score(*options: str) -> float:
    return float(accepted(["score", TEXT, "--reward-model", "model", *options]).out.split("\t")[0])


def test_score_rewards_the_positive_class_or_requires_its_name(name_classes) -> None:
    probabilities = name_classes("POSITIVE", "NEGATIVE")
    assert abs(probabilities[0] - 0.5) > 0.01
    assert score() == pytest.approx(probabilities[0], abs=1e-4)
    assert score("--direction", "neg") == pytest.approx(probabilities[1], abs=1e-4)
    name_classes("-bad", "-good")
    assert score("--positive-label=-good") == pytest.approx(probabilities[1], abs=1e-4)
    with untouched(Path.cwd()):
        rejected([*TRAIN, "--positive-label=goods"], "'-good'", "'-bad'", "'goods' is not the")
    labels = "<b>good</b>", "\x1b[31mbad\u202e"
    name_classes(*labels)
    words = ["--positive-label", *(visible(repr(label)) for label in labels)]
    for command in (["score", TEXT, "--reward-model", "model"], TRAIN):
        with untouched(Path.cwd()):
            rejected(command, *words)


def test_run_reports_the_rewarded_class_and_warns_if_it_changes(name_classes) -> None:
    name_classes("bad", "good")
    named = ["--positive-label", "good"]
    outcome = accepted(["score", TEXT, "--reward-model", "model", *named])
    assert outcome.err == "rewarding the class 'good' of model\n" and outcome.out.count("\n") == 1
    first = accepted([*TRAIN, *named, "--direction", "neg"])
    info = json.loads(Path("made", "run.json").read_text())
    assert info["rewarded_class"] == {"index": 0, "label": "bad"}
    for out in (first.out, accepted(["resume", "made", "--total-phases", "2"]).out):
        assert "rewarding the class 'bad' of model" in out
    accepted(["report", "made"])
    assert "the class bad" in Path("made", "report.html").read_text()
    name_classes("good", "bad")
    err = accepted(["resume", "made", "--total-phases", "3"]).err
    assert "warning: The run rewarded {'index': 0, 'label': 'bad'}, but now" in err
