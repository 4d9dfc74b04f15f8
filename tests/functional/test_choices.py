"""Functions by name, and a learner's own function in their place."""

import functools
import inspect

import pytest
import torch
from torch import tensor

from rlhf_lab.functional import (
    ADVANTAGES,
    call_by_name,
    compute_advantages,
    compute_gae,
    estimate_advantages,
    look_up,
    rloo_advantages,
    token_rewards,
)

VALUES = tensor([[1.0, 3.0, 2.0], [0.5, 0.0, -1.0]])
REWARDS = tensor([10.0, -2.0])
MASK = tensor([[1, 1, 0], [1, 1, 1]]).bool()
PAID = token_rewards(REWARDS, MASK)
GROUP = tensor([0, 0])


def test_every_estimator_can_be_called_by_its_name_alike():
    for name in ADVANTAGES:
        got = estimate_advantages(
            name, VALUES, PAID, MASK, group=GROUP, greedy_rewards=tensor([1.0, 1.0])
        )
        assert got.shape == MASK.shape and got.isfinite().all(), name
        assert (got[~MASK] == 0).all() and (got[MASK] != 0).any(), name


def test_named_estimators_by_hand():
    # row 0: 3 - 1, 10 - 3; row 1: 0 - 0.5, -1 - 0, -2 + 1
    one_step = [[2.0, 7.0, 0.0], [-0.5, -1.0, -1.0]]
    assert estimate_advantages("one_step", VALUES, PAID, MASK).tolist() == one_step
    # lambda 1: 10 - V, -2 - V
    gae = estimate_advantages("gae", VALUES, PAID, MASK, lam=1.0)
    assert gae.tolist() == [[9.0, 7.0, 0.0], [-2.5, -2.0, -1.0]]
    # gamma 1/2: 10 / 2, 10; -2 / 4, -2 / 2, -2
    to_go = estimate_advantages("reinforce", None, PAID, MASK, gamma=0.5)
    assert to_go.tolist() == [[5.0, 10.0, 0.0], [-0.5, -1.0, -2.0]]
    # 10 + 2 against the other's -2, and the reverse, at every token
    rloo = estimate_advantages("rloo", None, PAID, MASK, group=GROUP)
    assert rloo.tolist() == [[12.0, 12.0, 0.0], [-12.0, -12.0, -12.0]]
    dr_grpo = estimate_advantages("dr_grpo", None, PAID, MASK, group=GROUP)
    assert dr_grpo.tolist() == [[6.0, 6.0, 0.0], [-6.0, -6.0, -6.0]]
    greedy = tensor([4.0, 4.0])
    remax = estimate_advantages("remax", None, PAID, MASK, greedy_rewards=greedy)
    assert remax.tolist() == [[6.0, 6.0, 0.0], [-6.0, -6.0, -6.0]]


def test_kl_in_the_token_rewards_reaches_estimators_of_whole_sequences():
    paid = token_rewards(REWARDS, MASK, torch.ones(2, 3), 0.5)
    # 10 - 2 * 0.5 = 9 against -2 - 3 * 0.5 = -3.5
    got = estimate_advantages("rloo", None, paid, MASK, group=GROUP)
    assert got.tolist() == [[12.5, 12.5, 0.0], [-12.5, -12.5, -12.5]]


def test_a_function_of_ones_own_stands_where_a_name_does():
    def mine(values, rewards, mask):
        return rewards[:, None] - values

    own = estimate_advantages(mine, VALUES, PAID, MASK)
    # 10 - V and -2 - V, with 0 put where the mask is False
    assert own.tolist() == [[9.0, 7.0, 0.0], [-2.5, -2.0, -1.0]]
    half = functools.partial(compute_gae, lam=1.0)
    assert torch.equal(estimate_advantages(half, VALUES, PAID, MASK), own)
    for function, name in ((compute_gae, "gae"), (rloo_advantages, "rloo")):
        by_name, by_hand = (
            estimate_advantages(choice, VALUES, PAID, MASK, group=GROUP, lam=0.3)
            for choice in (name, function)
        )
        assert torch.equal(by_name, by_hand)
    one_step = estimate_advantages(compute_advantages, VALUES, PAID, MASK)
    assert torch.equal(one_step, compute_advantages(VALUES, REWARDS, MASK))


def test_a_function_that_takes_anything_is_given_values_rewards_and_mask():
    given = []

    def noted(*arguments, settings=None):
        given.extend(arguments)
        return compute_advantages(*arguments)

    got = estimate_advantages(noted, VALUES, PAID, MASK)
    assert torch.equal(got, compute_advantages(VALUES, REWARDS, MASK))
    assert given[0] is VALUES and torch.equal(given[1], REWARDS) and given[2] is MASK


def test_a_function_of_ones_own_is_told_what_it_can_ask_for():
    with pytest.raises(ValueError, match="no value for the parameter 'v' of .*token_rewards"):
        estimate_advantages(lambda v, mask: v, VALUES, PAID, MASK)
    with pytest.raises(ValueError, match="no value for the parameter 'group' of rloo_advantages"):
        estimate_advantages("rloo", VALUES, PAID, MASK)
    with pytest.raises(ValueError, match="no value for the parameter 'values' of compute_gae"):
        estimate_advantages("gae", None, PAID, MASK)


def test_a_result_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"shape \(2, 2\) for a mask of shape \(2, 3\)"):
        estimate_advantages(lambda values: values[:, 1:], VALUES, PAID, MASK)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="Unknown advantages 'vtrace'.*: one_step, gae"):
        estimate_advantages("vtrace", VALUES, PAID, MASK)
    with pytest.raises(ValueError, match="Unknown color 'red'. Choose one of: blue"):
        look_up("red", {"blue": print}, "color")


def test_calls_by_name_leave_out_what_is_none_and_what_is_not_asked_for():
    def asks(a, *, b=2):
        return a, b

    assert call_by_name(asks, {"a": 1, "b": None, "c": 3}, "field") == (1, 2)
    assert call_by_name(lambda **all: all, {"a": 1, "b": None}, "field") == {"a": 1}
    assert call_by_name(lambda a, *rest: rest, {"a": 1}, "field") == ()
    in_order = call_by_name(lambda *all: all, {"a": 1, "b": None, "c": 3}, "field", ("c", "b"))
    assert in_order == (3, None)
    with pytest.raises(ValueError, match="field: no value for the parameter 'a' of asks"):
        call_by_name(asks, {"a": None, "b": 1}, "field")


def test_the_table_of_estimators_cannot_be_changed():
    with pytest.raises(TypeError):
        ADVANTAGES["mine"] = compute_gae


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_comes_back_in_float32(dtype):
    got = estimate_advantages("rloo", None, PAID.to(dtype), MASK, group=GROUP)
    assert got.dtype == torch.float32 and got[0].tolist() == [12.0, 12.0, 0.0]


def test_gradients_pass_through_the_registry():
    torch.manual_seed(0)
    values, paid = torch.randn(2, 2, 3, dtype=torch.float64).requires_grad_()
    for name in ("one_step", "gae", "rloo", "grpo"):
        check = lambda v, p, n=name: estimate_advantages(n, v, p, MASK, group=GROUP)
        assert torch.autograd.gradcheck(check, (values, paid))


def test_the_registered_names_are_spelt_with_parameters_that_exist():
    offered = set(inspect.signature(estimate_advantages).parameters) | {"rewards"}
    for name, function in ADVANTAGES.items():
        required = {
            p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty
        }
        assert required <= offered, name
