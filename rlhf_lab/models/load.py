"""Model loading: bundled, a local directory, a hub id or a loaded model."""

import contextlib
import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from rlhf_lab.errors import LabError, LoadError
from rlhf_lab.models.transformer_lens import HookedTransformer, from_hugging_face
from rlhf_lab.models.weight_files import check_files, check_loaded, check_numbers
from rlhf_lab.organism.bundled import BUNDLED, weights_dir

LARGEST_GAP, LARGEST_GAP_OF_HALF = 1e-3, 0.25
"""Of the logits of a converted model, relative to their norm, and where weights are rounded to half
precision, in which both models round at other places."""
CHECKED_TOKENS = 64
GPT2_END = "<|endoftext|>"
HUB_NAMES = MappingProxyType({"gpt2-small": "gpt2"})


def locate(name: str) -> tuple[str, bool]:
    """Say where a model's files are: `(path, True)` on this disk, or `(hub id, False)`.

    A bundled name comes first, then an existing directory, then the hub.

    Raises:
        LoadError: the name looks like a path but no model directory is there.
    """
    if name in BUNDLED:
        return str(weights_dir(name)), True
    path = Path(os.path.expanduser(name))  # a user that is not there stays as written
    if path.is_dir():
        if (path / "run.json").is_file() and not (path / "config.json").is_file():
            raise LoadError(f"{name!r} is a run; write its policy to a directory with `export`.")
        if not (path / "config.json").is_file():
            raise LoadError(f"{name!r} has no config.json; give a Hugging Face model directory.")
        return str(path), True
    if name.count("/") > 1 or name.startswith((".", "/", "~")) or "\\" in name:
        raise LoadError(
            f"there is no model directory {name!r}; give an existing directory, a hub id, "
            f"or a bundled name ({', '.join(BUNDLED)})."
        )
    return HUB_NAMES.get(name, name), False


def from_files(loader: type, name: str, what: str, **options: object) -> object:
    """Call `loader.from_pretrained`; for a bundled or local name, without touching the network.

    No code that comes with the files is run, nor is it asked whether it may be.

    Raises:
        LoadError: one sentence on what was looked for, and where.
    """
    place, on_disk = locate(name)
    with _readable(name, what), quiet(on_disk):
        return loader.from_pretrained(
            place, local_files_only=on_disk, trust_remote_code=False, **options
        )


@contextlib.contextmanager
def _readable(name: str, what: str) -> Iterator[None]:
    """Turn whatever transformers says of files that it cannot read into one sentence."""
    try:
        yield
    except LabError:
        raise
    except Exception as error:  # a configuration of others fails in any way there is
        place, on_disk = locate(name)
        where = f"the directory {place!r}"
        remedy = "correct its files, or save the model anew"
        if not on_disk:
            where = f"the bundled models ({', '.join(BUNDLED)}), this directory and the model hub"
            remedy = "correct the name, or see that the hub can be reached"
        raise LoadError(
            f"no {what} {name!r}: looked in {where} ({_reason(error)}); {remedy}."
        ) from error


def _reason(error: Exception) -> str:
    """What an error says, on one line and as far as a reader needs it."""
    if "trust_remote_code" in str(error):
        return "it needs code of its own, which is not run"
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    if isinstance(error, (KeyError, TypeError, AttributeError)):
        lines[0] = f"{type(error).__name__}: {lines[0]}"
    shown = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return shown[:300].rstrip(".")


def model_from_files(loader: type, name: str, what: str, **options: object) -> PreTrainedModel:
    """`from_files` for a model, refusing files that lack weights, which transformers would make up.

    Weights are read from safetensors only: a pickled file can hold code.

    Raises:
        LoadError: see `from_files`; or some weights are not in the files, or pickled.
    """
    place, on_disk = locate(name)
    options |= {"use_safetensors": True, "output_loading_info": True}
    options |= {"ignore_mismatched_sizes": True}  # check_loaded tells which, and refuses them
    with _readable(name, what):
        if on_disk:
            check_files(loader, name, place)
    model, report = from_files(loader, name, what, **options)
    check_loaded(model, report, name, what)
    if on_disk:
        check_numbers(model, name, place)
    return model


