"""Spoilt model directories by name: how each comes about, and what its refusal says.

What has no words works, as a whole directory does.
"""

import os
import shutil
from pathlib import Path

import torch

from tests.doors.spoilt_models import (
    WEIGHTS,
    classifier,
    cut,
    evil,
    evil_tokenizer,
    holds,
    instead,
    lacks,
    old_format,
    pickled,
    settings,
    sharded,
    weights,
)

DEEP, BOMB = "[" * 100_000, (2**62).to_bytes(8, "little") + b"{}"
EMBEDDING, NORM = "transformer.wte.weight", "transformer.ln_f.weight"


def with_value(name, value):
    def change(tensors):
        tensors[name].view(-1)[-1] = value

    return weights(change)


def as_dtype(dtype):
    return weights(lambda tensors: {name: value.to(dtype) for name, value in tensors.items()})


def of_shape(name, *shape):
    return weights(lambda tensors: tensors | {name: torch.zeros(shape)})


def without(name):
    return weights(lambda tensors: {key: value for key, value in tensors.items() if key != name})


CONFIG = {
    "config missing": (lacks("config.json"), ["config.json"]),
    "config empty": (holds("config.json", ""), ["config.json"]),
    "config {}": (holds("config.json", "{}"), []),
    "config a list": (holds("config.json", "[1]"), ["config.json"]),
    "config UTF-16": (holds("config.json", '{"model_type": "gpt2"}'.encode("utf-16")), []),
    "config of great depth": (holds("config.json", DEEP), []),
    "n_layer -1": (settings(n_layer=-1), ["layer"]),
    "n_layer one less": (settings(n_layer=1), ["layer"]),
    "n_layer one more": (settings(n_layer=3), ["missing"]),
    "n_head that does not divide": (settings(n_head=3), []),
    "n_embd doubled": (settings(n_embd=32), ["[48]", "[96]"]),
    "n_positions halved": (settings(n_positions=12, n_ctx=12), []),
    "vocab_size smaller than the weights": (settings(vocab_size=11), ["wte", "[11, 16]"]),
    "activation unknown": (settings(activation_function="gulp"), ["gulp"]),
    "epsilon nan": (settings(layer_norm_epsilon=float("nan")), ["logits"]),
    "dropout 5": (settings(attn_pdrop=5.0), []),
    "dtype junk": (settings(dtype="junk", torch_dtype="junk"), ["junk"]),
    "model_type unknown": (settings(model_type="gpt9"), ["gpt9"]),
    "quantized in bits": (
        settings(quantization_config={"quant_method": "junk"}),
        ["quantization_config"],
    ),
    "attention from the hub": (settings(attn_implementation="kernels-community/x"), []),
    "another embedding in the end": (settings(tie_word_embeddings=False), []),
    "bos beyond the vocabulary": (settings(bos_token_id=999), None),
    "id2label junk": (settings(id2label=[1]), []),
}
CODE = {
    "code, unknown type": (evil("AutoModelForCausalLM", model_type="evil"), []),
    "code, known type": (evil("AutoModelForCausalLM"), None),
    "code, unknown architecture": (
        evil("AutoModelForCausalLM", model_type="evil", architectures=["Model"]),
        [],
    ),
    "code for a tokenizer": (evil_tokenizer(), None),
    "code from elsewhere": (
        settings(auto_map={"AutoConfig": "some/repo--evil.Config"}, model_type="evil"),
        [],
    ),
    "pickle alone": (old_format(), ["safetensors"]),
    "evil pickle alone": (pickled("pytorch_model.bin"), ["safetensors"]),
    "evil pickle beside": (pickled("pytorch_model.bin", kept=True), None),
    "evil pickle under the right name": (pickled(WEIGHTS), []),
}
WEIGHT = {
    "weights missing": (lacks(WEIGHTS), []),
    "weights empty": (cut(0), []),
    "weights cut at the end": (cut(2000), []),
    "weights random bytes": (holds(WEIGHTS, b"\x93\xff\0\1" * 300), []),
    "header of 2**62 bytes": (holds(WEIGHTS, BOMB), []),
    "weights a link loop": (instead(lambda p: p.symlink_to(p), WEIGHTS), []),
    "no tensor at all": (weights(lambda tensors: {"other": torch.zeros(1)}), ["missing"]),
    "a tensor missing": (without(NORM), ["missing", "ln_f"]),
    "a tensor more": (of_shape("transformer.extra", 3), None),
    "embedding of another width": (of_shape(EMBEDDING, 21, 8), []),
    "a nan in a gain": (with_value(NORM, float("nan")), ["nan or inf"]),
    "a nan in the embedding of an unused word": (
        with_value(EMBEDDING, float("nan")),
        ["nan or inf"],
    ),
    "weights in float16": (as_dtype(torch.float16), None),
    "weights in bfloat16": (as_dtype(torch.bfloat16), None),
    "index without its file": (sharded(None), []),
    "index of a file elsewhere": (sharded("../elsewhere.safetensors"), None),
    "index without a map": (sharded(None, index={"metadata": {}}), []),
    "index of one shard": (sharded("model-00001-of-00001.safetensors"), None),
}
TOKENIZER = {
    "tokenizer missing": (lacks("tokenizer.json", "tokenizer_config.json"), ["tokenizer"]),
    "tokenizer.json missing": (lacks("tokenizer.json"), ["tokenizer"]),
    "tokenizer empty": (holds("tokenizer.json", ""), ["tokenizer"]),
    "tokenizer {}": (holds("tokenizer.json", "{}"), ["tokenizer"]),
    "tokenizer_config a list": (holds("tokenizer_config.json", "[1]"), ["tokenizer"]),
    "tokenizer_config cut": (holds("tokenizer_config.json", '{"bos'), ["tokenizer"]),
    "tokenizer_class unknown": (settings("tokenizer_config.json", tokenizer_class="Junk"), None),
    "length of text": (settings("tokenizer_config.json", model_max_length="long"), ["vocabulary"]),
    "length below 0": (settings("tokenizer_config.json", model_max_length=-1), None),
    "template junk": (settings("tokenizer_config.json", chat_template="{% x"), None),
    "a bos token unknown": (
        settings("tokenizer_config.json", bos_token="<new>"),
        ["<new>", "embeddings"],
    ),
    "no eos": (settings("tokenizer_config.json", eos_token=...), None),
    "no bos": (settings("tokenizer_config.json", bos_token=...), None),
    "no pad": (settings("tokenizer_config.json", pad_token=...), None),
}
POLICY = (
    CONFIG
    | CODE
    | WEIGHT
    | TOKENIZER
    | {
        "a file": (instead(lambda path: path.write_text("x")), []),
        "a link to itself": (instead(lambda path: path.symlink_to(path)), []),
        "a dangling link": (instead(lambda path: path.symlink_to("gone")), []),
        "empty": (instead(Path.mkdir), ["config.json"]),
        "a pipe": (instead(os.mkfifo), []),
        "a classifier": (instead(lambda path: classifier(path, ("neg", "pos"))), []),
    }
)

