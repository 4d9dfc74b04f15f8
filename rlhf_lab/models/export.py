"""Export to Hugging Face directories, verified by loading them with plain transformers."""

import contextlib
import copy
import itertools
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlhf_lab.errors import LoadError
from rlhf_lab.files import expand_home, open_to_readers
from rlhf_lab.models.conversion import family_for, to_hugging_face_weights
from rlhf_lab.models.device import exact
from rlhf_lab.models.hooked_model import HookedModel, frozen_copy
from rlhf_lab.models.hooked_transformer import is_hooked
from rlhf_lab.models.load import hidden_progress, load_pretrained_model, load_pretrained_tokenizer
from rlhf_lab.models.lora import effective_weights
from rlhf_lab.models.value_head import TransformerWithCritic, TransformerWithValueHead, ValueHead

MAX_GAP = 1e-4  # of both numbers of a LogprobGap; an intact SmolLM2-135M has 1.2e-5 and 8e-6


class LogprobGap(NamedTuple):
    """Differences between the log-probs of two models; inf if any is not finite."""

    weighed: float  # in nats: mean at the worst position, weighed by the two models' probabilities
    relative: float  # largest, relative to 1 + |log-prob|; shows errors of unlikely tokens


def export_policy(
    policy: TransformerWithValueHead,
    base_model: str,
    out: str | Path,
    critic_path: str | None = None,
) -> tuple[Path, LogprobGap]:
    """Write a policy with its value head and critic, loaded from `base_model` and `critic_path`.

    Returns the directory and the log-prob gap to the model that plain transformers loads from it.
    A model that differs, or cannot be converted, is written to `OUT-unverified` instead, also with
    our names of the weights (hooked.safetensors).

    Raises:
        LoadError: If `out` is not empty or not writable, or the written model differs.
    """
    with new_directory(out := expand_home(out), policy) as partial:
        head = {name: x.detach().cpu() for name, x in policy.value_head.state_dict().items()}
        save_file(head, partial / "value_head.safetensors")
        gap = _write_verified(policy.base_model, base_model, partial)
        if isinstance(policy, TransformerWithCritic):
            base_model = critic_path or base_model
            gap = max(gap, _write_verified(policy.critic, base_model, partial / "critic"))
    return out, gap


def export_language_model(
    model: HookedModel, base_model: str, out: str | Path, notes: dict[str, Any]
) -> tuple[Path, LogprobGap]:
    """Write a language model like `export_policy`, with `notes` in tuning.json."""
    with new_directory(out := expand_home(out), model) as partial:
        (partial / "tuning.json").write_text(json.dumps(notes, indent=2) + "\n", encoding="utf-8")
        gap = _write_verified(model, base_model, partial)
    return out, gap


def _write_verified(model: HookedModel, base_model: str, directory: Path) -> LogprobGap:
    try:
        write_language_model(model, base_model, directory)
        return _verify(model, str(directory))
    except LoadError:  # a fit has no checkpoint
        weights = {name: x.detach().cpu().clone() for name, x in model.state_dict().items()}
        directory.mkdir(exist_ok=True)
        save_file(weights, directory / "hooked.safetensors")
        raise


@torch.no_grad()
def _verify(model: HookedModel, name: str) -> LogprobGap:
    loader = AutoModelForCausalLM
    theirs = load_pretrained_model(loader, name, "language model", dtype=torch.float32).eval()
    ours = frozen_copy(model).to("cpu", print_details=False).to(torch.float32, print_details=False)
    shape = 2, min(256, model.cfg.n_ctx)
    tokens = torch.randint(model.cfg.d_vocab, shape, generator=torch.Generator().manual_seed(0))
    logits = ours(tokens, attention_mask=torch.ones_like(tokens))
    gap = logprob_gap(logits, theirs(tokens).logits)
    if max(gap) > MAX_GAP:
        raise LoadError(
            f"The log-probs of the exported model differ by {gap.weighed:.2g} nats and by "
            f"{gap.relative:.2g} of their size ({MAX_GAP:g} is allowed)."
        )
    return gap


def logprob_gap(ours: Tensor, theirs: Tensor) -> LogprobGap:
    """Compare the logits of two models for the same tokens. `[*batch d_vocab]`"""
    ours, theirs = (logits.double().log_softmax(-1) for logits in (ours, theirs))
    distance, weight = (ours - theirs).abs(), (ours.exp() + theirs.exp()) / 2
    worst = (weight * distance).sum(-1).max(), (distance / (1 + ours.abs())).max()
    return LogprobGap(*(x.nan_to_num(nan=torch.inf).item() for x in worst))


