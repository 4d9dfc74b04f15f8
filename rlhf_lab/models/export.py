"""Export of a policy as a Hugging Face model of the architecture it came from."""

import contextlib
import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlhf_lab.errors import LoadError
from rlhf_lab.files import open_to_readers
from rlhf_lab.models.agreement import TOLERANCE, Agreement, agreement_with_files
from rlhf_lab.models.critic import TransformerWithCritic
from rlhf_lab.models.device import exact
from rlhf_lab.models.load import model_from_files, quiet, tokenizer_from_files
from rlhf_lab.models.lora import effective_weights
from rlhf_lab.models.transformer_lens import (
    HookedTransformer,
    family_of,
    to_hugging_face_weights,
)
from rlhf_lab.models.value_head import TransformerWithValueHead, ValueHead

VALUE_HEAD_FILE = "value_head.safetensors"
CRITIC_DIRECTORY = "critic"
TUNING_FILE = "tuning.json"
HOOKED_FILE = "hooked.safetensors"


class Unverified(LoadError):
    """A model that was written, and that plain transformers reads differently or not at all."""


def export_policy(
    policy: TransformerWithValueHead, base_model: str, out: str | Path
) -> tuple[Path, Agreement]:
    """Write a policy as a Hugging Face directory with its value head beside it, and check it.

    1. Write the weights, the configuration and the tokenizer beside the place they are meant for.
    2. Load them with plain transformers, and compare the log-probs with the policy's.
    3. If they agree, move the directory to its place; else to one of another name, see
       `new_directory`.

    Returns the directory, and how far the log-probs are apart (of two models, the worse).

    Args:
        base_model: the name that the policy was loaded from.

    Raises:
        LoadError: `out` is occupied or cannot be written, the base model is not there, or the
            written model differs.
    """
    out = Path(out)
    with new_directory(out) as partial:
        tensors = {name: p.detach().cpu() for name, p in policy.value_head.state_dict().items()}
        save_file(tensors, partial / VALUE_HEAD_FILE)
        found = _write_and_compare(policy.base_model, base_model, partial)
        if isinstance(policy, TransformerWithCritic):
            critic = partial / CRITIC_DIRECTORY
            found = max(found, _write_and_compare(policy.critic, base_model, critic))
    return out, found


def export_language_model(
    model: HookedTransformer, base_model: str, out: str | Path, notes: dict[str, Any]
) -> tuple[Path, Agreement]:
    """Write a language model as a Hugging Face directory with notes beside it, and check it.

    As `export_policy`, with notes in tuning.json in place of a value head. A model that cannot be
    converted is kept, too: its weights as the hooked model has them, in hooked.safetensors.

    Raises:
        LoadError: see `export_policy`.
    """
    out = Path(out)
    with new_directory(out) as partial:
        written = json.dumps(notes, indent=2) + "\n"
        (partial / TUNING_FILE).write_text(written, encoding="utf-8")
        try:
            found = _write_and_compare(model, base_model, partial)
        except Unverified:
            raise
        except LoadError as error:
            weights = {name: p.detach().cpu().clone() for name, p in model.state_dict().items()}
            save_file(weights, partial / HOOKED_FILE)
            raise Unverified(str(error).rstrip(".")) from error
    return out, found


def _write_and_compare(model: HookedTransformer, base_model: str, place: Path) -> Agreement:
    """Write a model; refuse it if plain transformers gives other log-probs.

    Raises:
        Unverified: it does.
    """
    write_language_model(model, base_model, place)
    try:
        found = agreement_with_files(model, place)
    except LoadError as error:
        raise Unverified(f"the exported model cannot be read ({str(error).rstrip('.')})") from error
    if not found.holds:
        raise Unverified(
            f"the exported model's log-probs differ by {found.weighed:.2g} nats weighed by "
            f"probability, and by {found.relative:.2g} of themselves at most ({TOLERANCE:g} is "
            "allowed)"
        )
    return found


