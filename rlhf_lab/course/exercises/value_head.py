"""Lesson 02, the value head: hang it on a hook, read its values, and read values off any layer."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlhf_lab.course.cases import standard_cases
from rlhf_lab.course.exercise import Case, Exercise, Slip
from rlhf_lab.course.exercises.toys import TOY_VOCABULARY, toy_transformer
from rlhf_lab.functional import generated_values
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.models.transformer_lens import empty_cache
from rlhf_lab.probes.value_lens import fit_ridge

LESSON = "02_the_value_head"


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
        Case("with a key-value cache", {"input_ids": tokens(2, 5), "cached": 3}),
    )


def _observe_forward(build: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Logits and values, whether the trunk learns from the values, and what happens to hooks."""
    model, heard = toy_transformer(), []
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
    facts = {
        "values": values.detach().masked_fill(~real, 0.0),
        "logits": logits.detach().masked_fill(~real[..., None], 0.0),
        "hooks left behind": _count_hooks(model) - hooks_before,
        "other hooks heard": heard,
    }
    values[real].sum().backward()
    learns = [name for name, p in policy.named_parameters() if p.grad is not None]
    return facts | {"parameters that the values train": sorted(learns)}


def _forward(policy: Any, ids: torch.Tensor, mask: torch.Tensor | None, cached: int) -> Any:
    """Run the policy in one go, or the first tokens into a cache and then the others from it."""
    if not cached:
        return policy(ids) if mask is None else policy(ids, mask)
    model = policy.base_model
    cache = empty_cache(model.cfg, "cpu", len(ids))
    parts = []
    for part in (ids[:, :cached], ids[:, cached:]):
        real = torch.ones_like(part, dtype=torch.bool)
        parts.append(policy(part, attention_mask=real, past_kv_cache=cache))
    (logits, values), (more_logits, more_values) = parts
    return torch.cat([logits, more_logits], 1), torch.cat([values, more_values], 1)


def _count_hooks(model: torch.nn.Module) -> int:
    return sum(len(point.fwd_hooks) for point in model.hook_dict.values())


def _ridge_cases() -> tuple[Case, ...]:
    def draw(*shape: int, seed: int, away: float = 0.0, ridge: float = 0.1) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(*shape, generator=generator) + away
        slope = torch.randn(shape[-1], generator=generator)
        y = x @ slope + torch.randn(shape[:-1], generator=generator)
        return {"x": x, "y": y, "mask": torch.ones(shape[:-1], dtype=torch.bool), "ridge": ridge}

    masked = draw(12, 3, seed=2)
    masked["mask"] = torch.arange(12) % 3 > 0
    constant = draw(12, 3, seed=6)
    constant["x"] = constant["x"][:1].expand(12, 3)
    return (
        Case("ordinary", draw(12, 3, seed=0)),
        Case("several sites at once", draw(2, 9, 4, seed=1)),
        Case("masked", masked),
        Case("far from 0", draw(15, 3, seed=3, away=5.0)),
        Case("large activations", draw(12, 3, seed=4) | {"x": 20 * draw(12, 3, seed=4)["x"]}),
        Case("nearly no penalty", draw(12, 3, seed=5, ridge=1e-6)),
        Case("x is the same in every row", constant),
    )


