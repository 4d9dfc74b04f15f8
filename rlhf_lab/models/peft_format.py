"""PEFT's format of LoRA adapters: adapter_config.json with adapter_model.safetensors."""

import json
import math
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils import parametrize
from transformers import AutoConfig

from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.models.agreement import Agreement, agreement
from rlhf_lab.models.export import Unverified, new_directory
from rlhf_lab.models.load import from_files, load_model
from rlhf_lab.models.lora import LoRALinear, lora_layers
from rlhf_lab.models.peft_places import (
    Factors,
    fill_adapter,
    has_adapters,
    split_factors,
    theirs_of,
)
from rlhf_lab.models.transformer_lens import HookedTransformer, Place, places_of

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<which>[AB])\.weight")
OFF: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    "loftq_config": ({},),
    "corda_config": ({},),
}
"""What settings that change the meaning of an adapter may be, besides what counts as false."""
REFUSED = (
    "use_dora modules_to_save lora_bias layer_replication target_parameters use_qalora use_bdlora "
    "trainable_token_indices alora_invocation_tokens megatron_config arrow_config kasa_config "
    "monteclora_config velora_config"
).split()
"""What PEFT has and this package does not; refused where it is on."""


def export_adapter(model: HookedTransformer, base_model: str, out: str | Path) -> Agreement:
    """Write a model's adapters as PEFT keeps them, and compare what is read back.

    Args:
        base_model: the name of the model below the adapters.

    Returns how far the log-probs of the model and of the adapters that are read back are apart.

    Raises:
        LoadError: there are no adapters, or `out` is occupied.
    """
    adapters = lora_layers(model)
    if not adapters:
        raise LoadError(
            "the policy has no LoRA adapters, since all its weights were trained; leave --adapter "
            "out."
        )
    config = from_files(AutoConfig, base_model, "language model")
    modules = theirs_of(places_of(config), adapters)
    tensors = {}
    for name, factors in modules.items():
        for letter, matrix in (("A", factors.A.T), ("B", factors.B.T)):
            key = f"{PREFIX}{name}.lora_{letter}.weight"
            tensors[key] = matrix.detach().cpu().float().contiguous()
    with new_directory(Path(out)) as partial:
        notes = _adapter_config(modules, base_model, config.model_type == "gpt2")
        written = json.dumps(notes, indent=2) + "\n"
        (partial / ADAPTER_CONFIG).write_text(written, encoding="utf-8")
        save_file(tensors, partial / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        found = _agreement_read_back(model, base_model, partial)
        if not found.holds:
            raise Unverified(f"the adapters' log-probs differ by {found.weighed:.2g} nats")
    return found


@torch.no_grad()
def _agreement_read_back(model: HookedTransformer, base_model: str, place: Path) -> Agreement:
    """Compare a model with the base model under the adapters in a directory, on random tokens."""
    reloaded = load_model(base_model)
    load_adapter(reloaded, place, base_model)
    shape, generator = (2, min(64, model.cfg.n_ctx)), torch.Generator().manual_seed(0)
    tokens = torch.randint(model.cfg.d_vocab, shape, generator=generator)
    mask, device = torch.ones_like(tokens), model.W_U.device
    ours = model(tokens.to(device), attention_mask=mask.to(device)).cpu()
    return agreement(ours, reloaded(tokens, attention_mask=mask))


def _adapter_config(modules: Mapping[str, Factors], base_model: str, conv: bool) -> dict[str, Any]:
    """What PEFT reads beside the tensors; ranks and alphas that differ go by module.

    Args:
        conv: its layers keep their matrices as [in out] (GPT-2).
    """
    ranks = {name: factors.A.shape[1] for name, factors in modules.items()}
    alphas = {name: factors.scale * ranks[name] for name, factors in modules.items()}
    r, alpha = next(iter(ranks.values())), next(iter(alphas.values()))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": r,
        "lora_alpha": alpha,
        "target_modules": list(modules),
        "rank_pattern": {re.escape(name): rank for name, rank in ranks.items() if rank != r},
        "alpha_pattern": {re.escape(name): of for name, of in alphas.items() if of != alpha},
        "fan_in_fan_out": conv,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }


