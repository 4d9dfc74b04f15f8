"""LoRA: low-rank adapters on chosen weight matrices of a frozen model."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

from rlhf_lab.errors import ConfigError
from rlhf_lab.models.hooked_model import HookedModel, frozen_copy

ATTENTION_TARGETS = ("W_Q", "W_K", "W_V", "W_O")
LORA_TARGETS = (*ATTENTION_TARGETS, "W_in", "W_out", "W_gate")
MARK = ".parametrizations."


class LoRALinear(nn.Module):
    """Low-rank change of one linear map: W becomes W + (alpha / rank) A B.

    As a parametrization (torch.nn.utils.parametrize), it makes `attn.W_Q` return the sum.

    Args:
        weight: [in out], [head in d_head] (W_Q, W_K, W_V) or [head d_head out] (W_O).
        inputs_by_head: True for W_O.

    Source: Hu et al. 2021, arXiv 2106.09685, section 4.1.
    """

    def __init__(
        self,
        weight: Float[Tensor, "*shape"],
        rank: int,
        alpha: float,
        generator: torch.Generator,
        inputs_by_head: bool = False,
    ) -> None:
        super().__init__()
        A, B = self.initial_factors(weight, rank, generator, inputs_by_head)
        self.A, self.B = nn.Parameter(A.to(weight)), nn.Parameter(B.to(weight))
        self.alpha, self.rank, self.enabled = alpha, rank, True
        self.register_buffer("merged", None, persistent=False)

    def initial_factors(
        self, weight: Tensor, rank: int, generator: torch.Generator, inputs_by_head: bool = False
    ) -> tuple[Float[Tensor, "*left"], Float[Tensor, "*right"]]:
        """Return A and B before the first step. A @ B has the shape of the weight.

        1. `*heads, rows, cols` are the axes of the weight. A is [rows rank] and B
           [*heads rank cols]; with `inputs_by_head` A is [*heads rows rank] and B [rank cols].
        2. A is standard normal noise from the generator, in one draw of A's shape, divided by the
           square root of the number of inputs (the entries of A for one rank).
        3. B is 0.
        """
        *heads, rows, cols = weight.shape
        if inputs_by_head:
            shape_A, shape_B = (*heads, rows, rank), (rank, cols)
        else:
            shape_A, shape_B = (rows, rank), (*heads, rank, cols)
        noise = torch.randn(shape_A, generator=generator)
        return noise / noise[..., 0].numel() ** 0.5, torch.zeros(shape_B)

    def delta(self) -> Float[Tensor, "*shape"]:
        """Compute (alpha / rank) A B, in the shape of the weight."""
        return self.alpha / self.rank * (self.A @ self.B)

    def forward(self, weight: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the changed weight.

        1. If `enabled` is False, return the weight.
        2. If `merged` is not None (`merged_lora` stores the sum in it) and gradients are disabled,
           return `merged`.
        3. Otherwise return the sum of the weight and `delta()`.
        """
        if not self.enabled:
            return weight
        if self.merged is not None and not torch.is_grad_enabled():
            return self.merged
        return weight + self.delta()


def add_lora(
    model: HookedModel,
    rank: int,
    alpha: float,
    targets: Sequence[str] = ("W_Q", "W_V"),
    seed: int = 0,
) -> None:
    """Freeze a model, in place, and add adapters to the chosen matrices of every block.

    Args:
        targets: of W_Q, W_K, W_V, W_O, W_in, W_out and, in gated MLPs, W_gate.
        seed: seeds A without changing the global random state.
    """
    if rank < 1 or not alpha > 0 or not targets:
        raise ConfigError(
            f"lora_rank={rank}, lora_alpha={alpha}, lora_targets={tuple(targets)}: set a rank of "
            f"at least 1, an alpha greater than 0 and targets from {', '.join(LORA_TARGETS)}."
        )
    generator, adapters = torch.Generator().manual_seed(seed), {}
    for layer, block in enumerate(model.blocks):
        for target in dict.fromkeys(targets):
            part = "attn" if target in ATTENTION_TARGETS else "mlp"
            module = getattr(block, part)
            name = f"_{target}" if hasattr(module, f"_{target}") else target
            weight = getattr(module, name, None)
            if target not in LORA_TARGETS or weight is None:
                has = [x for x in LORA_TARGETS if hasattr(block.attn, x) or hasattr(block.mlp, x)]
                problem = f"lora_targets={tuple(targets)}: the model has no matrix {target!r}."
                raise ConfigError(f"{problem} Choose from {', '.join(has)}.")
            adapter = LoRALinear(weight, rank, alpha, generator, inputs_by_head=target == "W_O")
            adapters[f"blocks.{layer}.{part}.{name}"] = adapter
    register_adapters(model, adapters)


