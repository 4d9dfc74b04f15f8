"""Lesson 02, the value head: hang it on a hook, read its values, and read values off any layer."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlhf_lab.course.cases import standard_cases
from rlhf_lab.course.exercise import Case, make_exercise
from rlhf_lab.course.exercises.toys import TOY_VOCABULARY, toy_transformer
from rlhf_lab.functional import generated_values
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.models.hooked_model import empty_cache
from rlhf_lab.probes.value_lens import fit_ridge


def _value_cases() -> tuple[Case, ...]:
    sizes, one = {"seq": 7}, {"seq": 4}
    after_prefix = standard_cases(
        generated_values, sizes=sizes, one_token=one, large={"values": 1e30}, prefix_len=3
    )
    after_bos = standard_cases(generated_values, sizes=sizes, one_token={"seq": 2}, prefix_len=1)
    return after_prefix + after_bos


def _forward_cases() -> tuple[Case, ...]:
    generator = torch.Generator().manual_seed(0)

    def tokens(batch: int, seq: int) -> torch.Tensor:
        return torch.randint(TOY_VOCABULARY, (batch, seq), generator=generator)

    padded = torch.tensor([[False, False, True, True, True], [True] * 5])
    return (
        Case("ordinary", {"input_ids": tokens(3, 5)}),
        Case("batch of 1", {"input_ids": tokens(1, 6)}),
        Case("one token", {"input_ids": tokens(2, 1)}),
        Case("left padding", {"input_ids": tokens(2, 5), "attention_mask": padded}),
        Case("other hooks attached", {"input_ids": tokens(2, 4), "listen": True}),
        Case("with a KV cache", {"input_ids": tokens(2, 5), "cached": 3}),
    )


def _observe_forward(build: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    model, heard = toy_transformer(), []
    plain = model(arguments["input_ids"])
    policy = build(model, seed=1)
    torch.nn.init.ones_(policy.value_head[2].weight)
    if arguments.get("listen"):
        model.add_hook("hook_embed", lambda activation, hook: heard.append(hook.name))
    hooks_before = _count_hooks(model)
    ids, mask = arguments["input_ids"], arguments.get("attention_mask")
    logits, values = _forward(policy, ids, mask, arguments.get("cached", 0))
    if values.shape != ids.shape:
        return {"values": values.detach()}
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    whole = mask is None and "cached" not in arguments
    facts = {
        "values": values.detach().masked_fill(~real, 0.0),
        "logits are as without your hook": not whole or torch.allclose(logits, plain, atol=1e-5),
        "logits": logits.detach().masked_fill(~real[..., None], 0.0),
        "hooks left behind": _count_hooks(model) - hooks_before,
        "other hooks heard": heard,
    }
    for name, trained in (("logits", logits.square()), ("values", values)):
        policy.zero_grad(set_to_none=True)
        trained[real].sum().backward(retain_graph=True)
        learns = [name for name, p in policy.named_parameters() if p.grad is not None]
        facts[f"parameters that the {name} train"] = sorted(learns)
    return facts


def _forward(policy: Any, ids: torch.Tensor, mask: torch.Tensor | None, cached: int) -> Any:
    if not cached:
        return policy(ids) if mask is None else policy(ids, mask)
    model = policy.base_model
    cache = empty_cache(model, len(ids))
    parts = []
    for part in (ids[:, :cached], ids[:, cached:]):
        real = torch.ones_like(part, dtype=torch.bool)
        parts.append(policy(part, attention_mask=real, past_kv_cache=cache))
    (logits, values), (more_logits, more_values) = parts
    return torch.cat([logits, more_logits], 1), torch.cat([values, more_values], 1)


def _count_hooks(model: torch.nn.Module) -> int:
    return sum(len(point._forward_hooks) for point in model.hook_dict.values())


def _ridge_cases() -> tuple[Case, ...]:
    def draw(*shape: int, seed: int, away: float = 0.0, ridge: float = 0.1) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(*shape, generator=generator) + away
        slope = torch.randn(shape[-1], generator=generator)
        y = x @ slope + torch.randn(shape[:-1], generator=generator)
        return {"x": x, "y": y, "mask": torch.ones(shape[:-1], dtype=torch.bool), "ridge": ridge}

    masked = draw(12, 3, seed=2)
    masked["mask"] = torch.arange(12) % 3 > 0
    spoilt = {name: masked[name].clone() for name in ("x", "y")}
    spoilt["x"][0, 1], spoilt["y"][3] = torch.nan, torch.nan
    constant = draw(12, 3, seed=6)
    constant["x"] = constant["x"][:1].expand(12, 3)
    return (
        Case("ordinary", draw(12, 3, seed=0)),
        Case("several sites at once", draw(2, 9, 4, seed=1)),
        Case("masked", masked),
        Case("nan where the mask is False", masked | spoilt),
        Case("far from 0", draw(15, 3, seed=3, away=5.0)),
        Case("large activations", draw(12, 3, seed=4) | {"x": 20 * draw(12, 3, seed=4)["x"]}),
        Case("nearly no penalty", draw(12, 3, seed=5, ridge=1e-6)),
        Case("x is the same in every row", constant),
    )


EXERCISES = (
    make_exercise(TransformerWithValueHead, cases=_forward_cases, observe=_observe_forward),
    make_exercise(generated_values, cases=_value_cases),
    make_exercise(fit_ridge, cases=_ridge_cases),
)
