"""Model directories that are spoilt, incomplete, foreign or hostile, where they are loaded.

Each is refused in one sentence that names the directory, or works as the one that is whole; no code
that lies in one is run, and nobody is asked whether it may.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf_lab.console import visible
from tests.doors.door import Ending, accepted, refused, untouched
from tests.doors.model_cases import POLICY, TABLES
from tests.doors.spoilt_models import build, lacks, settings, sign
from tests.tiny_models import llama_tokenizer, save, tiny_llama

pytestmark = pytest.mark.usefixtures("no_type_checks")
SMALL = "--total-phases 1 --batch-size 4 --num-minibatches 1 --warmup-steps 0 --gen-len 4"
TRAIN = f"train {SMALL} --prefix w1 --out made".split()
CASES = [(kind, name) for kind, table in TABLES.items() for name in table]
LOADERS = {
    "sample": "sample ./model -n 1",
    "sft": "sft --texts texts.txt --out made --steps 1 --base-model ./model",
    "dpo": "dpo --pairs pairs.jsonl --out made --steps 1 --base-model ./model",
    "orpo": "orpo --pairs pairs.jsonl --out made --steps 1 --base-model ./model",
    "kto": "kto --examples pairs.jsonl --out made --steps 1 --base-model ./model",
    "train-reward": "train-reward --pairs pairs.jsonl --out made --steps 1 --base-model ./model",
}
SPOILT = ["code, unknown type", "a nan in a gain"]
NAMES = ["a[/b]", "{0}", "a\nb", "a\x1b[31m"]


def command(kind: str, place: str = "./model") -> list[str]:
    """Load a directory of this kind."""
    if kind == "policy":
        return [*TRAIN, "--reward-fn", "zero", "--base-model", place]
    if kind == "classifier":
        return ["score", "w1 w7", "--reward-model", place]
    return ["score", "w1 w7", "--reward-fn", "learned", "--reward-model", place]


def effect(kind: str, ending: Ending) -> str:
    """What a command made of a directory: the texts that a policy wrote, or the reward of one."""
    if kind == "policy":
        lines = map(json.loads, Path("made", "samples.jsonl").read_text().splitlines())
        return json.dumps([(line["phase"], line["text"], line["reward"]) for line in lines])
    return ending.out.splitlines()[-1]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole directory of each kind."""
    return build(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def whole(models: Path) -> dict[str, str]:
    """What a whole directory of each kind gives."""
    found = {}
    for kind in TABLES:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(models)
            found[kind] = effect(kind, accepted(command(kind, f"./{kind}")))
    return found


@pytest.fixture
def there(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory; nobody is asked anything, and no code that was brought along runs."""
    asked = []
    monkeypatch.setattr("builtins.input", lambda *question: asked.append(question) or "y")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(models, tmp_path / "models")
    yield tmp_path
    assert not asked and not sign(tmp_path / "model").exists()


@pytest.mark.parametrize(("kind", "name"), CASES, ids=[": ".join(case) for case in CASES])
def test_a_model_directory(there: Path, whole: dict[str, str], kind: str, name: str) -> None:
    spoil, words = TABLES[kind][name]
    model = there / "model"
    shutil.copytree(there / "models" / kind, model)
    spoil(model)
    if words is None:
        found = effect(kind, accepted(command(kind)))
        assert found == expected(name, model) or found == whole[kind]
    else:
        with untouched(there):
            refused(command(kind), "model", *words)


def expected(name: str, model: Path) -> str | None:
    """What transformers says of a classifier that is whole, but not the one of `whole`."""
    if name != "vocabulary smaller than the embedding":
        return None
    ids = AutoTokenizer.from_pretrained(model)("w1 w7", return_tensors="pt").input_ids
    reader = AutoModelForSequenceClassification.from_pretrained(model)
    return f"{reader(ids).logits.softmax(-1)[0, 1].item():.4f}\tw1 w7"


@pytest.mark.parametrize("name", SPOILT)
@pytest.mark.parametrize("loader", LOADERS)
def test_a_spoilt_directory_at_each_command(there: Path, loader: str, name: str) -> None:
    spoil, words = POLICY[name]
    shutil.copytree(there / "models" / "policy", there / "model")
    spoil(there / "model")
    (there / "texts.txt").write_text("w1 w2\n" * 20)
    (there / "pairs.jsonl").write_text('{"chosen": "w1 w2", "rejected": "w3"}\n' * 20)
    with untouched(there):
        refused(LOADERS[loader].split(), "./model", *words)


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_name_that_is_odd(there: Path, whole: dict[str, str], name: str) -> None:
    shutil.copytree(there / "models" / "policy", there / name)
    ending = accepted(command("policy", f"./{name}"))
    assert effect("policy", ending) == whole["policy"]
    assert json.loads(Path("made", "run.json").read_text())["args"]["base_model"] == f"./{name}"
    assert visible(f"loading ./{name} and its reward") in ending.out and "\x1b" not in ending.out


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_an_odd_name_that_is_not_there(there: Path, name: str) -> None:
    with untouched(there):
        refused(
            command("policy", f"./{name}"),
            "There is no model directory",
            visible(repr(f"./{name}")),
        )


def test_a_tokenizer_of_several_special_tokens_without_an_end(there: Path) -> None:
    model = save(tiny_llama(), llama_tokenizer(), there / "model")
    settings("tokenizer_config.json", eos_token=...)(model)
    with untouched(there):
        refused(command("policy"), "stop_at_eos=True", "end-of-sequence token")


def test_a_tokenizer_without_its_configuration_is_warned_of(there: Path) -> None:
    """Of this one, transformers would make GPT-2's, which puts no blank between words."""
    shutil.copytree(there / "models" / "policy", there / "model")
    lacks("tokenizer_config.json")(there / "model")
    said = accepted(command("policy")).err
    assert "warning: './model' has no tokenizer_config.json" in said and said.count("\n") == 1


def test_a_reward_that_would_be_turned_round_is_refused_by_resume(there: Path) -> None:
    """The classifier of a run is looked at again when the run goes on."""
    shutil.copytree(there / "models" / "classifier", there / "model")
    accepted([*TRAIN, "--base-model", "models/policy", "--reward-model", "model"])
    settings(id2label={"0": "good", "1": "bad"}, label2id=...)(there / "model")
    with untouched(there):
        refused(["resume", "made", "--total-phases", "2"], "'good'", "'bad'", "--positive-label")


@pytest.mark.process
def test_a_process_runs_no_code_although_it_is_answered_yes(there: Path, warm_python) -> None:
    shutil.copytree(there / "models" / "policy", there / "model")
    POLICY["code, unknown type"][0](there / "model")
    done = warm_python.run(["-m", "rlhf_lab", *command("policy")], text="y\ny\n", cwd=there)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "custom code, which is not run" in done.stderr
