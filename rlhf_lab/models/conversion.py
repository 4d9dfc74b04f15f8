"""Conversion of Hugging Face models to ours and back, by the tables in families.py."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any, NoReturn

import einops
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rlhf_lab.errors import LoadError
from rlhf_lab.models.hooked_transformer import ACTIVATION_FUNCTIONS, HookedTransformer
from rlhf_lab.models.model_config import ModelConfig
from rlhf_lab.models.tokenization import with_special_tokens

ACTIVATIONS = {name: name for name in ACTIVATION_FUNCTIONS}
ACTIVATIONS |= {"gelu_fast": "gelu_new", "gelu_pytorch_tanh": "gelu_new", "swish": "silu"}
CONFIG_FIELDS = {
    theirs: ours
    for ours, names in {
        "n_layers": "num_hidden_layers n_layer",
        "d_model": "hidden_size n_embd",
        "n_heads": "num_attention_heads n_head",
        "n_key_value_heads": "num_key_value_heads",
        "d_head": "head_dim",
        "d_mlp": "intermediate_size n_inner",
        "d_vocab": "vocab_size",
        "n_ctx": "max_position_embeddings n_positions",
        "act_fn": "hidden_act activation_function hidden_activation",
        "eps": "rms_norm_eps layer_norm_eps layer_norm_epsilon",
        "attn_scale": "scale_attn_weights query_pre_attn_scalar",
        "scale_attn_by_inverse_layer_idx": "scale_attn_by_inverse_layer_idx",
        "output_logits_soft_cap": "final_logit_softcapping",
        "parallel_attn_mlp": "use_parallel_residual",
    }.items()
    for theirs in names.split()
}  # field of a Hugging Face configuration -> field of `ModelConfig`
VALUES: dict[str, Callable[[Any], Any]] = {
    "scale_attn_weights": lambda is_scaled: -1.0 if is_scaled else 1.0,
    "query_pre_attn_scalar": math.sqrt,
}  # conversions of values that differ
LAYER_TYPES = {"full_attention": "global", "sliding_attention": "local"}
IN_EVERY_FAMILY = frozenset(
    "rope_parameters original_max_position_embeddings sliding_window layer_types "
    "use_sliding_window max_window_layers attention_bias tie_word_embeddings".split()
)  # converted by the functions below; the last two are visible in the weights
WITHOUT_EFFECT = signature(PreTrainedConfig.__init__).parameters.keys() | frozenset(
    "use_cache pad_token_id bos_token_id eos_token_id initializer_range is_decoder pretraining_tp "
    "attention_dropout hidden_dropout classifier_dropout resid_pdrop embd_pdrop attn_pdrop "
    "reorder_and_upcast_attn summary_type summary_use_proj summary_activation "
    "summary_proj_to_labels summary_first_dropout".split()
)  # on the logits in eval mode


@dataclass(frozen=True)
class TensorMap:
    """One tensor of a Hugging Face model and the parameters of ours that it contains."""

    theirs: str
    ours: tuple[str, ...]
    pattern: str = ""  # of einops, with the axes `d_head` and `part`, one for each parameter
    lengths: tuple[int, ...] = ()  # of the parameters on the first axis, equal by default
    scale: float = 1.0  # ours = theirs * scale + shift
    shift: float = 0.0
    d_head: int = 0

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Rearrange the tensor and split it into the part of each parameter."""
        tensor = self._rearrange(tensor, self.pattern)
        return list(tensor.split(self.lengths or len(tensor) // len(self.ours)))

    def join(self, parts: list[Tensor]) -> Tensor:
        return self._rearrange(torch.cat(parts), " -> ".join(self.pattern.split(" -> ")[::-1]))

    def to_ours(self, tensor: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.ours, map(self._rescale, self.split(tensor)), strict=True))

    def to_theirs(self, parameters: Mapping[str, Tensor], original: Tensor) -> Tensor:
        """Return the tensor in float32; what scale and shift would round is from `original`."""
        parts = self.split(original.detach().cpu().float())
        for i, name in enumerate(self.ours):
            ours, theirs = parameters[name].detach().cpu(), parts[i]
            parts[i] = (ours.float() - self.shift) / self.scale
            if self.scale != 1 or self.shift != 0:
                is_same = self._rescale(theirs.to(ours.dtype)) == ours
                parts[i] = torch.where(is_same, theirs, parts[i])
        return self.join(parts)

    def _rearrange(self, tensor: Tensor, pattern: str) -> Tensor:
        lengths = {"d_head": self.d_head, "part": len(self.ours)}
        lengths = {axis: length for axis, length in lengths.items() if axis in pattern}
        return einops.rearrange(tensor, pattern, **lengths) if pattern else tensor

    def _rescale(self, x: Tensor) -> Tensor:
        if self.scale == 1 and self.shift == 0:
            return x
        return x * torch.tensor(self.scale, dtype=x.dtype) + self.shift  # transformers rounds scale


@dataclass(frozen=True)
class Family:
    """The tables of one architecture, which has the name of its class in transformers."""

    architecture: str
    weights: Callable[[ModelConfig], Iterator[TensorMap]]  # `*` in a name is the number of a layer
    settings: Mapping[str, Any] = field(default_factory=dict)  # further fields of `ModelConfig`
    fields: Mapping[str, str] = field(default_factory=dict)  # in addition to `CONFIG_FIELDS`
    folds_unembedding_bias: bool = False  # into ln_final, since it is trained but not stored

    def validate(self, config: PreTrainedConfig) -> None:
        """Raise LoadError if a field is not in a table and not at its default value."""
        if getattr(config, "quantization_config", None) is not None:
            reject(config, "quantization_config", "weights of full precision")
        known = CONFIG_FIELDS.keys() | self.fields.keys() | IN_EVERY_FAMILY | WITHOUT_EFFECT
        for name, parameter in signature(type(config).__init__).parameters.items():
            default = parameter.default or None  # None and False both mean off
            if name not in known and (getattr(config, name, default) or None) != default:
                reject(config, name, f"{name}={parameter.default!r}")

    def model_config(self, config: PreTrainedConfig, **options: Any) -> ModelConfig:
        """Convert a configuration. Fields without a value keep the default of `ModelConfig`."""
        self.validate(config)
        cfg: dict[str, Any] = {"original_architecture": self.architecture, **self.settings}
        cfg |= {"d_head": None, "n_key_value_heads": None}
        for theirs, ours in (CONFIG_FIELDS | self.fields).items():
            value = getattr(config, theirs, None)
            if value is not None:
                cfg[ours] = VALUES[theirs](value) if theirs in VALUES else value
            if ours == "act_fn" and cfg.get(ours, "gelu") not in ACTIVATIONS:
                reject(config, theirs, f"one of {', '.join(ACTIVATIONS)}")
        if cfg["n_key_value_heads"] == cfg["n_heads"]:
            cfg["n_key_value_heads"] = None
        cfg["d_head"] = cfg["d_head"] or cfg["d_model"] // cfg["n_heads"]
        cfg["act_fn"] = ACTIVATIONS[cfg["act_fn"]]
        if hasattr(config, "rope_parameters"):
            cfg |= window_settings(config)
            cfg |= rotary_settings(config, cfg)
        return ModelConfig(**cfg | options)

    def tensor_maps(self, cfg: ModelConfig) -> Iterator[TensorMap]:
        """Yield all tensors, including those that a model may lack."""
        for row in self.weights(cfg):
            for layer in range(cfg.n_layers if "*" in row.theirs else 1):
                theirs, block = row.theirs.replace("*", str(layer)), f"blocks.{layer}."
                ours = tuple(block * ("*" in row.theirs) + name for name in row.ours)
                yield replace(row, theirs=theirs, ours=ours, d_head=cfg.d_head)


def reject(config: PreTrainedConfig, name: str, alternative: str) -> NoReturn:
    raise LoadError(
        f"{name}={getattr(config, name, None)!r:.80} of a {config.model_type} model is not "
        f"supported. Choose a model with {alternative}."
    )


def window_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the type of each layer and the size of the window; {} if all layers are global."""
    window, n_layers = getattr(config, "sliding_window", None), config.num_hidden_layers
    default = ["full_attention" if window is None else "sliding_attention"] * n_layers
    types = getattr(config, "layer_types", None) or default
    if set(types) - LAYER_TYPES.keys() or len(types) != n_layers:
        reject(config, "layer_types", f"{' or '.join(LAYER_TYPES)} for each layer")
    if "sliding_attention" not in types:
        return {}
    if not window or window < 1:
        reject(config, "sliding_window", "a number of tokens, which sliding_attention needs")
    return {"window_size": window, "attn_types": [LAYER_TYPES[name] for name in types]}


def rotary_settings(config: PreTrainedConfig, cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Return the frequencies of global and local layers, and the `n_ctx` in which they hold."""
    ropes, frequencies, rotary = config.rope_parameters, {}, {"n_ctx": cfg["n_ctx"]}
    by_layer_type = not LAYER_TYPES.keys().isdisjoint(ropes)
    for theirs, ours in LAYER_TYPES.items():
        rope = (ropes.get(theirs) if by_layer_type else ropes) or {"rope_theta": 1e4}
        rope_type = rope.get("rope_type", "default")
        fraction = rope.get("partial_rotary_factor") or 1.0
        n = int(cfg["d_head"] * fraction)
        rotary = {"rotary_base": rope["rope_theta"]} | rotary | {"rotary_dim": n}
        if rope_type == "linear" and "attn_types" in cfg and not by_layer_type:
            reject(config, "rope_parameters", "rope_type='default' with sliding windows")
        if rope_type == "longrope":
            if set(rope["short_factor"]) != {1}:
                reject(config, "rope_parameters", "short_factor=1 for rope_type='longrope'")
            rotary["n_ctx"] = min(rotary["n_ctx"], rope["original_max_position_embeddings"])
        frequencies[ours] = 1 / rope["rope_theta"] ** (torch.arange(0, n, 2) / n), 1.0
        if rope_type != "default":
            layer_type = {"layer_type": theirs} if by_layer_type else {}
            frequencies[ours] = ROPE_INIT_FUNCTIONS[rope_type](config, None, **layer_type)
    return rotary | {"positional_embedding_type": "rotary", "rotary_frequencies": frequencies}


def family_for(architecture: str) -> Family:
    from rlhf_lab.models.families import FAMILIES  # imports this module

    if architecture not in FAMILIES:
        raise LoadError(f"{architecture} is not supported. Choose one of {', '.join(FAMILIES)}.")
    return FAMILIES[architecture]


def tensor_maps(config: PreTrainedConfig, architecture: str | None = None) -> list[TensorMap]:
    """Return which tensors of a model with this configuration contain which parameters of ours."""
    family = family_for(architecture or next(iter(config.architectures or ()), config.model_type))
    return list(family.tensor_maps(family.model_config(config)))


def from_hugging_face(
    hf_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype
) -> HookedTransformer:
    """Convert a causal language model; biases that the architecture lacks are frozen at 0."""
    family = family_for(type(hf_model).__name__)
    cfg = family.model_config(hf_model.config, dtype=dtype, init_weights=False)
    model = HookedTransformer(cfg, with_special_tokens(tokenizer))
    parameters, tensors = {}, hf_model.state_dict()
    for row in family.tensor_maps(cfg):
        if row.theirs in tensors:
            parameters |= row.to_ours(tensors.pop(row.theirs).detach())
    if tensors:
        raise LoadError(f"The tensor {min(tensors)} is not supported. Choose a model without it.")
    missing, _ = model.load_state_dict(parameters, strict=False)
    for name in missing:
        if not (family.folds_unembedding_bias and name == "unembed.b_U"):
            model.get_parameter(name).requires_grad_(False)
    return model


def to_hugging_face_weights(
    hf_model: PreTrainedModel, parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Convert parameters back to float32 tensors of `hf_model`, bitwise identical if unchanged."""
    architecture, tensors = type(hf_model).__name__, hf_model.state_dict()
    maps = [row for row in tensor_maps(hf_model.config, architecture) if row.theirs in tensors]
    converted = {name for row in maps for name in row.ours}
    for name, parameter in parameters.items():
        if name not in converted and parameter.any():
            raise LoadError(f"{name} is not 0, and {architecture} has no tensor for it.")
    return {row.theirs: row.to_theirs(parameters, tensors[row.theirs]) for row in maps}