def refuse_occupied(out: Path) -> None:
    """Raise LoadError where a file or a link is, or a directory with something in it."""
    if out.is_symlink():
        raise LoadError(f"{out} is a link; name a new directory.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise LoadError(f"{out} is there already; name a new directory.")


@contextlib.contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """Yield a place beside `out` to write to, which becomes `out` if all goes well.

    What is written and Unverified becomes `OUT-unverified` instead, so that no training is lost.

    Raises:
        LoadError: `out` is occupied or cannot be written, or what was written is not verified.
    """
    refuse_occupied(out)
    partial = out.with_name(f".{out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        open_to_readers(partial)
        partial.replace(out)
    except Unverified as error:
        aside = _free(out.with_name(f"{out.name}-unverified"))
        open_to_readers(partial)
        partial.replace(aside)
        raise LoadError(
            f"{error}, so {out} was not written; what was trained is in {aside}."
        ) from error
    except (OSError, SafetensorError) as error:
        raise LoadError(f"cannot write {out} ({error}); choose another place.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _free(place: Path) -> Path:
    """This place, or the first of it with -2, -3, ... where nothing is."""
    number, path = 1, place
    while path.exists() or path.is_symlink():
        number += 1
        path = place.with_name(f"{place.name}-{number}")
    return path


def write_language_model(model: HookedTransformer, base_model: str, out: Path) -> None:
    """Write weights, configuration and tokenizer of a model that was loaded from `base_model`.

    Raises:
        LoadError: see `to_hugging_face`.
        Unverified: a weight that was written is not finite.
    """
    original = model_from_files(AutoModelForCausalLM, base_model, "language model")
    tokenizer = tokenizer_from_files(base_model)
    exported = to_hugging_face(model, original)
    with quiet(on_disk=True):
        exported.save_pretrained(out)
    tokenizer.save_pretrained(out)
    for name, weight in exported.named_parameters():
        if not weight.isfinite().all():
            raise Unverified(
                f"the exported weight {name} holds nan or inf, as where a product of weights is "
                "beyond single precision after learning rates that were too high"
            )


@torch.no_grad()
def to_hugging_face(model: HookedTransformer, original: PreTrainedModel) -> PreTrainedModel:
    """A copy of `original` with the weights of `model`, adapters included.

    A HookedTransformer has embedding and unembedding apart, so `tie_word_embeddings` becomes
    False.

    Raises:
        LoadError: the architecture is not supported, or a weight has no place in it.
    """
    config = copy.deepcopy(original.config)
    config.tie_word_embeddings = False
    parameters = effective_weights(model)
    if family_of(original).folds_unembedding_bias and model.b_U.any():
        norm, unembed = model.ln_final, model.unembed
        bias, W_U = fold_unembedding_bias(norm.w, norm.b, unembed.W_U, unembed.b_U)
        parameters |= {"ln_final.b": bias, "unembed.W_U": W_U}
        del parameters["unembed.b_U"]
    weights = to_hugging_face_weights(original, parameters)
    exported = type(original)(config)
    exported.load_state_dict(weights)
    exported.generation_config = original.generation_config
    return exported.eval()


def fold_unembedding_bias(
    gain: Float[Tensor, " d_model"],
    bias: Float[Tensor, " d_model"],
    W_U: Float[Tensor, "d_model d_vocab"],
    b_U: Float[Tensor, " d_vocab"],
) -> tuple[Float[Tensor, " d_model"], Float[Tensor, "d_model d_vocab"]]:
    """Put the bias of the unembedding, which GPT-2 lacks, into the final norm's bias and W_U.

    A layer norm's output x gain + bias has a constant part: x sums to 0, so it is always
    bias . u along u = 1 / gain. A term u c added to W_U therefore adds the constant
    (bias . u) c to the logits.

    1. Move the bias to b' = bias + d, with d along u, so that b' . u = u . u is safely not 0.
    2. Solve b' (W_U + u c) = bias W_U + b_U for c, one number per token:
       c = (b_U - d W_U) / (u . u).

    Raises:
        LoadError: a gain is 0.
    """
    if not gain.all():
        raise LoadError("ln_final.w has a gain of 0, so the unembedding's bias has no place.")
    gain, bias, W_U, b_U = (exact(x.detach()) for x in (gain, bias, W_U, b_U))
    u = 1 / gain
    shift = u * (1 - bias @ u / (u @ u))
    c = (b_U - shift @ W_U) / (u @ u)
    return bias + shift, W_U + torch.outer(u, c)


def load_value_head(directory: str | Path) -> ValueHead | nn.Linear:
    """The value head that `export_policy` put beside a policy; one layer if it began as a reward.

    Raises:
        LoadError: it is not there.
    """
    path = Path(directory) / VALUE_HEAD_FILE
    try:
        tensors = load_file(path)
        if "weight" in tensors:
            head = nn.Linear(tensors["weight"].shape[1], 1)
        else:
            hidden, d_model = tensors["0.weight"].shape
            head = ValueHead(nn.Linear(d_model, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        head.load_state_dict(tensors)
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise LoadError(
            f"{path} is no exported value head ({error}); export the run anew."
        ) from None
    return head
