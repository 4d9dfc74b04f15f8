"""What each token adds to the objective of PPO, GSPO, CISPO and REINFORCE."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from rlhf_lab.functional import (
    POLICY_OBJECTIVES,
    aggregation_denominator,
    calc_clipped_surrogate_objective,
    calc_policy_objective,
    cispo_surrogate,
    gspo_surrogate,
    masked_importance_weights,
    policy_gradient_objective,
    policy_gradient_surrogate,
    ppo_surrogate,
    sequence_ratio,
    truncated_importance_weights,
)

NAN, INF = float("nan"), float("inf")
WAYS = ("token_mean", "sequence_mean", "constant")


def rollouts(seed, batch=3, gen=4):
    generator = torch.Generator().manual_seed(seed)
    logprobs, old, advantages = torch.randn(3, batch, gen, generator=generator, dtype=torch.float64)
    return logprobs, old, advantages, torch.rand(batch, gen, generator=generator) < 0.6


def by_loop(name, rollout, low, high):
    """Each objective token by token in python floats, and its slope in the log-probability."""
    logprobs, old, advantages, mask = rollout
    values, slopes = torch.zeros_like(logprobs), torch.zeros_like(logprobs)
    for i in range(len(mask)):
        real = mask[i].nonzero().flatten().tolist()
        new, before = logprobs[i].tolist(), old[i].tolist()
        for t in real:
            adv, ratio = advantages[i, t].item(), math.exp(new[t] - before[t])
            if name == "gspo":
                ratio = math.exp(sum(new[u] - before[u] for u in real) / len(real))
            held = min(max(ratio, 1 - low), 1 + high)
            if name in ("ppo", "gspo"):
                values[i, t] = min(ratio * adv, held * adv)
                free = ratio * adv <= held * adv
                slopes[i, t] = ratio * adv if free else 0.0
            else:
                weight = held if name == "cispo" else 1.0
                values[i, t], slopes[i, t] = weight * adv * new[t], weight * adv
    return values, slopes


def call(name, logprobs, old, advantages, mask, low=0.2, high=0.3):
    if name == "policy_gradient":
        return policy_gradient_surrogate(logprobs, advantages, mask)
    return POLICY_OBJECTIVES[name](logprobs, old, advantages, low, high, mask=mask)


@pytest.mark.parametrize("name", POLICY_OBJECTIVES)
@given(st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_values_and_slopes_equal_a_loop_over_tokens(name, seed):
    logprobs, old, advantages, mask = rollouts(seed)
    logprobs.requires_grad_()
    got = call(name, logprobs, old, advantages, mask)
    got.sum().backward()
    values, slopes = by_loop(name, (logprobs.detach(), old, advantages, mask), 0.2, 0.3)
    torch.testing.assert_close(got.detach(), values)
    torch.testing.assert_close(logprobs.grad, slopes)


def test_clip_higher_leaves_room_upwards_only():
    # ratios 1.25, 1.25, 0.75, 0.75 with clips 0.2 and 0.28; advantages 1, -1, 1, -1:
    # min(1.25, 1.25); min(-1.25, -1.25); min(0.75, 0.8); min(-0.75, -0.8)
    logprobs = tensor([[1.25, 1.25, 0.75, 0.75]]).log()
    advantages = tensor([[1.0, -1.0, 1.0, -1.0]])
    got = ppo_surrogate(logprobs, torch.zeros(1, 4), advantages, 0.2, 0.28)
    assert got[0].tolist() == pytest.approx([1.25, -1.25, 0.75, -0.8])
    # with 0.2 on both sides the first is held at 1.2
    both = ppo_surrogate(logprobs, torch.zeros(1, 4), advantages, 0.2)
    assert both[0].tolist() == pytest.approx([1.2, -1.25, 0.75, -0.8])


def test_dual_clip_is_a_floor_for_negative_advantages_alone():
    # ratio 5, clip 0.2, floor 3: A = -2 gives -10, raised to -6; A = 2 gives 2.4 and not 6;
    # ratio 2: -4 is above -6
    logprobs = tensor([[5.0, 5.0, 2.0]]).log().requires_grad_()
    advantages = tensor([[-2.0, 2.0, -2.0]])
    got = ppo_surrogate(logprobs, torch.zeros(1, 3), advantages, 0.2, dual_clip=3.0)
    assert got[0].tolist() == pytest.approx([-6.0, 2.4, -4.0])
    got.sum().backward()
    assert logprobs.grad[0].tolist() == pytest.approx([0.0, 0.0, -4.0])


def test_sequence_ratio_by_hand():
    # ratios 2 and 8: sqrt 16 = 4; ratio 1/2 alone; nothing
    logprobs = tensor([[2.0, 8.0], [0.5, NAN], [NAN, INF]]).log()
    mask = tensor([[1, 1], [1, 0], [0, 0]]).bool()
    got = sequence_ratio(logprobs, torch.zeros(3, 2), mask)
    assert got.tolist() == pytest.approx([4.0, 0.5, 1.0])
    # the mean log-ratio is limited to 20
    assert sequence_ratio(tensor([[500.0]]), tensor([[0.0]])).item() == pytest.approx(math.exp(20))


def test_gspo_by_hand():
    # s = sqrt(2 * 8) = 4, clipped to 1.2 for A = 1; for A = -1 it stays -4 at each token
    logprobs = tensor([[2.0, 8.0], [2.0, 8.0]]).log()
    advantages = tensor([[1.0, 1.0], [-1.0, -1.0]])
    got = gspo_surrogate(logprobs, torch.zeros(2, 2), advantages, 0.2)
    assert got.flatten().tolist() == pytest.approx([1.2, 1.2, -4.0, -4.0])


@given(st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_gspo_with_one_advantage_per_sequence_is_its_sequence_objective(seed):
    logprobs, old, advantages, mask = rollouts(seed)
    mask[:, 0] = True
    advantages = advantages[:, :1]
    a, b = logprobs.clone().requires_grad_(), logprobs.clone().requires_grad_()
    got = calc_policy_objective(
        "gspo", a, old, advantages.expand(3, 4), mask, aggregation="sequence_mean"
    )
    # the definition, differentiated as it stands
    mean = torch.where(mask, b - old, 0.0).sum(-1) / mask.sum(-1)
    ratio, adv = mean.exp(), advantages[:, 0]
    expected = torch.minimum(ratio * adv, ratio.clip(0.8, 1.2) * adv).mean()
    got.backward()
    expected.backward()
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(a.grad, b.grad)


def test_cispo_and_policy_gradient_by_hand():
    # ratio 3 is weighed 1.2, ratio 1/3 0.8, with log-probabilities log 3 and -log 3
    log3 = math.log(3)
    logprobs = tensor([[log3, -log3]], requires_grad=True)
    advantages = tensor([[2.0, 1.0]])
    got = cispo_surrogate(logprobs, torch.zeros(1, 2), advantages, 0.2)
    assert got[0].tolist() == pytest.approx([2.4 * log3, -0.8 * log3])
    got.sum().backward()
    # no token is without a gradient, as PPO's first would be
    assert logprobs.grad[0].tolist() == pytest.approx([2.4, 0.8])
    plain = policy_gradient_surrogate(logprobs, advantages)
    assert plain[0].tolist() == pytest.approx([2 * log3, -log3])


def test_policy_gradient_objective_by_hand():
    # (2 * -1 + 1 * -3 + 4 * -0.5) / 3; the gradient is the advantage by the number of real tokens
    logprobs = tensor([[-1.0, -3.0], [-0.5, NAN]], requires_grad=True)
    advantages = tensor([[2.0, 1.0], [4.0, INF]], requires_grad=True)
    mask = tensor([[True, True], [True, False]])
    objective = policy_gradient_objective(logprobs, advantages, mask)
    assert objective.item() == pytest.approx(-7 / 3)
    objective.backward()
    assert logprobs.grad.flatten().tolist() == pytest.approx([2 / 3, 1 / 3, 4 / 3, 0.0])
    assert advantages.grad is None, "advantages are numbers"
    one_token = policy_gradient_objective(tensor([[-2.0]]), tensor([[3.0]]))
    assert one_token.item() == -6.0
    nothing = policy_gradient_objective(torch.ones(1, 2), torch.ones(1, 2), torch.zeros(1, 2) > 0)
    assert nothing.item() == 0.0


def test_the_policy_gradient_is_that_of_the_expected_reward():
    """Summed over all texts of two tokens of three words, each as often as it is written."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(3, generator=generator, dtype=torch.float64).requires_grad_()
    second = torch.randn(3, 3, generator=generator, dtype=torch.float64).requires_grad_()
    reward = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    chance = first.softmax(-1)[:, None] * second.softmax(-1)
    exact = torch.autograd.grad((chance * reward).sum(), (first, second), retain_graph=True)
    to_go = (second.softmax(-1) * reward).sum(-1)  # Q of the first word, V of the second state
    value = (first.softmax(-1) * to_go).sum()
    estimate = 0.0
    for a, b in torch.cartesian_prod(torch.arange(3), torch.arange(3)).tolist():
        logprobs = torch.stack([first.log_softmax(-1)[a], second[a].log_softmax(-1)[b]])[None]
        advantages = torch.stack([to_go[a] - value, reward[a, b] - to_go[a]])[None]
        term = 2 * policy_gradient_objective(logprobs, advantages)  # a sum over two tokens
        estimate = estimate + chance[a, b].detach() * term
    for found, expected in zip(torch.autograd.grad(estimate, (first, second)), exact, strict=True):
        torch.testing.assert_close(found, expected)