def tokenizer_from_files(name: str) -> PreTrainedTokenizerBase:
    """`from_files` for a tokenizer, refusing the empty one that transformers makes without files.

    Raises:
        LoadError: see `from_files`; or no tokenizer file is there.
    """
    place, on_disk = locate(name)
    tokenizer = from_files(AutoTokenizer, name, "tokenizer")
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise LoadError(f"no tokenizer {name!r}: no tokenizer files are there; put them beside it.")
    if on_disk and not Path(place, "tokenizer_config.json").is_file():
        warnings.warn(
            f"{name!r} has no tokenizer_config.json, so its special tokens and the blanks between "
            "words are taken from its model_type; put the file beside tokenizer.json.",
            stacklevel=2,
        )
    return tokenizer


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse a tokenizer that gives tokens of which the model has no embedding.

    Raises:
        LoadError: they belong to different models.
    """
    n_rows = model.get_input_embeddings().num_embeddings
    token, highest = max(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    if highest >= n_rows:
        raise LoadError(
            f"the tokenizer of {name!r} gives {token!r} the number {highest}, but its model has "
            f"{n_rows} embeddings; put the model's own tokenizer beside it, or resize it."
        )


def _check_end(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse a tokenizer without an EOS token, for which TransformerLens puts GPT-2's.

    Where the vocabulary does not have that one, it would be read as the unknown word.

    Raises:
        LoadError: there is none.
    """
    if tokenizer.eos_token is None and GPT2_END not in tokenizer.get_vocab():
        raise LoadError(
            f"the tokenizer of {name!r} has no EOS token, so no text would end; name its eos_token "
            "in tokenizer_config.json."
        )


@contextlib.contextmanager
def quiet(on_disk: bool) -> Iterator[None]:
    """Hide the progress bars of a load that takes no time; downloads keep theirs."""
    shown = logging.is_progress_bar_enabled()
    if on_disk:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_model(
    source: str | Path | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> HookedTransformer:
    """Load a causal language model as a `HookedTransformer` with its weights as trained.

    1. Find the Hugging Face model and its tokenizer (nothing is fetched for a bundled or local
       one).
    2. Convert the configuration and the weights, without folding or centring: the norms stay
       trainable, and `ln_final.hook_normalized` is the activation before the norm's gain in every
       architecture.
    3. Freeze the biases that the architecture does not have, so that it stays one of it.
    4. Move the model, `cfg.device` included.

    Args:
        source: a bundled name, a local directory, a hub id, or a loaded Hugging Face model.
        tokenizer: needed with a loaded model only; otherwise it is read beside the weights.

    Raises:
        LoadError: nothing was found, or the architecture is not supported.
    """
    if not isinstance(source, (str, Path)) and not hasattr(source, "config"):
        raise LoadError(f"{source!r:.60} names no model; give a name, a directory or a hub id.")
    if isinstance(source, (str, Path)):
        source = str(source)
        hf_model = model_from_files(AutoModelForCausalLM, source, "language model", dtype=dtype)
        tokenizer = tokenizer or tokenizer_from_files(source)
        check_vocabulary(hf_model, tokenizer, source)
        name = source
    else:
        hf_model, name = source, source.config.name_or_path or type(source).__name__
        if tokenizer is None:
            raise LoadError(
                f"a loaded model ({name}) comes without its tokenizer; pass tokenizer=."
            )
    _check_end(tokenizer, name)
    try:
        model = from_hugging_face(hf_model, tokenizer, dtype)
        gap = _logit_gap(model, hf_model)
    except LabError as error:
        raise LoadError(f"{name!r} cannot be converted to a hooked model: {error}") from error
    except Exception as error:  # a configuration of others fails in any way there is
        raise LoadError(
            f"{name!r} cannot be converted to a hooked model ({_reason(error)}); correct its "
            "files, or choose another model."
        ) from error
    if not math.isfinite(gap):
        raise LoadError(f"{name!r} gives logits that are not finite; its weights are damaged.")
    is_half = min(torch.finfo(kind).bits for kind in (dtype, hf_model.dtype)) == 16
    if gap > (LARGEST_GAP_OF_HALF if is_half else LARGEST_GAP):
        raise LoadError(
            f"{name!r} cannot be converted to a hooked model: its logits come out different by "
            f"{gap:.2g} of their norm; choose a model without unusual settings."
        )
    model.cfg.model_name = name
    return model.to(str(device), print_details=False)


@torch.no_grad()
def _logit_gap(model: HookedTransformer, hf_model: PreTrainedModel) -> float:
    """How far the logits moved in a conversion, relative to their norm: 0 if nothing was lost.

    A lost bias or rope scaling shows here, and a lost window where it is shorter than the text.
    """
    n = min(CHECKED_TOKENS, model.cfg.n_ctx)
    tokens = torch.arange(n)[None] % model.cfg.d_vocab
    was_training = hf_model.training
    expected = hf_model.eval()(tokens.to(hf_model.device)).logits.to("cpu", torch.float32)
    hf_model.train(was_training)
    found = model(tokens, attention_mask=torch.ones_like(tokens)).float()
    size = expected.norm().item()
    return (found - expected).norm().item() / size if size else found.norm().item()
