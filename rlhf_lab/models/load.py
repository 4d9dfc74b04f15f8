"""Loading of models and tokenizers: bundled, from a directory, from the hub, or loaded already."""

import contextlib
import re
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils import logging

from rlhf_lab.errors import LabError, LoadError, format_argument
from rlhf_lab.files import expand_home
from rlhf_lab.models.conversion import from_hugging_face
from rlhf_lab.models.hooked_transformer import HookedTransformer
from rlhf_lab.organism.bundled import BUNDLED, weights_dir

MAX_GAP, MAX_HALF_PRECISION_GAP = 1e-3, 0.25  # relative error of the logits of a converted model
CHECKED_TOKENS = 64
LAYER = re.compile(r"\.\d+\.")
LOADING = threading.Lock()  # transformers changes global settings of torch while it loads


def locate(name: str) -> tuple[str, bool]:
    """Return `(path, True)` for a bundled name or a model directory, else `(hub id, False)`."""
    if name in BUNDLED:
        return str(weights_dir(name)), True
    path = expand_home(name)
    if (path / "config.json").is_file():
        return str(path), True
    if (path / "run.json").is_file():
        raise LoadError(f"{name!r} is a run, not a model. Write its policy with `export`.")
    is_path = name.count("/") > 1 or name.startswith((".", "/", "~")) or "\\" in name
    if is_path or path.exists():
        raise LoadError(
            f"There is no model directory {name!r} with a config.json. Choose a model directory, a "
            f"hub id, or a bundled name ({', '.join(BUNDLED)}); of a checkpoint, its run."
        )
    return "gpt2" if name == "gpt2-small" else name, False


def load_pretrained(loader: Any, name: str, kind: str, **options: Any) -> Any:
    """Call `loader.from_pretrained`, which runs no code of the model, or raise LoadError."""
    place, on_disk = locate(name)
    options |= {"local_files_only": on_disk, "trust_remote_code": False}
    try:
        with LOADING, hidden_progress(on_disk):
            return loader.from_pretrained(place, **options)
    except Exception as error:  # an invalid configuration can raise any exception
        hint = "" if on_disk else f"no directory {Path(place).absolute()}; "
        raise LoadError(
            f"Cannot load the {kind} {name!r} from {place!r} ({hint}{_error_line(error)}). Choose "
            f"a directory with safetensors, a hub id, or a bundled name ({', '.join(BUNDLED)})."
        ) from error


