"""Parameter groups of a policy: what is trained of its transformer by part, and its heads."""

from torch import nn

from rlhf_lab.diffing.groups import Groups, coarse_groups, fine_groups
from rlhf_lab.models import TransformerWithValueHead, lora_layers
from rlhf_lab.models.lora import MARK


def policy_groups(policy: TransformerWithValueHead, fine: bool = True) -> Groups:
    """A partition of the parameters that are trained, by the policy's names of them.

    1. Those of the transformer, as `fine_groups` or `coarse_groups` have them. An adapter belongs
       to the layer whose weight it changes: A is one for all heads, so that groups are coarse then.
    2. The value head, and a separate critic, each as one group.
    """
    model = policy.base_model
    adapted = bool(lora_layers(model))
    grouped = fine_groups(model) if fine and not adapted else coarse_groups(model)
    found: dict[str, list[tuple[str, int | None]]] = {}
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    for name, parts in zip(grouped.names, grouped.parts, strict=True):
        for weight in trained:
            heads = [head for part, head in parts if part == effective_name(weight)]
            found.setdefault(name, []).extend((f"base_model.{weight}", head) for head in heads)
    for name in ("value_head", "critic"):
        part = getattr(policy, name, None)
        weights = part.named_parameters() if isinstance(part, nn.Module) else ()
        found[name] = [(f"{name}.{n}", None) for n, weight in weights if weight.requires_grad]
    found = {name: parts for name, parts in found.items() if parts}
    return Groups(list(found), list(found.values()))


def effective_name(name: str) -> str:
    """The name of the weight that a parameter is, or that it helps to make: an adapter's."""
    if MARK not in name:
        return name
    module, rest = name.split(MARK)
    return f"{module}.{rest.split('.')[0]}"


def transformer_groups(policy: TransformerWithValueHead, fine: bool = True) -> Groups:
    """The groups of the transformer: a target of its logits has no slope along other weights."""
    groups = policy_groups(policy, fine)
    kept = [i for i, name in enumerate(groups.names) if name not in ("value_head", "critic")]
    return Groups([groups.names[i] for i in kept], [groups.parts[i] for i in kept])
