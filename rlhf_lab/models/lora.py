"""LoRA: low-rank adapters on chosen weight matrices of a frozen model."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

from rlhf_lab.errors import ConfigError
from rlhf_lab.models.transformer_lens import HookedTransformer

ATTENTION_TARGETS = ("W_Q", "W_K", "W_V", "W_O")
LORA_TARGETS = (*ATTENTION_TARGETS, "W_in", "W_out", "W_gate")
MARK = ".parametrizations."


class LoRALinear(nn.Module):
    """The low-rank change of one linear map: W becomes W + (alpha / rank) A B.

    1. A, from the map's inputs to `rank` numbers, starts as Gaussian noise of variance 1 / inputs.
    2. B, from there to the outputs, starts at 0, so that at first nothing changes.
    3. `forward` adds (alpha / rank) A B to the weight, which stays as it is.

    It is a parametrization of the weight (torch.nn.utils.parametrize): reading `attn.W_Q`
    gives the sum, and every hook of the model fires as before.

    Args:
        weight: [in out], [head in d_head] (W_Q, W_K, W_V) or [head d_head out] (W_O).
        inputs_by_head: the last of these.

    Source: Hu et al. 2021, arXiv 2106.09685, section 4.1.
    """

    merged: Tensor | None

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
        self,
        weight: Float[Tensor, "*shape"],
        rank: int,
        generator: torch.Generator,
        inputs_by_head: bool = False,
    ) -> tuple[Float[Tensor, "*left"], Float[Tensor, "*right"]]:
        """A and B before the first step, of such shapes that A @ B has the shape of the weight.

        1. `*heads, rows, cols` are the axes of the weight. A is [rows rank] and B
           [*heads rank cols]; with `inputs_by_head` A is [*heads rows rank] and B [rank cols].
        2. A is standard normal noise from the generator, in one draw of A's shape, over the square
           root of the number of inputs: the entries of A for one rank.
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
        """(alpha / rank) A B, in the shape of the weight."""
        return self.alpha / self.rank * (self.A @ self.B)

    def forward(self, weight: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The weight with its change, or as it was while the adapter is off.

        1. While it is not `enabled`, give the weight.
        2. If the sum is there already (`merged`, which `merged_lora` sets while a batch is
           written, and which is None otherwise) and gradients are off, give that.
        3. Else give the sum of the weight and `delta()`; change nothing in place.
        """
        if not self.enabled:
            return weight
        if self.merged is not None and not torch.is_grad_enabled():
            return self.merged
        return weight + self.delta()


def add_lora(
    model: HookedTransformer,
    rank: int,
    alpha: float,
    targets: Sequence[str] = ("W_Q", "W_V"),
    seed: int = 0,
) -> None:
    """Freeze a model, in place, and hang adapters on the chosen matrices of every block.

    1. Take the gradients of all parameters away.
    2. Give each chosen matrix a `LoRALinear`, whose A and B are all that can be trained.

    Args:
        rank: of each change, from 1 to the smaller side of the matrix.
        alpha: the change is scaled by alpha / rank.
        targets: of W_Q, W_K, W_V, W_O, W_in, W_out and, in gated MLPs, W_gate.
        seed: seeds A, and touches no other random state.

    Raises:
        ConfigError: adapters are there already, or a rank, alpha or target that does not fit.
    """
    if lora_layers(model):
        raise ConfigError("the model has LoRA adapters already; load it afresh to change them.")
    places = _places(model, targets)
    if not alpha > 0:
        raise ConfigError(f"lora_alpha={alpha} is out of range; it must be greater than 0.")
    for module, name in places:
        weight = getattr(module, name)
        one_side = weight.shape[-1 if name == "W_O" else -2]
        smaller = min(one_side, weight.numel() // one_side)
        if not 1 <= rank <= smaller:
            raise ConfigError(
                f"lora_rank={rank} does not fit {name.lstrip('_')}; choose from 1 to {smaller}."
            )
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for module, name in places:
        adapter = LoRALinear(getattr(module, name), rank, alpha, generator, name == "W_O")
        parametrize.register_parametrization(module, name, adapter)


def _places(model: HookedTransformer, targets: Sequence[str]) -> list[tuple[nn.Module, str]]:
    """The weights that the targets stand for: module, and name in it."""
    unknown = [target for target in targets if target not in LORA_TARGETS]
    if unknown or not targets:
        raise ConfigError(
            f"lora_targets={tuple(targets)} has {repr(unknown[0]) if unknown else 'nothing'}; "
            f"choose from {', '.join(LORA_TARGETS)}."
        )
    places = []
    for block in model.blocks:
        for target in dict.fromkeys(targets):
            module = block.attn if target in ATTENTION_TARGETS else block.mlp
            name = f"_{target}" if hasattr(module, f"_{target}") else target
            if not hasattr(module, name):
                raise ConfigError(
                    f"lora_targets={tuple(targets)} has {target!r}, which this model does not "
                    "have; leave it out."
                )
            places.append((module, name))
    return places


def lora_layers(model: nn.Module) -> dict[str, LoRALinear]:
    """The adapters of a model by the name of the weight that each changes; empty without any."""
    return {
        name.rsplit(".", 1)[0].replace(MARK, "."): module
        for name, module in model.named_modules()
        if isinstance(module, LoRALinear)
    }


def effective_weights(model: nn.Module) -> dict[str, Tensor]:
    """All weights as the model uses them, adapters included, by their names without adapters."""
    weights = {}
    for name, parameter in model.named_parameters():
        if MARK not in name:
            weights[name] = parameter.detach()
        elif name.endswith(".original"):
            module_name, weight_name = name.removesuffix(".original").split(MARK)
            weight = getattr(model.get_submodule(module_name), weight_name)
            weights[f"{module_name}.{weight_name}"] = weight.detach()
    return weights


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Run a model as it was before its adapters, bit for bit; it is the reference of a LoRA run."""
    layers = list(lora_layers(model).values())
    before = [layer.enabled for layer in layers]
    try:
        for layer in layers:
            layer.enabled = False
        yield
    finally:
        for layer, enabled in zip(layers, before, strict=True):
            layer.enabled = enabled


@contextlib.contextmanager
def merged_lora(model: nn.Module) -> Iterator[None]:
    """Work out every changed weight once, for forwards without gradients, such as sampling a batch.

    The frozen weights stay as they are, and with gradients on, the adapters are used as ever, with
    the same numbers.
    """
    layers = lora_layers(model)
    try:
        with torch.no_grad():
            for name, layer in layers.items():
                module_name, weight_name = name.rsplit(".", 1)
                weight = model.get_submodule(module_name).parametrizations[weight_name].original
                layer.merged = weight + layer.delta()
        yield
    finally:
        for layer in layers.values():
            layer.merged = None


def without_adapters(model: HookedTransformer) -> HookedTransformer:
    """The frozen model below the adapters, with hooks of its own and no weights of its own.

    1. Copy the modules, but let the copy hold the very same parameters.
    2. Put the frozen weights back in the adapters' places.
    3. Take the copied hooks off.

    Raises:
        ConfigError: there are no adapters, so that the weights would change under its hands.
    """
    if not lora_layers(model):
        raise ConfigError("the model has no LoRA adapters; make a frozen_copy of it instead.")
    view = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    take_adapters_off(view, lambda module, name: module.parametrizations[name].original)
    view.reset_hooks(including_permanent=True)
    return view.eval()


def take_adapters_off(
    model: nn.Module, weight_of: Callable[[nn.Module, str], nn.Parameter]
) -> None:
    """Give every adapted module of a model, in place, plain weights instead.

    Args:
        weight_of: the weight that a module gets under a name, read while the adapter is there.
    """
    for module in list(model.modules()):
        if parametrize.is_parametrized(module):
            weights = {name: weight_of(module, name) for name in module.parametrizations}
            del module.parametrizations
            # copies share the class that torch made for the original, which stays as it is
            module.__class__ = type(module).__mro__[1]
            for name, weight in weights.items():
                module.register_parameter(name, weight)