def _error_line(error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return "it requires custom code, which is not run"
    text = " ".join(str(error).split())[:300].rstrip(".")
    return text if isinstance(error, LabError) else f"{type(error).__name__}: {text}"


@contextlib.contextmanager
def hidden_progress(hidden: bool = True) -> Iterator[None]:
    """Hide the progress bars of transformers if `hidden`."""
    was_enabled = logging.is_progress_bar_enabled()
    if hidden:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def load_pretrained_model(loader: Any, name: str, kind: str, **options: Any) -> PreTrainedModel:
    """Load a model from safetensors, since pickles can run code, or raise LoadError by weight."""
    saved = (load_pretrained(AutoConfig, name, kind).architectures or [""])[0]
    if re.search("Classification" if kind == "language model" else "CausalLM|LMHead", saved):
        raise LoadError(
            f"{name!r} is a {saved}, not a {kind}. Pass a language model as base_model, and a "
            "sequence classifier as reward_model (with reward_fn='learned', a reward model)."
        )
    options |= dict(use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True)
    model, report = load_pretrained(loader, name, kind, **options)
    weights = dict(model.named_parameters())
    kinds = {LAYER.sub(".", weight) for weight in weights if LAYER.search(weight)}
    problems = [f"{weight} is missing" for weight in sorted(report["missing_keys"])]
    for weight, shape, expected in sorted(report["mismatched_keys"]):
        problems.append(f"{weight} has shape {list(shape)}, expected {list(expected)}")
    for weight in sorted(report["unexpected_keys"]):
        if LAYER.search(weight) and (LAYER.sub(".", weight) in kinds or not kinds):
            problems.append(f"{weight} is in a layer that config.json leaves out")
    problems += [f"{k} contains nan or inf" for k, x in weights.items() if not x.isfinite().all()]
    if problems:
        others = f" and {len(problems) - 1} more" if problems[1:] else ""
        raise LoadError(
            f"{name!r} is not a complete {kind}: {problems[0]}{others}. Use the files of one model."
        )
    return model


def load_pretrained_tokenizer(name: str) -> Tokenizer:
    """Load a tokenizer, or raise LoadError instead of making an empty one without files."""
    tokenizer = load_pretrained(AutoTokenizer, name, "tokenizer")
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise LoadError(f"{name!r} has no tokenizer files. Save a tokenizer next to the weights.")
    place, on_disk = locate(name)
    if on_disk and not Path(place, "tokenizer_config.json").is_file():
        cause = "so transformers guesses special tokens and spaces. Save the file with the others."
        warnings.warn(f"{name!r} has no tokenizer_config.json, {cause}", stacklevel=2)
    return tokenizer


def validate_tokenizer(model: PreTrainedModel, tokenizer: Tokenizer, name: str) -> None:
    """Raise LoadError if the tokenizer has tokens without an embedding."""
    n_rows = model.get_input_embeddings().num_embeddings
    token, highest = max(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    if highest >= n_rows:
        raise LoadError(
            f"The tokenizer of {name!r} has {token!r} with the id {highest}, but the model has "
            f"{n_rows} embeddings. Use the model's tokenizer."
        )


def load_model(
    source: str | Path | PreTrainedModel,
    tokenizer: Tokenizer | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> HookedTransformer:
    """Load a causal language model as a `HookedTransformer`, with its weights unchanged.

    No weights are folded or centered: the norms stay trainable, and `ln_final.hook_normalized` is
    the activation before the norm's weight in every architecture. Biases that the architecture
    lacks are frozen at 0. Bundled models and directories are loaded without the network.

    Args:
        source: bundled name, directory, hub id, or loaded Hugging Face model.
        tokenizer: required with a loaded model; otherwise read from the same files.

    Raises:
        LoadError: If the files are not readable, the architecture or a setting is not supported,
            or the logits differ from those of transformers.
    """
    if isinstance(source, (str, Path)):
        name = str(source)
        hf_model = load_pretrained_model(AutoModelForCausalLM, name, "language model", dtype=dtype)
        tokenizer = tokenizer or load_pretrained_tokenizer(name)
    elif tokenizer is None or not hasattr(source, "config"):
        raise LoadError(f"source={format_argument(source)}: pass a name, or model and tokenizer=.")
    else:
        hf_model, name = source, source.config.name_or_path or type(source).__name__
    validate_tokenizer(hf_model, tokenizer, name)
    try:
        model = from_hugging_face(hf_model, tokenizer, dtype)
        gap = _logit_gap(model, hf_model)
    except Exception as error:  # an invalid configuration can raise any exception
        raise LoadError(f"{name!r} cannot be converted: {_error_line(error)}.") from error
    is_half = min(dtype.itemsize, hf_model.dtype.itemsize) == 2
    max_gap = MAX_HALF_PRECISION_GAP if is_half else MAX_GAP
    if not gap <= max_gap:  # True for nan
        raise LoadError(
            f"{name!r} cannot be converted: its logits differ from those of transformers by "
            f"{gap:.2g} of their norm ({max_gap:g} is allowed). Choose another model."
        )
    model.cfg.model_name = name
    return model.to(str(device))


@torch.no_grad()
def _logit_gap(model: HookedTransformer, hf_model: PreTrainedModel) -> float:
    tokens = torch.arange(min(CHECKED_TOKENS, model.cfg.n_ctx))[None] % model.cfg.d_vocab
    was_training = hf_model.training
    expected = hf_model.eval()(tokens.to(hf_model.device)).logits.to("cpu", torch.float32)
    hf_model.train(was_training)
    return (model(tokens).float() - expected).norm().item() / (expected.norm().item() or 1.0)
