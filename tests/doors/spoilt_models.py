"""Tiny model directories to spoil: a policy, a classifier, a reward model, of random weights."""

import functools
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import DistilBertConfig, DistilBertForSequenceClassification

from rlhf_lab.models import load_model
from rlhf_lab.rewards import RewardModel
from tests.tiny_models import gpt2_tokenizer, llama_tokenizer, randomize, save, tiny_gpt2

Spoil = Callable[[Path], None]
WEIGHTS = "model.safetensors"
EVIL = """\
from pathlib import Path
Path({sign!r}).write_text("ran")
from transformers import GPT2Config as Config, GPT2LMHeadModel as Model
Config.model_type = "evil"
"""


class Payload:
    """An object whose unpickling writes a file."""

    def __init__(self, sign: Path) -> None:
        self.sign = sign

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


def spoiler(function: Callable[..., None]) -> Callable[..., Spoil]:
    """Let a function of a directory and options be written with its options alone."""

    @functools.wraps(function)
    def with_options(*arguments: Any, **options: Any) -> Spoil:
        return lambda directory: function(directory, *arguments, **options)

    return with_options


@spoiler
def settings(directory: Path, file: str = "config.json", **changes: Any) -> None:
    """Change the entries of a JSON file; `...` takes one out."""
    path = directory / file
    found = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in found.items() if v is not ...}))


@spoiler
def holds(directory: Path, file: str, content: str | bytes) -> None:
    """Put something else into a file."""
    content = content.encode() if isinstance(content, str) else content
    (directory / file).write_bytes(content)


@spoiler
def lacks(directory: Path, *files: str) -> None:
    """Take files out."""
    for file in files:
        (directory / file).unlink()


@spoiler
def cut(directory: Path, size: int, file: str = WEIGHTS) -> None:
    """Cut a file to a size."""
    os.truncate(directory / file, size)


@spoiler
def weights(directory: Path, change: Callable[[dict[str, Any]], Any], file: str = WEIGHTS) -> None:
    """Change the tensors of a file."""
    tensors = load_file(directory / file)
    save_file(change(tensors) or tensors, directory / file, metadata={"format": "pt"})


@spoiler
def pickled(directory: Path, name: str, kept: bool = False) -> None:
    """Put a pickle that runs a command where weights are looked for."""
    if not kept:
        (directory / WEIGHTS).unlink()
    (directory / name).write_bytes(pickle.dumps(Payload(sign(directory))))


@spoiler
def old_format(directory: Path) -> None:
    """Honest weights as older versions wrote them."""
    torch.save(load_file(directory / WEIGHTS), directory / "pytorch_model.bin")
    (directory / WEIGHTS).unlink()


@spoiler
def evil(directory: Path, kind: str, **changes: Any) -> None:
    """Bring code along that writes a file when it is imported."""
    (directory / "evil.py").write_text(EVIL.format(sign=str(sign(directory))))
    mapped = {"AutoConfig": "evil.Config", kind: "evil.Model"}
    settings(auto_map=mapped, **changes)(directory)


@spoiler
def evil_tokenizer(directory: Path) -> None:
    """Bring a tokenizer along that is code."""
    (directory / "evil.py").write_text(EVIL.format(sign=str(sign(directory))))
    mapped = {"AutoTokenizer": ["evil.Model", "evil.Model"]}
    settings("tokenizer_config.json", auto_map=mapped, tokenizer_class="Model")(directory)


@spoiler
def sharded(directory: Path, where: str | None, index: Any = ...) -> None:
    """Put the weights behind an index that names another file."""
    names = list(load_file(directory / WEIGHTS))
    if where is not None:
        target = directory / where
        shutil.copy(directory / WEIGHTS, target)
    (directory / WEIGHTS).unlink()
    if index is ...:
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, where or "gone.safetensors")}
    (directory / f"{WEIGHTS}.index.json").write_text(json.dumps(index))


@spoiler
def instead(directory: Path, make: Callable[[Path], None], file: str | None = None) -> None:
    """Put something else in the place of a file, or of the directory."""
    path = directory / file if file else directory
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    make(path)


def sign(directory: Path) -> Path:
    """What code that came with a directory would write if it ran."""
    return directory.parent / "it-ran"