EXERCISES = (
    Exercise(
        lesson=LESSON,
        reference=TransformerWithValueHead,
        difficulty=3,
        minutes=25,
        hints=(
            "A hook is a function of (activation, hook) that TransformerLens calls during the "
            "forward pass. Let yours compute the values and keep them in a list.",
            "ln_final.hook_normalized is [batch seq d_model]; the head makes [batch seq 1] of it, "
            "and the last axis has to go. run_left_padded(run, input_ids, attention_mask) calls "
            "your run(tokens) on rows without left padding, and puts its results in their places.",
            "with self.base_model.hooks(fwd_hooks=[(VALUE_HOOK, read_value)]): call "
            "self.base_model(tokens, attention_mask=..., past_kv_cache=past_kv_cache) inside, and "
            "return its logits and values[0]. With a cache, call it directly.",
        ),
        cases=_forward_cases,
        methods=("forward",),
        observe=_observe_forward,
        slips=(
            Slip(
                "the head reads the residual stream before the final norm",
                {
                    "(VALUE_HOOK, read_value)": '(f"blocks.{self.base_model.cfg.n_layers - 1}'
                    '.hook_resid_post", read_value)'
                },
            ),
            Slip(
                "the activation is detached, so the values cannot train the transformer",
                {"self.value_head(normalized)": "self.value_head(normalized.detach())"},
            ),
            Slip(
                "the hook returns something, and that replaces the activation: return nothing",
                {
                    'd_model"], hook: HookPoint) -> None:': 'd_model"], hook: HookPoint):',
                    'einops.rearrange(self.value_head(normalized), "batch seq 1 -> batch seq"))': ""
                    'einops.rearrange(self.value_head(normalized), "batch seq 1 -> batch seq"))\n'
                    "            return self.value_head(normalized)",
                },
            ),
            Slip(
                "the hook is never taken off again",
                {
                    "with self.base_model.hooks(fwd_hooks=[(VALUE_HOOK, read_value)]):": "self."
                    "base_model.add_hook(VALUE_HOOK, read_value)\n        if True:"
                },
            ),
            Slip(
                "the values keep the head's last axis of size 1",
                {
                    'einops.rearrange(self.value_head(normalized), "batch seq 1 -> batch seq")': ""
                    "self.value_head(normalized)"
                },
            ),
            Slip(
                "past_kv_cache is not handed on to the transformer",
                {"past_kv_cache=past_kv_cache)": "past_kv_cache=None)"},
            ),
            Slip(
                "left padding is read as if it were text",
                {"run_left_padded(run, input_ids, attention_mask)": "run(input_ids)"},
            ),
            Slip(
                "all hooks are removed at the end, those of others, too",
                {
                    "            return run_left_padded(run, input_ids, attention_mask)": ""
                    "            result = run_left_padded(run, input_ids, attention_mask)\n"
                    "        self.base_model.reset_hooks()\n        return result"
                },
            ),
        ),
    ),
    Exercise(
        lesson=LESSON,
        reference=generated_values,
        difficulty=1,
        minutes=5,
        hints=(
            "A value belongs to the state before a token is generated. Where does the first one "
            "stand, when prefix_len tokens are given?",
            "values is [batch seq] and the result [batch gen] with gen = seq - prefix_len: drop "
            "prefix_len - 1 positions in front and one at the end.",
            "values[:, prefix_len - 1 : -1]",
        ),
        cases=_value_cases,
        gradients=("values",),
        slips=(
            Slip(
                "this cuts the batch axis, not the sequence axis",
                {"values[:, _state": "values[_state"},
            ),
            Slip(
                "off by one: this is the value after each token, not before it",
                {
                    "values[:, _state_before_generation(prefix_len, values.shape[1]) : -1]": ""
                    "values[:, prefix_len:]"
                },
            ),
            Slip(
                "the last position is still there, after which nothing is generated",
                {" : -1]": " :]"},
            ),
        ),
    ),
    Exercise(
        lesson=LESSON,
        reference=fit_ridge,
        difficulty=4,
        minutes=25,
        hints=(
            "Take the means away first and no intercept is needed; what they say comes back at the "
            "end. A row that the mask leaves out gets weight 0.",
            "x is [site n d_model], weight[..., None] lets a weight of [site n] multiply it. The "
            "normal equations are [d_model d_model] for each site, symmetric and positive, so "
            "torch.linalg.cholesky factors them and torch.cholesky_solve solves; it wants a column "
            "on the right: add an axis, and take it off again. Where x does not vary they are all "
            "0, unless the penalty is clamped to at least 1e-12.",
            "gram = x_centered.mT @ x_centered; penalty = (ridge * the mean of gram's diagonal)"
            ".clamp(min=1e-12), times the identity; slope = torch.cholesky_solve("
            "moment[..., None], torch.linalg.cholesky(gram + penalty))[..., 0]; the intercept is "
            "y_mean - (slope * x_mean).sum(-1).",
        ),
        cases=_ridge_cases,
        slips=(
            Slip(
                "the mask is not used",
                {"mask.double()": "torch.ones_like(mask).double()"},
            ),
            Slip(
                "the mean of x counts rows that the mask leaves out",
                {"x_mean = (x * weight[..., None]).sum(-2) / count": "x_mean = x.mean(-2)"},
            ),
            Slip(
                "x is not centred",
                {"(x - x_mean[..., None, :]) * weight[..., None]": "x * weight[..., None]"},
            ),
            Slip(
                "the penalty is ridge itself, not ridge times the variance of x",
                {"(ridge * variance)": "(ridge * torch.ones_like(variance))"},
            ),
            Slip(
                "the penalty lacks the variance of x: without it, ridge means something else at "
                "every site",
                {"(ridge * variance)": "(ridge * count[..., 0])"},
            ),
            Slip(
                "the penalty lacks n, the number of rows that count",
                {"/ x.shape[-1]\n": "/ x.shape[-1] / count[..., 0]\n"},
            ),
            Slip(
                "the variance in the penalty divides by n - 1, and should by n",
                {"/ x.shape[-1]\n": "/ x.shape[-1] * (count / (count - 1))[..., 0]\n"},
            ),
            Slip(
                "centring has moved the rows that the mask leaves out away from 0, and they count "
                "in X'X: put 0 there afterwards",
                {
                    "(x - x_mean[..., None, :]) * weight[..., None]": "x - x_mean[..., None, :]",
                },
            ),
            Slip(
                "the results are rounded to float32: leave them in float64",
                {
                    "return slope, y_mean[..., 0] - (slope * x_mean).sum(-1)": "return "
                    "slope.float(), (y_mean[..., 0] - (slope * x_mean).sum(-1)).float()"
                },
            ),
            Slip(
                "there is no penalty",
                {"gram + penalty * identity": "gram + 1e-12 * identity"},
            ),
            Slip(
                "the intercept is the mean of y: subtract what the slope makes of the mean of x",
                {" - (slope * x_mean).sum(-1)": ""},
            ),
        ),
    ),
)