def test_at_ratio_one_all_objectives_have_the_policy_gradient():
    logprobs, _, advantages, mask = rollouts(1)
    for name in POLICY_OBJECTIVES:
        current = logprobs.clone().requires_grad_()
        call(name, current, logprobs, advantages, mask).sum().backward()
        torch.testing.assert_close(current.grad, torch.where(mask, advantages, 0.0))


def test_importance_weights_by_hand():
    logprobs = tensor([[0.5, 3.0, NAN]]).log().requires_grad_()
    mask = tensor([[True, True, False]])
    weights = truncated_importance_weights(logprobs, torch.zeros(1, 3), 2.0, mask)
    assert weights[0].tolist() == pytest.approx([0.5, 2.0, 0.0]) and not weights.requires_grad
    weights = masked_importance_weights(logprobs, torch.zeros(1, 3), 2.0, mask)
    assert weights[0].tolist() == pytest.approx([0.5, 0.0, 0.0]) and not weights.requires_grad
    with pytest.raises(ValueError, match="cap must .*got 0"):
        truncated_importance_weights(logprobs, logprobs, 0.0)


@given(st.integers(0, 10_000), st.floats(0.5, 5))
@settings(max_examples=20, deadline=None)
def test_importance_weights_equal_a_loop(seed, cap):
    logprobs, old, _, mask = rollouts(seed)
    got = truncated_importance_weights(logprobs, old, cap, mask)
    for i, t in torch.cartesian_prod(torch.arange(3), torch.arange(4)).tolist():
        ratio = min(math.exp(logprobs[i, t].item() - old[i, t].item()), cap)
        assert got[i, t].item() == pytest.approx(ratio if mask[i, t] else 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICY_OBJECTIVES)
