"""Conversion of Hugging Face models to hooked ones and back, by the table of the architecture."""

import tempfile
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from transformer_lens import HookedTransformerConfig
from transformers import (
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlhf_lab.errors import LoadError
from rlhf_lab.models.transformer_lens import families
from rlhf_lab.models.transformer_lens.library import HookedTransformer, construct

FAMILIES = MappingProxyType(
    {
        family.architecture: family
        for family in (
            families.GPT2,
            families.NEOX,
            families.LLAMA,
            families.MISTRAL,
            families.QWEN2,
            families.QWEN3,
            families.PHI3,
            families.GEMMA2,
            families.GEMMA3,
            families.OLMO2,
        )
    }
)
"""The architectures that are loaded and exported, by the name of transformers' class."""


def family_of(hf_model: PreTrainedModel) -> families.Family:
    """The table of a model's architecture.

    Raises:
        LoadError: there is none.
    """
    architecture = type(hf_model).__name__
    if architecture not in FAMILIES:
        raise LoadError(
            f"the architecture {architecture} is not supported; "
            f"choose a model of one of {', '.join(FAMILIES)}."
        )
    return FAMILIES[architecture]


def from_hugging_face(
    hf_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype
) -> HookedTransformer:
    """Convert a causal language model, without folding or centring anything.

    Biases of the hooked model that the architecture does not have are frozen at 0, so that what is
    trained stays one of it.

    Raises:
        LoadError: the architecture, or a setting of it, is not supported.
    """
    family, config = family_of(hf_model), hf_model.config
    family.check(config)
    cfg = HookedTransformerConfig(
        **family.settings(config),
        original_architecture=family.architecture,
        model_name=family.architecture,
        init_weights=False,
        device="cpu",
        dtype=dtype,
    )
    weights = family.read(config, hf_model.state_dict())
    with tempfile.TemporaryDirectory(prefix="tokenizer_") as directory:
        model = construct(cfg, _with_a_name(tokenizer, directory), move_to_device=False)
        model.tokenizer.chat_template = tokenizer.chat_template  # it may have been read anew
    model.load_state_dict(weights, strict=False)
    for name, parameter in model.named_parameters():
        if name in weights:
            continue
        if not is_bias(name):
            raise LoadError(f"the weight {name} is in no tensor of a {family.architecture}.")
        if not (family.folds_unembedding_bias and name == "unembed.b_U"):
            parameter.requires_grad_(False)
    return model


def to_hugging_face_weights(
    hf_model: PreTrainedModel, parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The weights of a hooked model's parameters under transformers' names, in float32.

    Args:
        hf_model: what the hooked model was converted from.

    Raises:
        LoadError: the architecture is not supported, or a parameter has no place in it.
    """
    family = family_of(hf_model)
    return family.write(hf_model.config, parameters, hf_model.state_dict())


def places_of(config: PreTrainedConfig) -> list[families.Place]:
    """Where the weights of a model of this configuration stand in a hooked model.

    Raises:
        LoadError: the architecture is not supported.
    """
    architecture = next(iter(config.architectures or ()), type(config).__name__)
    if architecture not in FAMILIES:
        raise LoadError(
            f"the architecture {architecture} has no places for adapters; choose a model of one of "
            f"{', '.join(FAMILIES)}."
        )
    return FAMILIES[architecture].places(config)


def _with_a_name(tokenizer: PreTrainedTokenizerBase, directory: str) -> PreTrainedTokenizerBase:
    """A tokenizer that TransformerLens can read anew: one made in memory is saved for that."""
    if "name_or_path" in tokenizer.init_kwargs:
        return tokenizer
    tokenizer.save_pretrained(directory)
    return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


def is_bias(name: str) -> bool:
    """Whether a parameter of a HookedTransformer is a bias of a linear map, by its name."""
    return name.rsplit(".", 1)[-1].lstrip("_").startswith("b_")
