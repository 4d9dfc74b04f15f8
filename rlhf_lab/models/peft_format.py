"""LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors."""

import json
import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from rlhf_lab.errors import LoadError
from rlhf_lab.files import expand_home
from rlhf_lab.models.conversion import TensorMap, tensor_maps
from rlhf_lab.models.export import new_directory
from rlhf_lab.models.families import GPT2_IN, GPT2_OUT, HEADS_IN, HEADS_OUT, TRANSPOSED
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.models.load import load_pretrained
from rlhf_lab.models.lora import LORA_TARGETS, LoRALinear, lora_layers, register_adapters

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<letter>[AB])\.weight")
KIND = re.compile(rf"\b_?({'|'.join(LORA_TARGETS)})$")
CONV1D = {"": TRANSPOSED, GPT2_IN: HEADS_IN, GPT2_OUT: HEADS_OUT}  # [in, out] to [out, in]
SUPPORTED = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),  # those that keep the base model
}
KNOWN = frozenset(
    "lora_alpha alpha_pattern use_rslora lora_dropout task_type base_model_name_or_path revision "
    "inference_mode auto_mapping peft_version r rank_pattern target_modules exclude_modules "
    "layers_to_transform layers_pattern fan_in_fan_out eva_config megatron_core qalora_group_size "
    "ensure_weight_tying".split()
)  # fields that are read here, or that matter only together with others


class Factors(NamedTuple):
    """The change scale * A @ B of a weight, in the shapes of `LoRALinear`."""

    A: Tensor
    B: Tensor
    scale: float


def export_adapter(model: HookedModel, base_model: str, out: str | Path) -> None:
    """Write the adapters of a model, loaded from `base_model`, in PEFT's format.

    Raises:
        LoadError: If the model has no adapters, or `out` is not empty or not writable.
    """
    adapters = lora_layers(model)
    if not adapters:
        raise LoadError("The policy has no LoRA adapters. Export without --adapter.")
    rows = {k: row for k, row in adapter_rows(base_model).items() if {*row.ours} & {*adapters}}
    modules = {module: join_factors(row, model) for module, row in rows.items()}
    tensors = {
        f"base_model.model.{module}.lora_{letter}.weight": matrix.cpu().float().contiguous()
        for module, factors in modules.items()
        for letter, matrix in zip("AB", factors, strict=False)
    }
    config = json.dumps(adapter_config(modules, base_model), indent=2) + "\n"
    with new_directory(expand_home(out), model) as partial:
        (partial / ADAPTER_CONFIG).write_text(config, encoding="utf-8")
        save_file(tensors, partial / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def load_adapter(model: HookedModel, directory: str | Path, base_model: str) -> None:
    """Freeze a model, loaded from `base_model`, in place, and add the adapters of a PEFT directory.

    Raises:
        LoadError: If the files are not readable, not plain LoRA, or do not fit the model.
    """
    where, rows = f"adapter_path={str(directory)!r}", adapter_rows(base_model)
    config, pairs = read_adapter(Path(directory), where)
    trained_on = str(config.get("base_model_name_or_path") or base_model)
    if Path(trained_on).name != Path(base_model).name:
        message = f"{where} was trained on {trained_on!r}, not on base_model={base_model!r}."
        warnings.warn(message, stacklevel=2)
    adapters: dict[str, LoRALinear] = {}
    for module, pair in pairs.items():
        try:
            theirs = Factors(**pair, scale=read_scale(config, module, len(pair["A"])))
            for name, ours in split_factors(rows[module], theirs).items():
                rank, weight, is_W_O = ours.A.shape[-1], attrgetter(name)(model), "W_O" in name
                sizes = rank, theirs.scale * rank, torch.Generator()
                adapters[name] = adapter = LoRALinear(weight, *sizes, is_W_O)
                adapter.load_state_dict({"A": ours.A, "B": ours.B})
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise LoadError(
                f"{where} does not fit {module} of {base_model!r} ({error!r}). Use adapters of "
                "matrices in blocks and the base_model that they were trained on."
            ) from error
    register_adapters(model, adapters)


def adapter_rows(base_model: str) -> dict[str, TensorMap]:
    """Return the map of each module that can have adapters, for its weight as [out, in]."""
    config = load_pretrained(AutoConfig, base_model, "language model")
    rows = {row.theirs.removesuffix(".weight"): row for row in tensor_maps(config)}
    rows = {name: row for name, row in rows.items() if KIND.search(row.ours[0])}
    if config.model_type == "gpt2":
        rows = {name: replace(row, pattern=CONV1D[row.pattern]) for name, row in rows.items()}
    return rows


def split_factors(row: TensorMap, theirs: Factors) -> dict[str, Factors]:
    """Convert PEFT's A `[rank in]` and B `[out rank]` of a module to factors of our weights."""
    # a rank that changes one weight only becomes a rank of that weight; else all get the same A
    A, B, scale = theirs
    if row.ours[0].endswith("W_O"):
        return {row.ours[0]: Factors(row.split(A)[0], B.T, scale)}
    parts = row.split(B)  # [*heads rank d_out]
    is_used = torch.stack([part.movedim(-2, 0).flatten(1).any(1) for part in parts])
    if (is_used.sum(0) != 1).any():
        is_used[:] = True
    pieces = zip(row.ours, parts, is_used, strict=True)
    return {k: Factors(A[used].T, x[..., used, :], scale) for k, x, used in pieces if used.any()}


@torch.no_grad()
def join_factors(row: TensorMap, model: HookedModel) -> Factors:
    """Undo `split_factors`: ranks side by side, and B = 0 for weights without an adapter."""
    adapters = lora_layers(model)
    present = [adapters[name] for name in row.ours if name in adapters]
    scale, ranks = present[0].alpha / present[0].rank, sum(adapter.rank for adapter in present)
    if row.ours[0].endswith("W_O"):
        return Factors(row.join([present[0].A]), present[0].B.T, scale)
    parts, start = [], 0
    for name in row.ours:
        *heads, _, n_columns = attrgetter(name)(model).shape
        parts.append(present[0].B.new_zeros(*heads, ranks, n_columns))
        if name in adapters:
            B = adapters[name].B * (adapters[name].alpha / adapters[name].rank / scale)
            parts[-1][..., start : start + B.shape[-2], :] = B
            start += B.shape[-2]
    return Factors(torch.cat([adapter.A for adapter in present], 1).T, row.join(parts), scale)


def adapter_config(modules: Mapping[str, Factors], base_model: str) -> dict[str, Any]:
    """Return adapter_config.json, with the ranks and alphas that differ by module."""
    ranks = {re.escape(module): len(factors.A) for module, factors in modules.items()}
    alphas = {re.escape(module): x.scale * len(x.A) for module, x in modules.items()}
    rank, alpha = next(iter(ranks.values())), next(iter(alphas.values()))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "target_modules": list(modules),
        "fan_in_fan_out": next(iter(modules)).startswith("transformer.h."),  # GPT-2's Conv1D
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {module: x for module, x in ranks.items() if x != rank},
        "alpha_pattern": {module: x for module, x in alphas.items() if x != alpha},
    }