@pytest.mark.parametrize("way", WAYS)
@given(st.integers(0, 10_000), st.lists(st.integers(0, 6), max_size=3))
@settings(max_examples=10, deadline=None)
def test_objectives_and_gradients_are_the_same_however_the_batch_is_cut(name, way, seed, cuts):
    logprobs, old, advantages, mask = rollouts(seed, batch=6)
    whole, cut = logprobs.clone().requires_grad_(), logprobs.clone().requires_grad_()
    objective = calc_policy_objective(name, whole, old, advantages, mask, aggregation=way)
    objective.backward()
    edges = [0, *sorted(cuts), 6]
    parts = [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]
    counted = sum(aggregation_denominator(mask[part], way) for part in parts)
    total = 0.0
    for part in parts:
        inputs = (cut[part], old[part], advantages[part], mask[part])
        one = calc_policy_objective(name, *inputs, aggregation=way, denominator=counted)
        one.backward()
        total += one.item()
    assert total == pytest.approx(objective.item(), rel=1e-9, abs=1e-12)
    torch.testing.assert_close(cut.grad, whole.grad)


@given(st.integers(0, 10_000), st.booleans())
@settings(max_examples=20, deadline=None)
def test_ppo_with_token_mean_is_the_learners_objective(seed, normalize):
    logprobs, old, advantages, mask = rollouts(seed)
    got = calc_policy_objective("ppo", logprobs, old, advantages, mask, normalize=normalize)
    lesson = calc_clipped_surrogate_objective(logprobs, old, advantages, 0.2, mask, normalize)
    assert got.item() == pytest.approx(lesson.item(), rel=1e-9, abs=1e-12)


def test_an_objective_of_ones_own_stands_where_a_name_does():
    logprobs, old, advantages, mask = rollouts(3)
    own = calc_policy_objective(lambda logprobs, mask: logprobs * 0 + 2, logprobs, old, old, mask)
    assert own.item() == pytest.approx(2.0)
    anything = lambda *all: ppo_surrogate(*all[:3], all[3], mask=all[4])
    by_order = calc_policy_objective(anything, logprobs, old, advantages, mask)
    assert by_order == calc_policy_objective("ppo", logprobs, old, advantages, mask)
    with pytest.raises(ValueError, match=r"shape \(\) for a mask of shape \(3, 4\)"):
        calc_policy_objective(lambda logprobs: logprobs.sum(), logprobs, old, old, mask)
    with pytest.raises(ValueError, match="Unknown policy_objective 'trpo'. Choose one of: ppo"):
        calc_policy_objective("trpo", logprobs, old, advantages, mask)


