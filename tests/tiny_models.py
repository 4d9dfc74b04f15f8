"""Tiny Hugging Face models with random weights, and their tokenizers."""

from pathlib import Path
from typing import Any

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
LLAMA_SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")
CHAT_MARKS = ("<|im_start|>", "<|im_end|>")
# ChatML with spaces, a BOS first, and a word instead of the line break after a turn
CHAT_TEMPLATE = (
    "{{ bos_token }} {% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('late system') }}{% endif %}"
    "<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> w0 {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def word_tokenizer(
    special: tuple[str, ...], model_max_length: int, words: tuple[str, ...] = (), **options: Any
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word and these unknown, BOS, EOS and padding tokens."""
    roles = dict(zip(("unk_token", "bos_token", "eos_token", "pad_token"), special, strict=True))
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys([*special, *words, *WORDS]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=special[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    options |= roles | {"model_max_length": model_max_length}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def gpt2_tokenizer() -> PreTrainedTokenizerFast:
    return word_tokenizer(("<|endoftext|>",) * 4, N_CTX)


def llama_tokenizer() -> PreTrainedTokenizerFast:
    return word_tokenizer(LLAMA_SPECIAL, N_CTX)


def chat_tokenizer(template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the special tokens of Llama and ChatML, and a chat template."""
    options = {"extra_special_tokens": list(CHAT_MARKS), "chat_template": template}
    words = (*CHAT_MARKS, "system", "user", "assistant")
    return word_tokenizer(LLAMA_SPECIAL, CHAT_CTX, words, **options)


def randomize(model: nn.Module, seed: int) -> None:
    """Set every parameter to noise, gains to noise around 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = 0.3 * torch.randn(parameter.shape, generator=generator)
        is_gain = parameter.ndim == 1 and name.endswith("weight")
        parameter.data = noise + 1 if is_gain else noise


def tiny_gpt2(**changes: object) -> GPT2LMHeadModel:
    shape = {"n_positions": N_CTX, "n_ctx": N_CTX, "n_embd": 16, "n_layer": 2, "n_head": 2}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**({"vocab_size": 21} | shape | special | changes)))
    randomize(model, seed=1)
    return model.eval()


def tiny_llama(**changes: object) -> LlamaForCausalLM:
    """Return a random Llama with grouped-query attention and an untied unembedding."""
    settings = dict(vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=2)
    settings |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=N_CTX)
    settings |= dict(tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=3)
    model = LlamaForCausalLM(LlamaConfig(**(settings | changes)))
    randomize(model, seed=2)
    return model.eval()


def tiny_chat(directory: Path, template: str | None = CHAT_TEMPLATE) -> Path:
    """Write a random Llama that has a chat template."""
    model = tiny_llama(vocab_size=29, max_position_embeddings=CHAT_CTX)
    return save(model, chat_tokenizer(template), directory)


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, directory: Path) -> Path:
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def policy_on(directory: Path) -> TransformerWithValueHead:
    """Return a policy whose value estimates differ between states."""
    policy = TransformerWithValueHead(load_model(str(directory)))
    randomize(policy.value_head, seed=3)
    return policy
