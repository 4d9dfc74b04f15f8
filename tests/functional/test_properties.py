"""Properties of all functions: gradients, half precision, masked entries, micro-batches."""

import inspect

import pytest
import torch

from rlhf_lab import functional as F
from tests.functional.calls import MASKED, MIXED, UNCHECKED, UNMASKED, WAYS, draw, seeds

NAN, INF = float("nan"), float("inf")
ALL = UNMASKED | {
    name: (lambda *x, f=f: f(MIXED, *x), kinds) for name, (f, kinds) in MASKED.items()
}
WITHOUT_SLOPE = {"clip_fraction", "clip_fraction_low", "clip_fraction_high", "value_clip_fraction"}
WITHOUT_SLOPE |= {"truncated_importance_weights", "masked_importance_weights"}
WITHOUT_SLOPE |= {"kto_reference_point", "preference_accuracy"}
DETACHED = {"gspo_surrogate", "cispo_surrogate", "policy_gradient_objective"}
DETACHED |= {"kl_of_later_states", "kl_straight_through", "kl_estimate k3_straight_through"}
"""A factor without gradient, on purpose: their gradients are tested one by one."""


def test_every_function_with_a_mask_is_called():
    names = {name.split()[0] for name in MASKED | UNMASKED} | UNCHECKED
    for name, function in vars(F).items():
        if inspect.isfunction(function) and "mask" in inspect.signature(function).parameters:
            assert name in names, name


@pytest.mark.parametrize("name", sorted(ALL.keys() - WITHOUT_SLOPE - DETACHED))
def test_gradient_matches_finite_differences(name):
    function, kinds = ALL[name]
    inputs = [x.requires_grad_() for x in draw(3, *kinds.split())]
    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("name", sorted(WITHOUT_SLOPE))
def test_value_has_no_gradient(name):
    function, kinds = ALL[name]
    inputs = [x.requires_grad_() for x in draw(3, *kinds.split())]
    value = function(*inputs)
    if value.requires_grad:  # a sign, whose gradient is 0
        value.backward()
        assert not any(x.grad.any() for x in inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "name",
    sorted(ALL.keys() - {"zero_masked", "token_logprobs", "generated_values", "generated_logits"}),
)
def test_half_precision_is_computed_in_float32(name, dtype):
    function, kinds = ALL[name]
    halves = [(3 * x).to(dtype) for x in draw(4, *kinds.split())]
    before = [x.clone() for x in halves]
    result = function(*halves)
    assert result.dtype == torch.float32
    torch.testing.assert_close(
        result.double(), function(*(x.double() for x in halves)), rtol=2e-5, atol=2e-5
    )
    assert all(torch.equal(x, y) for x, y in zip(halves, before, strict=True))
    assert function(*(x.double() for x in halves)).dtype == torch.float64


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 3e38])
@pytest.mark.parametrize("name", MASKED)
def test_masked_entries_reach_neither_value_nor_gradient(name, garbage):
    function, kinds = MASKED[name]
    kinds = kinds.split()
    results, gradients = [], []
    for fill in (0.0, garbage):
        inputs = []
        for x, kind in zip(draw(5, *kinds), kinds, strict=True):
            hidden = (
                ~MIXED.reshape(MIXED.shape + (1,) * (x.ndim - 2)) if kind[:2] == "bg" else x != x
            )
            inputs.append(x.float().masked_fill(hidden, fill).requires_grad_())
        result = function(MIXED, *inputs)
        results.append(result.detach())
        if result.requires_grad:
            result.square().sum().backward()
            gradients.append([x.grad if x.grad is not None else torch.zeros(()) for x in inputs])
    torch.testing.assert_close(results[1], results[0])
    for clean, dirty in zip(*gradients, strict=True) if gradients else ():
        torch.testing.assert_close(dirty, clean)
        if dirty.ndim > 1:
            assert not dirty[~MIXED].any()


@pytest.mark.parametrize("name", sorted(MASKED.keys() - {"opo_advantages"}))
def test_all_masked_batch_gives_zero_with_gradient_zero(name):
    function, kinds = MASKED[name]
    inputs = [
        torch.full_like(x, NAN if x.ndim > 1 else 1.0).requires_grad_()
        for x in draw(6, *kinds.split())
    ]
    result = function(torch.zeros_like(MIXED), *inputs)
    assert (result == (name == "sequence_ratio")).all()
    if result.requires_grad:
        result.sum().backward()
        assert not any(x.grad.any() for x in inputs if x.grad is not None)


PARTS = {
    "masked_mean": lambda m, d, x, y, z: F.masked_mean(x, m, denominator=d),
    "calc_entropy_bonus": lambda m, d, x, y, z: F.calc_entropy_bonus(x, 0.7, m, d),
    "calc_kl_penalty": lambda m, d, x, y, z: F.calc_kl_penalty(x, 0.7, m, d),
    "sft_loss": lambda m, d, x, y, z: F.sft_loss(x, m, d),
    "calc_value_function_loss": lambda m, d, x, y, z: F.calc_value_function_loss(
        x, y, 0.7, m, z, 0.5, d
    ),
    "calc_clipped_surrogate_objective": lambda m, d, x, y, z: F.calc_clipped_surrogate_objective(
        x, y, z, 0.2, m, False, d
    ),
}
for way in WAYS:
    PARTS[f"aggregate {way}"] = lambda m, d, x, y, z, w=way: F.aggregate(x, m, w, d)
    PARTS[f"calc_sampled_kl_penalty {way}"] = lambda m, d, x, y, z, w=way: (
        F.calc_sampled_kl_penalty(x, y, "k3", 0.7, m, aggregation=w, denominator=d)
    )
    for objective in F.POLICY_OBJECTIVES:
        PARTS[f"{objective} {way}"] = lambda m, d, x, y, z, w=way, o=objective: (
            F.calc_policy_objective(o, x, y, z, m, aggregation=w, denominator=d)
        )


@pytest.mark.parametrize("name", PARTS)
@seeds(8)
def test_micro_batches_add_up_in_value_and_gradient(name, seed):
    """Cut at random, with the denominator of the whole batch (zero micro-batches are allowed)."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [x.requires_grad_() for x in draw(seed, "bg", "bg", "bg", batch=6)]
    mask = torch.rand(6, 3, generator=generator) < 0.5
    way = name.split()[-1] if name.split()[-1] in WAYS else "token_mean"
    edges = [0, *torch.randint(0, 7, (2,), generator=generator).sort().values.tolist(), 6]
    cuts = [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]
    total = sum(F.aggregation_denominator(mask[cut], way) for cut in cuts)
    assert total == F.aggregation_denominator(mask, way)
    whole = PARTS[name](mask, None, *inputs)
    parts = sum(PARTS[name](mask[cut], total, *(x[cut] for x in inputs)) for cut in cuts)
    torch.testing.assert_close(parts, whole)
    one, other = (torch.autograd.grad(x, inputs, allow_unused=True) for x in (whole, parts))
    for a, b in zip(one, other, strict=True):
        assert (a is b is None) or torch.allclose(a, b)
