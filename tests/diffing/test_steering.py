"""Steering: vectors by hand, and a sweep with controls of equal length."""

import pytest
import torch
from torch.nn.functional import pad

from rlhf_lab.diffing import control_vector, mean_difference, steering_sweep
from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import generated_logits
from rlhf_lab.models import TransformerWithValueHead, load_model
from rlhf_lab.organism import smoothed, true_reward
from rlhf_lab.sampling import sample
from rlhf_lab.sampling_spec import SamplingSpec
from rlhf_lab.training.capture import capture_activations

SITES = ("blocks.0.hook_resid_post", "blocks.1.hook_resid_mid")
FIGURES = {"reward": smoothed, "true_reward": true_reward}
PROMPTS, SPEC = [[0, 2, 8]] * 6, SamplingSpec(12, stop_tokens=(19, 20, 21, 22))


@pytest.fixture(scope="module")
def policy() -> TransformerWithValueHead:
    return TransformerWithValueHead(load_model("reel-nano"))


@pytest.fixture(scope="module")
def vectors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {site: 20 * torch.randn(64, generator=generator) / 8 for site in SITES}


def test_the_mean_difference_is_over_tokens_under_the_mask(policy):
    other = load_model("reel-nano-b")
    tokens = torch.tensor([[0, 2, 8, 18], [0, 2, 8, 17]])
    mask = torch.tensor([[False, True, False, True], [False, False, True, False]])
    found = mean_difference(policy, other, tokens, SITES[0], mask)
    after, before = (capture_activations(m, tokens, [SITES[0]])[SITES[0]] for m in (other, policy))
    by_hand = sum((after - before)[place] for place in ((0, 1), (0, 3), (1, 2))) / 3
    assert torch.allclose(found, by_hand, atol=1e-6)
    padded, mask2, real = (pad(x, (2, 0)) for x in (tokens, mask, torch.ones_like(mask)))
    again = mean_difference(policy, other, padded, SITES[0], mask2, real)
    assert torch.allclose(again, found, atol=1e-5)
    with pytest.raises(ConfigError, match="mask is False"):
        mean_difference(policy, other, tokens, SITES[0], mask & False)


def test_a_control_vector_averages_pairs_of_unequal_length(policy):
    plus, minus = [[0, 2, 8, 18], [0, 2]], [[0, 2], [0, 2, 8]]
    found = control_vector(policy, plus, minus, SITES[1])
    _, four = policy.base_model.run_with_cache(torch.tensor([plus[0]]))
    _, three = policy.base_model.run_with_cache(torch.tensor([minus[1]]))
    by_hand = (four[SITES[1]][0, 3] - three[SITES[1]][0, 2]) / 2  # [0, 2] cancels
    assert torch.allclose(found, by_hand, atol=1e-5)
    with pytest.raises(ConfigError, match="positive has 2 texts, negative 1"):
        control_vector(policy, plus, minus[:1], SITES[1])


def test_a_sweep_matches_samples_with_a_hook_by_hand(policy, vectors, no_type_checks):
    state = torch.random.get_rng_state()
    found = steering_sweep(policy, vectors, (0, 3), PROMPTS, SPEC, FIGURES, 0, controls=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not any(point.fwd_hooks for point in policy.hook_dict.values())
    names = ["vector", "random 0"]
    expected = [(site, alpha, name) for site in SITES for name in names for alpha in (0, 3)]
    assert [(row.site, row.alpha, row.direction) for row in found] == expected
    for row in found:
        assert row.figures["kl"].min() > -1e-4
        if row.alpha == 0:
            assert row.figures["kl"].abs().max() < 1e-5
            assert torch.equal(row.figures["reward"], found[0].figures["reward"])
    row = next(row for row in found if (row.site, row.alpha) == (SITES[1], 3))
    add = lambda x, hook: x + 3 * vectors[SITES[1]]
    with policy.base_model.hooks(fwd_hooks=[(SITES[1], add)]):
        samples = sample(policy, PROMPTS, SPEC, torch.Generator().manual_seed(0))
        steered = policy.base_model(samples.tokens)
    logs = [
        generated_logits(logits, samples.prefix_len).double().log_softmax(-1)
        for logits in (steered, policy.base_model(samples.tokens))
    ]
    kl = ((logs[0].exp() * (logs[0] - logs[1])).sum(-1) * samples.mask).sum(1)
    assert kl.min() > 0.05
    torch.testing.assert_close(row.figures["kl"].double(), kl, rtol=1e-3, atol=1e-4)
    texts = samples.texts(policy.base_model.tokenizer)
    for name, figure in FIGURES.items():
        torch.testing.assert_close(row.figures[name], figure(texts))
    one = {"one": lambda texts: torch.ones(1)}
    for model, alphas, figures, error in (
        (policy.base_model, (1,), FIGURES, "needs a TransformerWithValueHead"),
        (policy, (), FIGURES, "0 alphas"),
        (policy, (1,), {"kl": true_reward}, "no figure with the name 'kl'"),
        (policy, (float("nan"),), FIGURES, "is not finite"),
        (policy, (1,), one, r"figures\['one'\] returned shape"),
    ):
        with pytest.raises(ConfigError, match=error):
            steering_sweep(model, vectors, alphas, PROMPTS, SPEC, figures)