def validate_new_directory(out: Path) -> None:
    """Raise LoadError unless `out` is an empty directory, or can be made."""
    try:
        is_empty = out.is_dir() and not any(out.iterdir())
        if out.is_symlink() or (out.exists() and not is_empty):
            raise LoadError(f"{out} already exists. Choose a new directory.")
        parent = next(path for path in out.absolute().parents if path.exists())
        os.rmdir(tempfile.mkdtemp(dir=parent))  # as root, os.access accepts /proc
    except OSError as error:
        raise LoadError(f"Cannot write {out} ({error}). Choose another directory.") from error


@contextlib.contextmanager
def new_directory(out: Path, *models: nn.Module) -> Iterator[Path]:
    """Yield a temporary directory that becomes `out`, or `OUT-unverified` after a LoadError."""
    validate_new_directory(out)
    hooked = [name for model in models for name, part in model.named_modules() if is_hooked(part)]
    if hooked:
        warnings.warn(f"{out} lacks hooks: {', '.join(hooked)}. Add them again.", stacklevel=4)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        yield partial
        open_to_readers(partial)
        partial.replace(out)
    except LoadError as error:
        if not any(partial.iterdir()):
            raise
        names = (f"{out.name}-unverified{-n if n > 1 else ''}" for n in itertools.count(1))
        kept = next(path for path in map(out.with_name, names) if not os.path.lexists(path))
        open_to_readers(partial)
        partial.replace(kept)
        raise LoadError(f"{error} {out} was not written. The weights are in {kept}.") from error
    except (OSError, SafetensorError) as error:
        raise LoadError(f"Cannot write {out} ({error}). Choose another directory.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_language_model(model: HookedModel, base_model: str, out: Path) -> None:
    """Write weights, configuration and tokenizer of a model that was loaded from `base_model`."""
    original = load_pretrained_model(AutoModelForCausalLM, base_model, "language model")
    exported = to_hugging_face(model, original)
    with hidden_progress():
        exported.save_pretrained(out)
    load_pretrained_tokenizer(base_model).save_pretrained(out)


@torch.no_grad()
def to_hugging_face(model: HookedModel, original: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of `original` with the weights of `model`, adapters included."""
    config = copy.deepcopy(original.config)
    config.tie_word_embeddings = False  # embedding and unembedding are trained separately
    parameters = effective_weights(model)
    if family_for(type(original).__name__).folds_unembedding_bias and model.unembed.b_U.any():
        norm, unembed = model.ln_final, model.unembed
        b, W_U = fold_b_U(norm.w, norm.b, unembed.W_U, unembed.b_U)
        parameters |= {"ln_final.b": b, "unembed.W_U": W_U}
        parameters.pop("unembed.b_U")
    exported = type(original)(config)
    exported.load_state_dict(to_hugging_face_weights(original, parameters))
    exported.generation_config = original.generation_config
    return exported.eval()


def fold_b_U(gain: Tensor, bias: Tensor, W_U: Tensor, b_U: Tensor) -> tuple[Tensor, Tensor]:
    """Add the unembedding bias, which GPT-2 lacks, to the bias of the final LayerNorm and W_U.

    LayerNorm gives x gain + bias where x sums to 0, so its product with u = 1 / gain is always
    bias . u. A term u c added to W_U therefore adds the constant (bias . u) c to the logits.

    1. Replace the bias by b' = bias + d with d along u, so that b' . u = u . u, which is not 0.
    2. Solve b' (W_U + u c) = bias W_U + b_U for c: c = (b_U - d W_U) / (u . u), one per token.
    """
    if not gain.all():
        raise LoadError("ln_final.w contains 0, so the unembedding bias cannot be folded into it.")
    gain, bias, W_U, b_U = (exact(x.detach()) for x in (gain, bias, W_U, b_U))
    u = 1 / gain
    shift = u * (1 - bias @ u / (u @ u))
    c = (b_U - shift @ W_U) / (u @ u)
    return bias + shift, W_U + torch.outer(u, c)


def load_value_head(directory: str | Path) -> ValueHead | nn.Linear:
    """Load the value head of an exported policy; a `nn.Linear` if it started as a reward head."""
    tensors = load_file(expand_home(directory) / "value_head.safetensors")
    if "weight" in tensors:
        head = nn.Linear(tensors["weight"].shape[1], 1)
    else:
        hidden, d_model = tensors["0.weight"].shape
        head = ValueHead(nn.Linear(d_model, hidden), nn.ReLU(), nn.Linear(hidden, 1))
    head.load_state_dict(tensors)
    return head
