"""The workload that is timed: the size of the model, and the size of a phase."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from rlhf_lab.errors import ConfigError

ShapeName = Literal["nano", "tiny", "small", "medium"]

BOS = "<|endoftext|>"
REWARDED = "w1"


@dataclass(frozen=True)
class Shape:
    """The size of a GPT-2; the MLP is 4 times as wide as the residual stream."""

    n_layers: int
    d_model: int
    n_heads: int
    d_vocab: int
    n_ctx: int


SHAPES: MappingProxyType[str, Shape] = MappingProxyType(
    {
        "nano": Shape(2, 64, 4, 74, 128),
        "tiny": Shape(4, 128, 4, 2048, 128),
        "small": Shape(12, 768, 12, 50257, 1024),
        "medium": Shape(24, 1024, 16, 50257, 1024),
    }
)


@dataclass(frozen=True)
class Work:
    """One phase: sizes of sampling and number of passes."""

    shape: ShapeName = "tiny"
    batch_size: int = 32
    prefix_len: int = 4
    gen_len: int = 50
    top_k: int = 10
    num_minibatches: int = 4
    passes: int = 2
    device: str = "cpu"
    precision: str = "fp32"
    threads: int = 1
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("batch_size", "gen_len", "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be 1 or greater.")
        if self.batch_size % self.num_minibatches:
            raise ConfigError(
                f"batch_size={self.batch_size} is not divisible by {self.num_minibatches}, the "
                "number of minibatches; choose a multiple of it."
            )
        room = self.size.n_ctx - self.prefix_len
        if self.gen_len > room:
            raise ConfigError(
                f"gen_len={self.gen_len} exceeds what the shape {self.shape} has room for; "
                f"set it to at most {room}."
            )

    @property
    def size(self) -> Shape:
        """The model's size."""
        return SHAPES[self.shape]

    @property
    def prefix(self) -> str:
        """A prompt of `prefix_len` tokens, of which BOS is the first."""
        return " ".join(f"w{i}" for i in range(2, self.prefix_len + 1))

    def to_dict(self) -> dict[str, Any]:
        """Return all sizes as plain JSON values."""
        return dataclasses.asdict(self)

    def setup(self, model: Path) -> dict[str, Any]:
        """Return the first message to a contestant."""
        names = {"prefix": self.prefix, "rewarded": REWARDED, "bos": BOS}
        return {**self.to_dict(), "model": str(model), **names}


def random_model(shape: Shape, seed: int = 0) -> GPT2LMHeadModel:
    """Make a GPT-2 of this size with new weights, without dropout."""
    config = GPT2Config(
        vocab_size=shape.d_vocab,
        n_positions=shape.n_ctx,
        n_ctx=shape.n_ctx,
        n_embd=shape.d_model,
        n_layer=shape.n_layers,
        n_head=shape.n_heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT2LMHeadModel(config).eval()


def word_tokenizer(d_vocab: int) -> PreTrainedTokenizerFast:
    """Make a tokenizer of the words w1, w2, ... and one token for all others."""
    words = {BOS: 0} | {f"w{i}": i for i in range(1, d_vocab)}
    core = Tokenizer(WordLevel(words, unk_token=BOS))
    core.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=BOS,
        pad_token=BOS,
        unk_token=BOS,
        clean_up_tokenization_spaces=False,
    )


def write_model(shape: Shape, directory: Path, seed: int = 0) -> None:
    """Write random weights and their tokenizer, which every contestant loads."""
    random_model(shape, seed).save_pretrained(directory)
    word_tokenizer(shape.d_vocab).save_pretrained(directory)
