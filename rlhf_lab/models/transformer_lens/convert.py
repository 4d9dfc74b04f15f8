"""Conversion of Hugging Face models to hooked ones: configuration and weights, per architecture."""

import tempfile

import torch
import transformer_lens.loading_from_pretrained as conversion
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rlhf_lab.errors import LoadError
from rlhf_lab.models.transformer_lens.library import HookedTransformer, construct

SUPPORTED_ARCHITECTURES = ("GPT2LMHeadModel", "LlamaForCausalLM")


def from_hugging_face(
    hf_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype
) -> HookedTransformer:
    """Convert a causal language model, without folding or centring anything.

    The configuration goes through a directory with a neutral name, because TransformerLens reads
    the architecture from a directory, and guesses it from names such as "llama" or "gemma" anywhere
    in the path. The biases that the conversion adds to a Llama are frozen, so that it stays one.

    Raises:
        LoadError: the architecture is not supported.
    """
    architecture = type(hf_model).__name__
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise LoadError(
            f"the architecture {architecture} is not supported; "
            f"choose a model of one of {', '.join(SUPPORTED_ARCHITECTURES)}."
        )
    with tempfile.TemporaryDirectory(prefix="hf_config_") as directory:
        given = hf_model.config.to_dict() | {"architectures": [architecture]}
        if "n_positions" in given:
            given.setdefault("n_ctx", given["n_positions"])
        config = type(hf_model.config).from_dict(given)
        config.save_pretrained(directory)
        cfg = conversion.get_pretrained_model_config(
            directory, hf_cfg=config.to_dict(), device="cpu", dtype=dtype, fold_ln=False
        )
        weights = conversion.get_pretrained_state_dict(directory, cfg, hf_model, dtype=dtype)
        if "name_or_path" not in tokenizer.init_kwargs:
            tokenizer.save_pretrained(directory)
            tokenizer = AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
        model = construct(cfg, tokenizer, move_to_device=False)
    model.load_and_process_state_dict(
        weights,
        fold_ln=False,
        center_writing_weights=False,
        center_unembed=False,
        fold_value_biases=False,
    )
    if architecture == "LlamaForCausalLM":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not is_bias(name))
    return model


def is_bias(name: str) -> bool:
    """Whether a parameter of a HookedTransformer is a bias of a linear map, by its name."""
    return name.rsplit(".", 1)[-1].lstrip("_").startswith("b_")