CLASSIFIER = {
    **{
        name: POLICY[name]
        for name in (
            "config missing",
            "config empty",
            "config a list",
            "config of great depth",
            "model_type unknown",
            "weights missing",
            "weights empty",
            "weights random bytes",
            "weights in float16",
            "evil pickle alone",
            "evil pickle beside",
            "evil pickle under the right name",
            "tokenizer missing",
            "tokenizer {}",
            "code from elsewhere",
            "a file",
            "a link to itself",
            "a dangling link",
            "empty",
        )
    },
    "code, unknown type": (evil("AutoModelForSequenceClassification", model_type="evil"), []),
    "code, known type": (evil("AutoModelForSequenceClassification"), None),
    "one class": (instead(lambda path: classifier(path, ("good",))), ["score --prompt"]),
    "three classes": (instead(lambda path: classifier(path, ("a", "b", "c"))), ["3 classes"]),
    "names of three classes, weights of two": (
        settings(id2label={"0": "a", "1": "b", "2": "c"}, label2id={"a": 0, "b": 1, "c": 2}),
        [],
    ),
    "num_labels 2 and names of three": (
        settings(num_labels=2, id2label={"0": "good", "1": "bad", "2": "c"}),
        ["num_labels", "3 classes"],
    ),
    "no names": (settings(id2label=..., label2id=...), None),
    "names null": (settings(id2label=None), None),
    "names a list": (settings(id2label=["neg", "pos"]), []),
    "names numbered with words": (settings(id2label={"a": "neg", "b": "pos"}), []),
    "names and numbers that contradict": (
        settings(label2id={"positive": 0, "negative": 1}),
        ["label2id", "'negative'"],
    ),
    "names numbered from 1": (settings(id2label={"1": "neg", "2": "pos"}), ["id2label"]),
    "head missing": (without("classifier.weight"), ["missing", "classifier.weight"]),
    "head nan": (with_value("classifier.weight", float("nan")), ["classifier.weight", "nan"]),
    "head of three rows": (of_shape("classifier.weight", 3, 16), []),
    "an inf in an embedding": (
        with_value("distilbert.embeddings.word_embeddings.weight", float("inf")),
        [],
    ),
    "no pad token": (settings("tokenizer_config.json", pad_token=...), ["pad"]),
    "vocabulary larger than the embedding": (
        instead(lambda path: classifier(path, ("neg", "pos"), vocab_size=20)),
        ["20 embeddings"],
    ),
    "vocabulary smaller than the embedding": (
        instead(lambda path: classifier(path, ("neg", "pos"), vocab_size=40)),
        None,
    ),
    "n_heads 0": (settings(n_heads=0), []),
    "dim text": (settings(dim="x"), ["dim"]),
    "max_position_embeddings 0": (settings(max_position_embeddings=0), []),
    "max_position_embeddings null": (settings(max_position_embeddings=None), []),
    "a language model": (
        instead(lambda path: shutil.copytree(path.parent / "models" / "policy", path)),
        [],
    ),
    "a reward model": (
        instead(lambda path: shutil.copytree(path.parent / "models" / "reward", path)),
        [],
    ),
}
HEAD = "reward_head.safetensors"
REWARD = {
    **{
        name: POLICY[name]
        for name in (
            "config missing",
            "weights missing",
            "tokenizer missing",
            "evil pickle alone",
            "a nan in a gain",
            "n_layer one less",
            "a file",
            "a link to itself",
        )
    },
    "head file missing": (lacks(HEAD), [HEAD]),
    "head empty": (cut(0, HEAD), [HEAD]),
    "head cut": (cut(60, HEAD), [HEAD]),
    "head without mean": (
        weights(lambda t: {k: t[k] for k in ("head.weight", "std")}, HEAD),
        [HEAD],
    ),
    "head of another width": (
        weights(lambda t: t | {"head.weight": torch.ones(1, 8)}, HEAD),
        [HEAD],
    ),
    "head of three rows": (weights(lambda t: t | {"head.weight": torch.ones(3, 16)}, HEAD), [HEAD]),
    "head of one number": (weights(lambda t: t | {"head.weight": torch.ones(1)}, HEAD), [HEAD]),
    "head nan": (
        weights(lambda t: t | {"head.weight": torch.full((1, 16), torch.nan)}, HEAD),
        [HEAD],
    ),
    "mean of two numbers": (weights(lambda t: t | {"mean": torch.ones(2)}, HEAD), [HEAD]),
    "mean inf": (weights(lambda t: t | {"mean": torch.tensor(torch.inf)}, HEAD), [HEAD]),
    "std 0": (weights(lambda t: t | {"std": torch.tensor(0.0)}, HEAD), [HEAD]),
    "std below 0": (weights(lambda t: t | {"std": torch.tensor(-1.0)}, HEAD), [HEAD]),
    "head in int32": (weights(lambda t: {k: v.int() for k, v in t.items()}, HEAD), [HEAD]),
    "head a directory": (instead(Path.mkdir, HEAD), [HEAD]),
    "notes missing": (lacks("reward_model.json"), None),
    "notes junk": (holds("reward_model.json", "{"), None),
    "a language model": (
        instead(lambda path: shutil.copytree(path.parent / "models" / "policy", path)),
        [HEAD],
    ),
    "a classifier": (instead(lambda path: classifier(path, ("neg", "pos"))), [HEAD]),
}
TABLES = {"policy": POLICY, "classifier": CLASSIFIER, "reward": REWARD}