def read_scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return alpha / rank, or alpha / sqrt(rank) for rsLoRA (Kalajdzievski 2023)."""

    def read(patterns: str, default: Any) -> Any:
        values = (config.get(patterns) or {}).items()
        return next((x for key, x in values if re.match(rf"(.*\.)?({key})$", module)), default)

    alpha, stored = read("alpha_pattern", config.get("lora_alpha", 8)), config.get("r", rank)
    if (stored := read("rank_pattern", stored)) != rank:
        raise ValueError(f"{ADAPTER_CONFIG} has rank {stored}, {ADAPTER_WEIGHTS} has rank {rank}")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def read_adapter(directory: Path, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configuration, and the matrices by module and letter."""
    try:
        config = dict(json.loads((expand_home(directory) / ADAPTER_CONFIG).read_text("utf-8")))
        tensors = load_file(expand_home(directory) / ADAPTER_WEIGHTS)
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        problem = f"is not a PEFT adapter in safetensors ({error})"
        raise LoadError(f"{where} {problem}. Use one of `export --adapter`.") from error
    for name, value in config.items():
        if value and name not in KNOWN and value not in SUPPORTED.get(name, ()):
            raise LoadError(
                f"{where} has {name}={value!r:.60}, which is not supported. Use a plain LoRA "
                "adapter, or merge the adapter into its model with PEFT."
            )
    if config.get("lora_dropout"):
        warnings.warn(f"{where}: lora_dropout is ignored; training is without it.", stacklevel=3)
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = TENSOR.fullmatch(name)
        if match is None or tensor.ndim != 2 or not tensor.isfinite().all():
            raise LoadError(f"{where} contains {name}, which is not a finite LoRA matrix.")
        pairs.setdefault(match["module"], {})[match["letter"]] = tensor.float()
    return config, pairs
