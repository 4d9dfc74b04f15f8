"""Exercises on the value head: attach it by a hook, and read values off any layer."""

from typing import Any

import torch
from torch import Tensor

from rlhf_lab.course.cases import Arguments, Cases, Draws, standard_cases
from rlhf_lab.course.exercise import Answer, make_exercise
from rlhf_lab.course.exercises.toys import TOY_VOCABULARY, toy_transformer
from rlhf_lab.functional import generated_values
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.models.hooked_model import empty_cache
from rlhf_lab.probes.value_lens import fit_ridge


def _value_cases() -> Cases:
    fn, sizes, large = generated_values, {"seq": 7}, {"values": 1e30}
    after_prefix = standard_cases(
        fn, sizes=sizes, one_token={"seq": 4}, large=large, prefix_len=3, suffix=" after a prefix"
    )
    return after_prefix | standard_cases(fn, sizes=sizes, one_token={"seq": 2}, prefix_len=1)


def _forward_cases() -> Cases:
    tokens = lambda batch, seq: Draws(batch).integers(TOY_VOCABULARY, batch, seq)
    padded = torch.tensor([[False, False, True, True, True], [True] * 5])
    return {
        "ordinary": {"input_ids": tokens(3, 5)},
        "batch of 1": {"input_ids": tokens(1, 6)},
        "one token": {"input_ids": tokens(2, 1)},
        "left padding": {"input_ids": tokens(2, 5), "attention_mask": padded},
        "other hooks attached": {"input_ids": tokens(2, 4), "listen": True},
        "with a KV cache": {"input_ids": tokens(2, 5), "cached": 3},
    }


def _observe_forward(
    build: Answer,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    listen: bool = False,
    cached: int = 0,
) -> dict[str, Any]:
    model, calls = toy_transformer(), []
    plain = model(input_ids)
    policy = build(model, seed=1)
    torch.nn.init.ones_(policy.value_head[2].weight)
    if listen:
        model.add_hook("hook_embed", lambda activation, hook: calls.append(hook.name))
    hooks_before = _count_hooks(model)
    logits, values = _forward(policy, input_ids, attention_mask, cached)
    if values.shape != input_ids.shape:
        return {"values": values.detach()}
    is_whole = attention_mask is None and not cached
    real = torch.ones_like(values).bool() if attention_mask is None else attention_mask
    facts = {
        "values": values.detach().masked_fill(~real, 0.0),
        "logits are unchanged": not is_whole or torch.allclose(logits, plain, atol=1e-5),
        "logits": logits.detach().masked_fill(~real[..., None], 0.0),
        "hooks left behind": _count_hooks(model) - hooks_before,
        "calls of other hooks": calls,
    }
    for name, trained in (("logits", logits.square()), ("values", values)):
        policy.zero_grad(set_to_none=True)
        trained[real].sum().backward(retain_graph=True)
        learns = [name for name, p in policy.named_parameters() if p.grad is not None]
        facts[f"parameters that the {name} train"] = sorted(learns)
    return facts


def _forward(policy: Any, ids: Tensor, mask: Tensor | None, cached: int) -> Any:
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


def _ridge_cases() -> Cases:
    def case(*shape: int, seed: int, away: float = 0.0, ridge: float = 0.1) -> Arguments:
        draws = Draws(seed)
        x, slope = draws.normal(*shape) + away, draws.normal(shape[-1])
        y = x @ slope + draws.normal(*shape[:-1])
        return {"x": x, "y": y, "mask": torch.ones(shape[:-1], dtype=torch.bool), "ridge": ridge}

    ordinary, masked = case(12, 3, seed=0), case(12, 3, seed=2)
    masked["mask"] = torch.arange(12) % 3 > 0
    spoilt = {name: masked[name].clone() for name in ("x", "y")}
    spoilt["x"][0, 1], spoilt["y"][3] = torch.nan, torch.nan
    return {
        "ordinary": ordinary,
        "several sites at once": case(2, 9, 4, seed=1),
        "masked": masked,
        "nan where the mask is False": masked | spoilt,
        "far from 0": case(15, 3, seed=3, away=5.0),
        "large activations": ordinary | {"x": 20 * ordinary["x"]},
        "nearly no penalty": case(12, 3, seed=5, ridge=1e-6),
        "x is the same in every row": ordinary | {"x": ordinary["x"][:1].expand(12, 3)},
    }


EXERCISES = (
    make_exercise(TransformerWithValueHead, _forward_cases, _observe_forward),
    make_exercise(generated_values, _value_cases),
    make_exercise(fit_ridge, _ridge_cases),
)