def test_settings_without_effect_are_refused():
    z, mask = torch.zeros(1, 1), tensor([[True]])
    with pytest.raises(ValueError, match=r"gspo_surrogate has no parameter 'dual_clip'"):
        calc_policy_objective("gspo", z, z, z, mask, dual_clip=3.0)
    with pytest.raises(ValueError, match=r"gradient_surrogate has no parameter 'clip_coef_high'"):
        calc_policy_objective("policy_gradient", z, z, z, mask, clip_coef_high=0.3)
    calc_policy_objective(lambda **all: all["advantages"], z, z, z, mask, dual_clip=3.0)


def test_clips_without_meaning_are_refused():
    z = torch.zeros(1, 1)
    for function in (ppo_surrogate, gspo_surrogate, cispo_surrogate):
        with pytest.raises(ValueError, match=r"clip_coef must .*got -0\.1"):
            function(z, z, z, -0.1)
        with pytest.raises(ValueError, match=r"clip_coef_high must .*got -0\.2"):
            function(z, z, z, 0.1, -0.2)
    with pytest.raises(ValueError, match=r"dual_clip must .*got 1\.0"):
        ppo_surrogate(z, z, z, 0.2, dual_clip=1.0)


@pytest.mark.parametrize("name", POLICY_OBJECTIVES)
def test_values_under_the_mask_reach_neither_value_nor_gradient(name):
    mask = tensor([[True, False, True, False], [False] * 4])
    inputs = [
        tensor([[0.1, NAN, -0.1, 1e30], [NAN] * 4], requires_grad=True),
        tensor([[0.0, INF, 0.0, -1e30], [NAN] * 4], requires_grad=True),
        tensor([[1.0, INF, -2.0, NAN], [NAN] * 4], requires_grad=True),
    ]
    got = call(name, *inputs, mask)
    assert got.isfinite().all() and (got[~mask] == 0).all()
    got.sum().backward()
    for x in inputs:
        assert x.grad is None or (x.grad.isfinite().all() and (x.grad[~mask] == 0).all())


@pytest.mark.parametrize("name", POLICY_OBJECTIVES)
def test_runaway_ratios_stay_finite_in_value_and_gradient(name):
    logprobs = tensor([[0.0], [0.0], [-500.0]], requires_grad=True)
    old = tensor([[-500.0], [-500.0], [0.0]])
    got = call(name, logprobs, old, tensor([[1.0], [-1.0], [1.0]]), None)
    got.sum().backward()
    assert got.isfinite().all() and logprobs.grad.isfinite().all()


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_a_ratio_that_is_held_at_its_limit_has_no_gradient(name):
    """A log-ratio of 30 is held at 20; with advantage -1 the clip lets its gradient through."""
    logprobs = tensor([[30.0, 30.0], [1.0, 1.0]], requires_grad=True)
    got = call(name, logprobs, torch.zeros(2, 2), torch.full((2, 2), -1.0), None)
    got.sum().backward()
    torch.testing.assert_close(got[0].detach(), torch.full((2,), -math.exp(20)))
    assert (logprobs.grad[0] == 0).all()
    torch.testing.assert_close(logprobs.grad[1], torch.full((2,), -math.e))


@pytest.mark.parametrize("name", POLICY_OBJECTIVES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(name, dtype):
    # 300 * 300 = 90000 is beyond float16, at ratio 1 or with a log-probability of -300
    x = torch.full((1, 1), -300.0, dtype=dtype)
    got = call(name, x, x, -x, None)
    assert got.dtype == torch.float32
    assert got.item() == (300.0 if name in ("ppo", "gspo") else -90000.0)


@pytest.mark.parametrize("name", ["ppo", "policy_gradient"])
def test_gradients_agree_with_finite_differences(name):
    torch.manual_seed(0)
    logprobs, old, advantages = torch.randn(3, 2, 4, dtype=torch.float64).requires_grad_()
    mask = tensor([[1, 1, 0, 1], [0, 0, 0, 1]]).bool()
    inputs = (logprobs, old, advantages)
    assert torch.autograd.gradcheck(lambda a, b, c: call(name, a, b, c, mask), inputs)
    dual = lambda a, b, c: ppo_surrogate(a, b, c, 0.2, 0.3, 1.5, mask)
    assert torch.autograd.gradcheck(dual, inputs)
    assert torch.autograd.gradcheck(lambda a, b: sequence_ratio(a, b, mask), inputs[:2])


@pytest.mark.parametrize("name", ["gspo", "cispo"])
def test_weights_without_gradient_leave_the_policy_gradient_of_the_advantages(name):
    # finite differences would also move the weight, which has no gradient on purpose
    torch.manual_seed(0)
    logprobs, old, advantages = torch.randn(3, 2, 4, dtype=torch.float64)
    advantages.requires_grad_()
    check = lambda adv: call(name, logprobs, old, adv, None)
    assert torch.autograd.gradcheck(check, advantages)
