"""Log-probabilities and entropy of the generated tokens, and the logits and values before them."""

import math
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import tensor

from rlhf_lab import functional as F

INF, NAN = math.inf, math.nan
LOG3 = math.log(3)
# states: (1/2, 1/2), then (1/4, 3/4); the last one predicts nothing
LOGITS = tensor([[[0.0, 0.0], [0.0, LOG3], [9.0, -9.0]]])


def test_logprobs_match_hand_computed():
    both = [math.log(1 / 2), math.log(1 / 4)]
    tokens = tensor([[0, 1, 0]])
    assert F.get_logprobs(LOGITS, tokens)[0].tolist() == pytest.approx(both)
    assert F.get_logprobs(LOGITS, tokens, prefix_len=2)[0].tolist() == pytest.approx(both[1:])
    best = [math.log(1 / 2), math.log(3 / 4)]
    assert F.get_max_logprobs(LOGITS)[0].tolist() == pytest.approx(best)
    assert F.get_max_logprobs(LOGITS, prefix_len=2)[0].tolist() == pytest.approx(best[1:])
    # (1, 9) / 10 at half the temperature
    assert F.get_max_logprobs(LOGITS, 2, 0.5).item() == pytest.approx(math.log(0.9))
    halved = F.log_probs(LOGITS[:, 1:2], 0.5).exp()
    assert halved.flatten().tolist() == pytest.approx([0.1, 0.9])
    logprobs = F.log_probs(LOGITS[:, :2])
    assert logprobs.exp().flatten().tolist() == pytest.approx([0.5, 0.5, 0.25, 0.75])
    assert F.token_logprobs(logprobs, tensor([[1, 0]]))[0].tolist() == pytest.approx(both)
    one = F.get_logprobs(torch.zeros(1, 2, 4), tensor([[0, 3]]), 1)
    assert one.flatten().tolist() == pytest.approx([-math.log(4)])


def test_generated_values_and_logits_match_hand_computed():
    # prefix 3 of 5: states 2 and 3; values[prefix_len - 1 : -1] would cut the batch instead
    values = tensor([[0.0, 1.0, 2.0, 3.0, 4.0], [10.0, 11.0, 12.0, 13.0, 14.0]])
    assert F.generated_values(values, 3).tolist() == [[2.0, 3.0], [12.0, 13.0]]
    assert F.generated_logits(values[..., None], 3)[..., 0].tolist() == [[2.0, 3.0], [12.0, 13.0]]


@pytest.mark.parametrize("prefix_len", [0, -1, 4, 5])
def test_prefix_without_state_or_generated_token_raises(prefix_len):
    logits, tokens = torch.zeros(1, 4, 3), torch.zeros(1, 4).long()
    for call in (
        lambda: F.get_logprobs(logits, tokens, prefix_len),
        lambda: F.get_max_logprobs(logits, prefix_len),
        lambda: F.generated_values(logits[..., 0], prefix_len),
        lambda: F.generated_logits(logits, prefix_len),
    ):
        with pytest.raises(ValueError, match=f"prefix_len is {prefix_len} .* 4 tokens"):
            call()


@pytest.mark.parametrize("temperature", [0.0, -1.0, NAN])
def test_temperature_that_is_not_positive_raises(temperature):
    for call in (
        lambda: F.get_logprobs(LOGITS, torch.zeros(1, 3).long(), 1, temperature),
        lambda: F.get_max_logprobs(LOGITS, 1, temperature),
        lambda: F.log_probs(LOGITS, temperature),
    ):
        with pytest.raises(ValueError, match="temperature must be greater than 0"):
            call()


@pytest.mark.parametrize("token", [-1, -100])
def test_get_logprobs_raises_on_negative_token_id(token):
    with pytest.raises(ValueError, match="Token ids must be at least 0"):
        F.get_logprobs(torch.zeros(1, 3, 4), tensor([[0, 1, token]]))


def test_get_logprobs_warns_in_no_thread():
    logits, tokens = torch.randn(2, 4, 3), torch.randint(0, 3, (2, 4))
    with warnings.catch_warnings(), ThreadPoolExecutor(4) as pool:
        warnings.simplefilter("error")
        results = list(pool.map(lambda _: F.get_logprobs(logits, tokens, 2), range(32)))
    assert all(torch.equal(x, results[0]) for x in results)


def test_extreme_logits_keep_finite_logprobs():
    logits = tensor([[[3e38, -3e38], [-INF, 5.0], [0.0, 0.0]]])
    assert F.get_logprobs(logits, tensor([[1, 0, 1]]))[0].tolist() == [0.0, 0.0]
    assert F.get_logprobs(logits, tensor([[1, 0, 0]]))[0, 1].item() == -INF
    assert F.get_max_logprobs(logits)[0].tolist() == [0.0, 0.0]


def test_log_probs_are_finite_unless_a_logit_is_nan():
    rows = [[0.0, 0.0, -INF], [-INF, -INF, -INF], [INF, 0.0, 1.0], [3e38, -3e38, 0.0]]
    logits = tensor([rows], requires_grad=True)
    logprobs = F.log_probs(logits)
    assert logprobs.isfinite().all() and (logprobs.detach() <= 0).all()
    assert logprobs[0, 0].tolist() == pytest.approx([math.log(1 / 2)] * 2 + [F.LOG_ZERO])
    assert logprobs.exp()[0, 0, 2] == 0
    (logprobs.exp() * torch.randn(1, 4, 3)).sum().backward()
    assert logits.grad.isfinite().all() and logits.grad[0, 0, 2] == 0
    assert F.log_probs(tensor([[[0.0, NAN]]])).isnan().all()


def entropy(logits):
    return F.entropy_per_token(F.log_probs(logits))


def test_entropy_matches_hand_computed():
    quarter = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    assert entropy(LOGITS[:, :2])[0].tolist() == pytest.approx([math.log(2), quarter])
    bonus = F.calc_entropy_bonus(tensor([[0.5, 1.5, NAN]]), 0.5, tensor([[True, True, False]]))
    assert bonus.item() == pytest.approx(0.5)
    # certain where the token was drawn, undecided at prompt and last position
    logits = torch.zeros(1, 5, 2)
    logits[0, 3] = tensor([1e4, 0.0])
    assert F.calc_entropy_bonus(entropy(F.generated_logits(logits, 4)), 1.0).item() == 0.0


@pytest.mark.parametrize("logit", [-INF, -800.0, -1e4])
def test_gradients_match_differences_at_probability_zero(logit):
    torch.manual_seed(1)
    logits = torch.randn(2, 3, 4, dtype=torch.float64).index_fill(-1, tensor([1]), logit)
    assert torch.autograd.gradcheck(entropy, logits.requires_grad_())
    assert torch.autograd.gradcheck(lambda z: F.log_probs(z, 0.7).exp(), logits)
    torch.testing.assert_close(entropy(logits), entropy(logits[..., [0, 2, 3]]))
