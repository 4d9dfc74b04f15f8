"""Tiny model directories with one defect each, and the words of the expected message.

A case without words loads as an intact directory does.
"""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from transformers import DistilBertConfig, DistilBertForSequenceClassification

from rlhf_lab.models import load_model
from rlhf_lab.rewards import RewardModel
from tests.tiny_models import gpt2_tokenizer, llama_tokenizer, randomize, save, tiny_gpt2

Spoil = Callable[[Path], Any]
Cases = dict[str, tuple[Spoil, list[str] | None]]
WEIGHTS, HEAD = "model.safetensors", "reward_head.safetensors"


def sign(directory: Path) -> Path:
    """Return the file that code from a directory would write if it ran."""
    return directory.parent / "it-ran"


class Payload:
    """An object whose unpickling writes a file."""

    def __init__(self, directory: Path) -> None:
        self.sign = sign(directory)

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"echo ran > {self.sign}",))


def build(directory: Path) -> Path:
    """Write one directory of each kind: policy, classifier, reward."""
    save(tiny_gpt2(), gpt2_tokenizer(), directory / "policy")
    classifier(directory / "classifier", ("negative", "positive"))
    model = RewardModel(load_model(str(directory / "policy")))
    model.save(directory / "reward", str(directory / "policy"), {"pairs": "none"})
    return directory


def classifier(directory: Path, labels: tuple[Any, ...], **changes: Any) -> Path:
    """Write a classifier with classes of these names."""
    shape = {"dim": 16, "hidden_dim": 32, "n_layers": 1, "n_heads": 2, "vocab_size": 24}
    names = {"id2label": dict(enumerate(labels)), "label2id": {n: i for i, n in enumerate(labels)}}
    settings = shape | {"max_position_embeddings": 20, "pad_token_id": 3} | names | changes
    model = DistilBertForSequenceClassification(DistilBertConfig(**settings))
    randomize(model, 4)
    return save(model, llama_tokenizer(), directory)


def settings(file: str = "config.json", **changes: Any) -> Spoil:
    """Change the entries of a JSON file; `...` removes one."""

    def spoil(directory: Path) -> None:
        entries = json.loads((directory / file).read_text()) | changes
        entries = {k: v for k, v in entries.items() if v is not ...}
        (directory / file).write_text(json.dumps(entries))

    return spoil


def lacks(*files: str) -> Spoil:
    return lambda directory: [(directory / file).unlink() for file in files]


def weights(change: Callable[[dict[str, Any]], dict[str, Any]], file: str = WEIGHTS) -> Spoil:
    """Change the tensors of a file."""

    def spoil(directory: Path) -> None:
        tensors = change(load_file(directory / file))
        save_file(tensors, directory / file, metadata={"format": "pt"})

    return spoil


def entry(name: str, value: float, file: str = WEIGHTS) -> Spoil:
    """Change the last entry of a tensor."""

    def change(tensors: dict[str, Any]) -> dict[str, Any]:
        tensors[name].view(-1)[-1] = value
        return tensors

    return weights(change, file)


def pickled(name: str, keep: bool = False) -> Spoil:
    """Write a pickle that runs a command as a file of weights."""

    def spoil(directory: Path) -> None:
        if not keep:
            (directory / WEIGHTS).unlink()
        (directory / name).write_bytes(pickle.dumps(Payload(directory)))

    return spoil


def instead(make: Callable[[Path], Any]) -> Spoil:
    """Replace the directory by something else."""
    return lambda directory: [shutil.rmtree(directory), make(directory)]


def without(name: str, file: str = WEIGHTS) -> Spoil:
    return weights(lambda tensors: {k: v for k, v in tensors.items() if k != name}, file)


NAN = float("nan")
POLICY: Cases = {  # tests/models/test_load.py has damaged configurations, weights and code
    "pickle in addition": (pickled("pytorch_model.bin", keep=True), None),
    "pickle under the right name": (pickled(WEIGHTS), []),
    "nan in a gain": (entry("transformer.ln_f.weight", NAN), ["nan or inf"]),
    "a pipe": (instead(os.mkfifo), []),
    "a classifier": (instead(lambda path: classifier(path, ("neg", "pos"))), []),
}
CLASSIFIER: Cases = {  # tests/rewards/test_classifiers.py has more
    "pickle only": (pickled("pytorch_model.bin"), ["safetensors"]),
    "one class": (instead(lambda path: classifier(path, ("good",))), ["score --prompt"]),
    "names of three classes": (
        settings(num_labels=2, id2label={"0": "good", "1": "bad", "2": "c"}),
        ["num_labels=2", "'2': 'c'"],
    ),
    "no names": (settings(id2label=..., label2id=...), None),
    "names from 1": (settings(id2label={"1": "neg", "2": "pos"}), ["id2label"]),
    "head missing": (without("classifier.weight"), ["missing", "classifier.weight"]),
    "head nan": (entry("classifier.weight", NAN), ["classifier.weight", "nan"]),
}
REWARD: Cases = {
    "head without mean": (without("mean", HEAD), [HEAD]),
    "std 0": (entry("std", 0.0, HEAD), [HEAD]),
    "metadata missing": (lacks("reward_model.json"), None),
}
TABLES = {"policy": POLICY, "classifier": CLASSIFIER, "reward": REWARD}
