"""Damaged, hostile and unfit model directories at each command that loads one."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bad_input.command_outcome import Outcome, accepted, rejected, untouched
from tests.bad_input.spoiled_models import POLICY, TABLES, build, lacks, settings, sign

pytestmark = pytest.mark.usefixtures("no_type_checks")
SMALL = "--total-phases 1 --batch-size 4 --num-minibatches 1 --warmup-steps 0 --gen-len 4"
TRAIN = f"train {SMALL} --prefix w1 --out made".split()
CASES = [(kind, name) for kind, table in TABLES.items() for name in table]
LOADERS = {
    "sample": "sample ./model -n 1",
    "sft": "sft --texts texts.txt --out made --steps 1 --base-model ./model",
    "dpo": "dpo --pairs pairs.jsonl --out made --steps 1 --base-model ./model",
    "kto": "kto --examples pairs.jsonl --out made --steps 1 --base-model ./model",
    "train-reward": "train-reward --pairs pairs.jsonl --out made --steps 1 --base-model ./model",
}


def command(kind: str, path: str = "./model") -> list[str]:
    """Return a command that loads a directory of this kind."""
    if kind == "policy":
        return [*TRAIN, "--reward-fn", "zero", "--base-model", path]
    learned = ["--reward-fn", "learned"] if kind == "reward" else []
    return ["score", "w1 w7", *learned, "--reward-model", path]


def effect(kind: str, outcome: Outcome) -> str:
    """Return the samples of a policy, or the score of a reward."""
    if kind == "policy":
        lines = map(json.loads, Path("made", "samples.jsonl").read_text().splitlines())
        return json.dumps([(line["phase"], line["text"], line["reward"]) for line in lines])
    return outcome.out.splitlines()[-1]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An intact directory of each kind."""
    return build(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def whole(models: Path) -> dict[str, str]:
    """The effect of an intact directory of each kind."""
    effects = {}
    for kind in TABLES:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(models)
            effects[kind] = effect(kind, accepted(command(kind, f"./{kind}")))
    return effects


@pytest.fixture
def there(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory. No input is read, and no pickle from a directory runs."""
    questions = []
    monkeypatch.setattr("builtins.input", lambda *text: questions.append(text) or "y")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(models, tmp_path / "models")
    yield tmp_path
    assert not questions and not sign(tmp_path / "model").exists()


@pytest.mark.parametrize(("kind", "name"), CASES, ids=[": ".join(case) for case in CASES])
def test_spoiled_directory_is_rejected_or_works(there, whole, kind, name) -> None:
    spoil, words = TABLES[kind][name]
    shutil.copytree(there / "models" / kind, there / "model")
    spoil(there / "model")
    if words is None:
        assert effect(kind, accepted(command(kind))) == whole[kind]
    else:
        with untouched(there):
            rejected(command(kind), "model", *words)


@pytest.mark.parametrize("loader", LOADERS)
def test_each_command_rejects_a_spoiled_directory(there, loader) -> None:
    shutil.copytree(there / "models" / "policy", there / "model")
    POLICY["nan in a gain"][0](there / "model")
    (there / "texts.txt").write_text("w1 w2\n" * 20)
    (there / "pairs.jsonl").write_text('{"chosen": "w1 w2", "rejected": "w3"}\n' * 20)
    with untouched(there):
        rejected(LOADERS[loader].split(), "./model", "nan or inf")


def test_tokenizer_without_configuration_warns(there) -> None:
    """Transformers would make GPT-2's tokenizer, which puts no space between words."""
    shutil.copytree(there / "models" / "policy", there / "model")
    lacks("tokenizer_config.json")(there / "model")
    err = accepted(command("policy")).err
    assert "warning: './model' has no tokenizer_config.json" in err and err.count("\n") == 1


def test_resume_rejects_a_classifier_with_swapped_names(there) -> None:
    shutil.copytree(there / "models" / "classifier", there / "model")
    accepted([*TRAIN, "--base-model", "models/policy", "--reward-model", "model"])
    settings(id2label={"0": "good", "1": "bad"}, label2id=...)(there / "model")
    with untouched(there):
        rejected(["resume", "made", "--total-phases", "2"], "'good'", "'bad'", "--positive-label")


def test_run_names_its_rewarded_class_and_warns_if_it_changes(there) -> None:
    shutil.copytree(there / "models" / "classifier", there / "model")
    settings(id2label={"0": "bad", "1": "good"}, label2id=...)(there / "model")
    named = ["--reward-model", "model", "--positive-label", "good"]
    outcome = accepted(["score", "w1 w7", *named])
    assert outcome.err == "rewarding the class 'good' of model\n" and outcome.out.count("\n") == 1
    first = accepted([*TRAIN, "--base-model", "models/policy", *named, "--direction", "neg"])
    info = json.loads(Path("made", "run.json").read_text())
    assert info["sources"]["rewarded_class"] == {"index": 0, "label": "bad"}
    for out in (first.out, accepted(["resume", "made", "--total-phases", "2"]).out):
        assert "rewarding the class 'bad' of model" in out
    settings(id2label={"0": "good", "1": "bad"}, label2id=...)(there / "model")
    settings(architectures=["XLMRobertaForSequenceClassification"])(there / "model")
    err = accepted(["resume", "made", "--total-phases", "3"]).err
    assert (
        "rewarded_class has changed since the run started, from {'index': 0, 'label': 'bad'}" in err
    )
