"""Tiny Hugging Face models with random weights; the fixtures of `conftest.py` hand them out."""

from pathlib import Path

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
CHAT_CTX = 64


def word_tokenizer(special: dict[str, str], model_max_length: int) -> PreTrainedTokenizerFast:
    """One token per word; the distinct special tokens come first in the vocabulary."""
    vocabulary = {word: i for i, word in enumerate([*dict.fromkeys(special.values()), *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=special["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=model_max_length, **special
    )


def gpt2_tokenizer() -> PreTrainedTokenizerFast:
    """One special token is BOS, EOS and padding at once, as in GPT-2."""
    roles = ("unk_token", "bos_token", "eos_token", "pad_token")
    return word_tokenizer(dict.fromkeys(roles, "<|endoftext|>"), N_CTX)


def llama_tokenizer() -> PreTrainedTokenizerFast:
    """Four distinct special tokens."""
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return word_tokenizer(special, N_CTX)


CHAT_MARKS = ("<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{{ bos_token }} {% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('late system') }}{% endif %}"
    "<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> w0 {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
"""ChatML with blanks, a BOS in front, and a word behind each turn in place of its line break."""


def chat_tokenizer(template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Llama's special tokens, those of ChatML, and a chat template."""
    roles = ("unk", "bos", "eos", "pad")
    special = dict(zip(roles, ("<unk>", "<s>", "</s>", "<pad>"), strict=True))
    words = [*special.values(), *CHAT_MARKS, "system", "user", "assistant", *WORDS]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=CHAT_CTX,
        extra_special_tokens=list(CHAT_MARKS),
        chat_template=template,
        **{f"{role}_token": token for role, token in special.items()},
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


def tiny_chat(directory: Path, template: str | None = CHAT_TEMPLATE) -> Path:
    """A random Llama that reads and writes turns, as a Hugging Face directory."""
    model = tiny_llama(vocab_size=29, max_position_embeddings=CHAT_CTX)
    return save(model, chat_tokenizer(template), directory)


def save(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None, directory: Path
) -> Path:
    """Write a Hugging Face directory, without a tokenizer when that is None."""
    model.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    return directory


def policy_on(directory: Path) -> TransformerWithValueHead:
    """A policy whose value head's estimates differ from state to state."""
    policy = TransformerWithValueHead(load_model(str(directory)))
    randomize(policy.value_head, seed=3)
    return policy
