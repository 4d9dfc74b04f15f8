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
EVIL = """\
from pathlib import Path
Path({sign!r}).write_text("ran")
from transformers import GPT2Config as Config, GPT2LMHeadModel as Model
Config.model_type = "evil"
"""


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


def holds(file: str, content: bytes) -> Spoil:
    return lambda directory: (directory / file).write_bytes(content)


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


def code(kind: str, **changes: Any) -> Spoil:
    """Add code that writes a file when it is imported."""

    def spoil(directory: Path) -> None:
        (directory / "evil.py").write_text(EVIL.format(sign=str(sign(directory))))
        settings(auto_map={"AutoConfig": "evil.Config", kind: "evil.Model"}, **changes)(directory)

    return spoil


def instead(make: Callable[[Path], Any]) -> Spoil:
    """Replace the directory by something else."""
    return lambda directory: [shutil.rmtree(directory), make(directory)]


def without(name: str, file: str = WEIGHTS) -> Spoil:
    return weights(lambda tensors: {k: v for k, v in tensors.items() if k != name}, file)


TOKENIZER, NAN = "tokenizer_config.json", float("nan")
POLICY: Cases = {  # tests/models/test_load.py has more
    "config of great depth": (holds("config.json", b"[" * 100_000), []),
    "epsilon nan": (settings(layer_norm_epsilon=NAN), ["logits"]),
    "model_type unknown": (settings(model_type="gpt9"), ["gpt9"]),
    "quantized": (settings(quantization_config={"quant_method": "x"}), ["quantization_config"]),
    "code, unknown type": (code("AutoModelForCausalLM", model_type="evil"), []),
    "code, known type": (code("AutoModelForCausalLM"), None),
    "pickle in addition": (pickled("pytorch_model.bin", keep=True), None),
    "pickle under the right name": (pickled(WEIGHTS), []),
    "header of 2**62 bytes": (holds(WEIGHTS, (2**62).to_bytes(8, "little") + b"{}"), []),
    "nan in a gain": (entry("transformer.ln_f.weight", NAN), ["nan or inf"]),
    "tokenizer {}": (holds("tokenizer.json", b"{}"), ["tokenizer"]),
    "length of text": (settings(TOKENIZER, model_max_length="long"), ["vocabulary"]),
    "unknown bos token": (settings(TOKENIZER, bos_token="<new>"), ["<new>", "embeddings"]),
    "a dangling link": (instead(lambda path: path.symlink_to("gone")), []),
    "empty": (instead(Path.mkdir), ["config.json"]),
    "a pipe": (instead(os.mkfifo), []),
    "a classifier": (instead(lambda path: classifier(path, ("neg", "pos"))), []),
}
CLASSIFIER: Cases = {  # tests/rewards/test_classifiers.py has more
    "pickle only": (pickled("pytorch_model.bin"), ["safetensors"]),
    "code, unknown type": (code("AutoModelForSequenceClassification", model_type="evil"), []),
    "one class": (instead(lambda path: classifier(path, ("good",))), ["score --prompt"]),
    "names of three classes": (
        settings(num_labels=2, id2label={"0": "good", "1": "bad", "2": "c"}),
        ["num_labels=2", "'2': 'c'"],
    ),
    "no names": (settings(id2label=..., label2id=...), None),
    "names from 1": (settings(id2label={"1": "neg", "2": "pos"}), ["id2label"]),
    "head missing": (without("classifier.weight"), ["missing", "classifier.weight"]),
    "head nan": (entry("classifier.weight", NAN), ["classifier.weight", "nan"]),
    "no pad token": (settings(TOKENIZER, pad_token=...), ["pad"]),
}
REWARD: Cases = {
    "pickle only": CLASSIFIER["pickle only"],
    "head file missing": (lacks(HEAD), [HEAD]),
    "head without mean": (without("mean", HEAD), [HEAD]),
    "head nan": (entry("head.weight", NAN, HEAD), [HEAD]),
    "std 0": (entry("std", 0.0, HEAD), [HEAD]),
    "metadata missing": (lacks("reward_model.json"), None),
}
TABLES = {"policy": POLICY, "classifier": CLASSIFIER, "reward": REWARD}
