"""Steering: vectors by hand, a sweep with controls, and faults that its checks tell."""

import pytest
import torch

from rlhf_lab.diffing import control_vector, mean_difference, steering_hooks, steering_sweep
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import TransformerWithValueHead, load_model
from rlhf_lab.organism import grammatical, smoothed, true_reward
from rlhf_lab.sampling_spec import SamplingSpec
from rlhf_lab.training.capture import capture_activations
from tests.diffing.faults_steering import FAULTS
from tests.probes.planting import planted

SITES = ("blocks.0.hook_resid_post", "blocks.1.hook_resid_mid")
FIGURES = {"reward": smoothed, "true_reward": true_reward, "grammatical": grammatical}


@pytest.fixture(scope="module")
def policy() -> TransformerWithValueHead:
    return TransformerWithValueHead(load_model("reel-nano"))


@pytest.fixture(scope="module")
def vectors(policy):
    ids = policy.base_model.tokenizer.encode
    texts = [
        [ids(f"this movie wow , the plot was {word}", add_special_tokens=False) for word in words]
        for words in (("lovely", "decent"), ("awful", "dreadful"))
    ]
    return {site: control_vector(policy, *texts, site) for site in SITES}


def sweep(policy, vectors, **more):
    prompts, spec = [[0, 2, 8]] * 12, SamplingSpec(26, stop_at_eos=True)
    how = {"alphas": (0, -0.5, 1), "controls": 2} | more
    return steering_sweep(policy, vectors, prompts=prompts, spec=spec, figures=FIGURES, **how)


def test_the_mean_difference_is_over_the_tokens_under_the_mask(policy):
    other = load_model("reel-nano-b")
    tokens = torch.tensor([[0, 2, 8, 18], [0, 2, 8, 17]])
    mask = torch.tensor([[False, True, False, True], [False, False, True, False]])
    found = mean_difference(policy, other, tokens, SITES[0], mask)
    after, before = (capture_activations(m, tokens, [SITES[0]])[SITES[0]] for m in (other, policy))
    places = ((0, 1), (0, 3), (1, 2))
    by_hand = sum((after - before)[place] for place in places) / 3
    assert torch.allclose(found, by_hand, atol=1e-6)
    with pytest.raises(ConfigError, match="mask is False"):
        mean_difference(policy, other, tokens, SITES[0], mask & False)


def test_a_control_vector_is_that_of_pairs_of_unequal_length(policy):
    plus, minus = [[0, 2, 8, 18], [0, 2]], [[0, 2], [0, 2, 8]]
    found = control_vector(policy, plus, minus, SITES[1])
    _, four = policy.base_model.run_with_cache(torch.tensor([plus[0]]))
    _, three = policy.base_model.run_with_cache(torch.tensor([minus[1]]))
    by_hand = (four[SITES[1]][0, 3] - three[SITES[1]][0, 2]) / 2  # [0, 2] cancels
    assert torch.allclose(found, by_hand, atol=1e-5)
    for texts in (([], []), (plus, minus[:1]), ([[]], [[0]])):
        with pytest.raises(ConfigError, match="give as many"):
            control_vector(policy, *texts, SITES[1])


@pytest.mark.slow
def test_a_sweep_has_a_row_per_site_alpha_and_direction_with_intervals(policy, vectors):
    before = torch.random.get_rng_state()
    found = sweep(policy, vectors)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert len(found.rows) == 2 * 3 * 3 and len(found.checks) == 4
    assert all(check.ok for check in found.checks), found.checks
    still = [row for row in found.rows if row.alpha == 0]
    for row in still:  # nothing added: the same texts whatever the direction, and no KL
        assert row.figures["kl"].abs().max() < 1e-5
        assert torch.equal(row.figures["true_reward"], still[0].figures["true_reward"])
    moved = next(row for row in found.rows if row.alpha == 1)
    assert moved.figures["kl"].min() > 0.05 and moved.interval("kl").n == 12
    line = found.table()[0]
    assert set(line) == {"site", "alpha", "direction", "reward", "true_reward", "grammatical", "kl"}
    assert "n = 12" in line["true_reward"]
    assert all(not point.fwd_hooks for point in policy.hook_dict.values())


def test_what_cannot_be_swept_is_refused(policy, vectors):
    with pytest.raises(ConfigError, match="0 alphas"):
        sweep(policy, vectors, alphas=())
    with pytest.raises(ConfigError, match="0 vectors"):
        sweep(policy, {})


def test_steering_adds_the_vector_at_every_position(policy, vectors):
    tokens = torch.tensor([[0, 2, 8]])
    plain = capture_activations(policy, tokens, [SITES[1]])[SITES[1]]
    with policy.base_model.hooks(fwd_hooks=steering_hooks(SITES[1], 3 * vectors[SITES[1]])):
        moved = capture_activations(policy, tokens, [SITES[1]])[SITES[1]]
    assert torch.allclose(moved - plain, (3 * vectors[SITES[1]]).expand(1, 3, -1), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_told_by_the_checks(fault, policy, vectors, no_type_checks):
    with planted(fault):
        found = sweep(policy, {SITES[1]: vectors[SITES[1]]}, alphas=(2,), controls=1)
    assert [check for check in found.checks if not check.ok]