def register_adapters(model: HookedModel, adapters: Mapping[str, LoRALinear]) -> None:
    """Freeze a model in place and add adapters, by the names of the weights that they change."""
    if lora_layers(model):
        raise ConfigError("The model already has LoRA adapters. Load it again to change them.")
    model.requires_grad_(False)
    for name, adapter in adapters.items():
        module, weight = name.rsplit(".", 1)
        parametrize.register_parametrization(model.get_submodule(module), weight, adapter)


def lora_layers(model: nn.Module) -> dict[str, LoRALinear]:
    """Return the adapters of a model by the names of the weights that they change."""
    return {
        name.rsplit(".", 1)[0].replace(MARK, "."): module
        for name, module in model.named_modules()
        if isinstance(module, LoRALinear)
    }


def effective_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return all weights including their adapters, by the names of the model without adapters."""
    names = (n.replace(MARK, ".").removesuffix(".original") for n, _ in model.named_parameters())
    return {n: attrgetter(n)(model).detach() for n in names if not n.endswith((".0.A", ".0.B"))}


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable all adapters: the model is bitwise identical to the one before `add_lora`."""
    before = {layer: layer.enabled for layer in lora_layers(model).values()}
    try:
        for layer in before:
            layer.enabled = False
        yield
    finally:
        for layer, enabled in before.items():
            layer.enabled = enabled


@contextlib.contextmanager
def merged_lora(model: nn.Module) -> Iterator[None]:
    """Compute every changed weight only once for all forward passes without gradients."""
    layers = lora_layers(model)
    try:
        with torch.no_grad():
            for name, layer in layers.items():
                layer.merged = attrgetter(name)(model)
        yield
    finally:
        for layer in layers.values():
            layer.merged = None


def without_adapters(model: HookedModel) -> HookedModel:
    """Return a view of the frozen model: the same parameters, without adapters and hooks."""
    if not lora_layers(model):
        raise ConfigError("The model has no LoRA adapters. Use frozen_copy instead.")
    view = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    remove_adapters(view, lambda module, name: module.parametrizations[name].original)
    view.reset_hooks(including_permanent=True)
    return view.eval()


def remove_adapters(model: nn.Module, weight_of: Callable[..., nn.Parameter]) -> None:
    """Replace every adapted weight by the parameter `weight_of(module, name)`, in place."""
    for module in list(model.modules()):
        if parametrize.is_parametrized(module):
            weights = {name: weight_of(module, name) for name in module.parametrizations}
            del module.parametrizations
            # torch's class for this module has the parametrized weights as properties
            module.__class__ = type(module).__mro__[1]
            for name, weight in weights.items():
                module.register_parameter(name, weight)


def merged_copy(model: HookedModel) -> HookedModel:
    """Return a `frozen_copy` with adapters merged into the weights."""
    merged = frozen_copy(model)
    remove_adapters(merged, lambda module, name: nn.Parameter(getattr(module, name).detach()))
    return merged.requires_grad_(False)


def same_weights(model: HookedModel, reference: HookedModel) -> bool:
    """Return True if two models have bitwise identical weights, merged adapters included."""
    first, second = effective_weights(model), effective_weights(reference)
    return first.keys() == second.keys() and all(
        torch.equal(weight, second[name].to(weight.device)) for name, weight in first.items()
    )