def load_adapter(model: HookedTransformer, directory: str | Path, base_model: str) -> None:
    """Freeze a model, in place, and hang an adapter of PEFT's on it, to be trained on.

    Args:
        base_model: the name that the model was loaded from.

    Raises:
        LoadError: no adapter, one of a kind that is not here, or one that does not fit the model.
        ConfigError: the model has adapters already.
    """
    if lora_layers(model):
        raise ConfigError("the model has LoRA adapters already; load it afresh to change them.")
    where = f"adapter_from={str(directory)!r}"
    config, tensors = _read_config(Path(directory), where), _read_tensors(Path(directory), where)
    places = {
        place.theirs.removesuffix(".weight"): place
        for place in places_of(from_files(AutoConfig, base_model, "language model"))
    }
    found: dict[str, Factors] = {}
    for name, (A, B) in tensors.items():
        if name not in places or not has_adapters(places[name]):
            raise LoadError(
                f"{where} changes {name}, which is no matrix of the blocks of {base_model!r}; "
                "give the base_model that it was trained on, or an adapter of other targets."
            )
        factors = Factors(A.T, B.T, _scale(config, name, len(A)))
        found |= _fitting(model, places[name], factors, f"{where}, {name},")
    model.requires_grad_(False)
    for name, factors in found.items():
        owner, weight_name = name.rsplit(".", 1)
        module, rank = model.get_submodule(owner), factors.A.shape[1]
        weight = getattr(module, weight_name)
        generator = torch.Generator().manual_seed(0)
        by_head = weight_name.lstrip("_") == "W_O"
        adapter = LoRALinear(weight, rank, factors.scale * rank, generator, by_head)
        fill_adapter(adapter, factors)
        parametrize.register_parametrization(module, weight_name, adapter)


def _fitting(
    model: HookedTransformer, place: Place, factors: Factors, where: str
) -> dict[str, Factors]:
    """The factors of each weight in a module, refused where their sizes are not the weight's."""
    try:
        found = split_factors(place, factors)
    except LoadError as error:
        raise LoadError(f"{where} {error}") from None
    parameters = dict(model.named_parameters())
    for name, each in found.items():
        weight = parameters[name]
        in_first = weight.shape[-2] if not name.endswith("W_O") else weight.shape[:-1].numel()
        sizes = in_first, weight.numel() // in_first
        if (len(each.A), each.B.shape[1]) != sizes:
            raise LoadError(
                f"{where} is of {len(each.A)} inputs and {each.B.shape[1]} outputs, and the "
                f"model's {name} of {sizes[0]} and {sizes[1]}; give the base_model that it was "
                "trained on."
            )
    return found


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """What the product of the matrices is multiplied by: alpha / r, or alpha / sqrt(r) (rsLoRA)."""
    alpha = config.get("lora_alpha", 8)
    for pattern, of in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = of
            break
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _read_config(directory: Path, where: str) -> dict[str, Any]:
    """The configuration of an adapter that is LoRA and nothing else."""
    path = directory / ADAPTER_CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"{where} is no adapter of PEFT's ({error}); give a directory.") from None
    if not isinstance(config, dict):
        raise LoadError(f"{where} is no adapter of PEFT's: its {ADAPTER_CONFIG} has no settings.")
    for name in (*OFF, *REFUSED):
        value, allowed = config.get(name), OFF.get(name, ())
        if name == "peft_type" and value not in allowed or value and value not in allowed:
            raise LoadError(
                f"{where} has {name}={value!r:.60}, which is not here; give a plain LoRA adapter, "
                "or merge it into its model with PEFT."
            )
    if config.get("lora_dropout"):
        warnings.warn(
            f"{where} has lora_dropout={config['lora_dropout']}, and there is no dropout here; it "
            "is trained on without.",
            stacklevel=3,
        )
    return config


def _read_tensors(directory: Path, where: str) -> dict[str, tuple[Tensor, Tensor]]:
    """The two matrices of each module, [rank in] and [out rank]."""
    path = directory / ADAPTER_WEIGHTS
    if not path.is_file():
        raise LoadError(
            f"{where} has no {ADAPTER_WEIGHTS}; save it with PEFT as safetensors, since other "
            "files could run code."
        )
    try:
        stored = load_file(path)
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{path} is corrupt ({error}); save the adapter anew.") from None
    halves: dict[str, dict[str, Tensor]] = {}
    for key, tensor in stored.items():
        match = TENSOR.fullmatch(key.removeprefix(PREFIX))
        if match is None:
            raise LoadError(f"{where} holds {key}, which is no LoRA matrix; leave it out.")
        if tensor.ndim != 2 or not tensor.is_floating_point() or not tensor.isfinite().all():
            raise LoadError(f"{where} holds {key} that is no matrix of finite numbers.")
        halves.setdefault(match["module"], {})[match["which"]] = tensor.float()
    for name, found in halves.items():
        if set(found) != {"A", "B"} or len(found["A"]) != found["B"].shape[1]:
            raise LoadError(f"{where} has no fitting pair of matrices for {name}; save it anew.")
    if not halves:
        raise LoadError(f"{where} holds no matrices; save the adapter anew.")
    return {name: (found["A"], found["B"]) for name, found in halves.items()}
