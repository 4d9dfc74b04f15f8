"""Unfit model directories at each command that loads one.

The loaders are tested in models/test_load.py, rewards/test_classifiers.py and test_reward_model.py.
"""

import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.bad_input.command_outcome import accepted, rejected, untouched

pytestmark = pytest.mark.usefixtures("no_type_checks")
SMALL = "--total-phases 1 --batch-size 4 --num-minibatches 1 --warmup-steps 0 --gen-len 4"
FIT = "--out made --steps 1 --base-model ./model"
LOADERS = {
    "train": f"train {SMALL} --prefix w1 --out made --reward-fn zero --base-model ./model",
    "sample": "sample ./model -n 1",
    "sft": f"sft --texts texts.txt {FIT}",
    "dpo": f"dpo --pairs pairs.jsonl {FIT}",
    "kto": f"kto --examples pairs.jsonl {FIT}",
    "train-reward": f"train-reward --pairs pairs.jsonl {FIT}",
}


@pytest.fixture
def there(gpt2_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a model and data."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(gpt2_dir, "model")
    Path("texts.txt").write_text("w1 w2\n" * 20)
    Path("pairs.jsonl").write_text('{"chosen": "w1 w2", "rejected": "w3"}\n' * 20)
    return tmp_path


@pytest.mark.parametrize("loader", LOADERS)
def test_each_command_rejects_a_spoiled_directory(there: Path, loader: str) -> None:
    weights = load_file("model/model.safetensors")
    weights["transformer.ln_f.weight"][-1] = float("nan")
    save_file(weights, "model/model.safetensors", metadata={"format": "pt"})
    with untouched(there):
        rejected(LOADERS[loader].split(), "./model", "nan or inf")
    shutil.rmtree("model")
    os.mkfifo("model")
    with untouched(there):
        rejected(LOADERS[loader].split(), "model")


def test_tokenizer_without_configuration_warns(there: Path) -> None:
    """Transformers would make GPT-2's tokenizer, which puts no space between words."""
    Path("model/tokenizer_config.json").unlink()
    err = accepted(LOADERS["train"].split()).err
    assert "warning: './model' has no tokenizer_config.json" in err and err.count("\n") == 1
