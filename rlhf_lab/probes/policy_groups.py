"""Parameter groups of a policy: what is trained of its transformer by part, and its heads."""

from torch import nn

from rlhf_lab.diffing.groups import Groups, coarse_groups, fine_groups
from rlhf_lab.models import TransformerWithValueHead, lora_layers
from rlhf_lab.models.lora import MARK


def policy_groups(
    policy: TransformerWithValueHead, fine: bool = True, heads: bool = True
) -> Groups:
    """Return a partition of the trained parameters, by the policy's names of them.

    Those of the transformer are `fine_groups` or `coarse_groups`; with adapters, which belong to
    the layer whose weight they change, they are coarse, since A serves all heads.

    Args:
        heads: True to have groups of the value head and of a separate critic.
    """
    model = policy.base_model
    adapted = bool(lora_layers(model))
    grouped = fine_groups(model) if fine and not adapted else coarse_groups(model)
    found: dict[str, list[tuple[str, int | None]]] = {}
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    for name, parts in zip(grouped.names, grouped.parts, strict=True):
        for weight in trained:
            kept = [head for part, head in parts if part == effective_name(weight)]
            found.setdefault(name, []).extend((f"base_model.{weight}", head) for head in kept)
    for name in ("value_head", "critic") if heads else ():
        part = getattr(policy, name, None)
        weights = part.named_parameters() if isinstance(part, nn.Module) else ()
        found[name] = [(f"{name}.{n}", None) for n, weight in weights if weight.requires_grad]
    found = {name: parts for name, parts in found.items() if parts}
    return Groups(list(found), list(found.values()))


def effective_name(name: str) -> str:
    """Return the name of the weight that a parameter is, or that an adapter changes."""
    if MARK not in name:
        return name
    module, rest = name.split(MARK)
    return f"{module}.{rest.split('.')[0]}"
