"""KL and true reward of a tuned model: 0 at first, then the exact KL."""

import pytest
import torch
from torch.testing import assert_close

from rlhf_lab.errors import ConfigError
from rlhf_lab.models import add_lora, load_model
from rlhf_lab.models.lora import lora_layers
from rlhf_lab.organism import REWARDS
from rlhf_lab.tuning import DriftEvalConfig, KLMeter


@pytest.fixture
def nano():
    return load_model("reel-nano")


def nudge(model, size):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(model.b_U.shape, generator=generator)
    model.unembed.b_U.data += size * noise


def test_a_model_that_has_not_moved_is_at_kl_zero(nano):
    drift = KLMeter(nano, ["", "this movie"], DriftEvalConfig(8, 5)).measure()
    assert (drift.samples, drift.kl_per_token, drift.kl_per_sequence) == (8, 0.0, 0.0)
    assert drift.true_reward_before is None and drift.true_reward_after is None


def test_the_kl_is_that_of_the_whole_next_token_distribution(nano):
    """From plain softmaxes in float64, over the states before each written token; no text of 3
    tokens ends early, so that a sequence has three times the KL of a token.
    """
    start = load_model("reel-nano")
    meter = KLMeter(nano, [""], DriftEvalConfig(6, 3), seed=2, batch_size=4)
    nudge(nano, 0.5)
    drift = meter.measure()
    tokens = meter.sample().tokens
    own, before = (model(tokens).double().log_softmax(-1)[:, :-1] for model in (nano, start))
    expected = (own.exp() * (own - before)).sum(-1).mean().item()
    assert expected > 0.01
    assert drift.kl_per_token == pytest.approx(expected, rel=1e-4)
    assert drift.kl_per_sequence == pytest.approx(3 * expected, rel=1e-4)


@pytest.mark.slow
def test_true_reward_is_taken_of_the_texts_before_and_after(nano):
    """The unembedding is turned against blame, so that the true reward rises."""
    from rlhf_lab.organism.lexicon import ADJECTIVES, VERBS, WORD_IDS

    meter = KLMeter(nano, [""], DriftEvalConfig(48, 28), REWARDS["true_reward"])
    words = [word for tier in ADJECTIVES[-1] for word in tier] + list(VERBS[-1])
    nano.unembed.b_U.data[[WORD_IDS[word] for word in words]] -= 3.0
    drift = meter.measure()
    assert (
        0.3 < drift.true_reward_before < 0.7
        and drift.true_reward_after > drift.true_reward_before + 0.1
    )


def test_below_adapters_the_model_is_its_own_reference(nano):
    add_lora(nano, 2, 4.0)
    meter = KLMeter(nano, [""], DriftEvalConfig(4, 5))
    assert meter.reference.W_E.data_ptr() == nano.W_E.data_ptr()
    for layer in lora_layers(nano).values():
        layer.B.data += 3.0
    assert meter.measure().kl_per_token > 1e-4


def test_prompts_that_leave_no_room_are_left_out(nano):
    """The context is 32; BOS and 31 words leave room for nothing."""
    long = " ".join(["the"] * 31)
    drift = KLMeter(nano, [long, "this movie"], DriftEvalConfig(4, 5)).measure()
    assert drift.samples == 4
    assert KLMeter(nano, [long], DriftEvalConfig(4, 5)).measure() is None


def test_nothing_is_measured_unasked_and_too_few_is_refused(nano):
    assert KLMeter(nano, [""], None).measure() is None
    assert KLMeter(nano, [""], DriftEvalConfig(0)).measure() is None
    with pytest.raises(ConfigError, match="samples=-1"):
        DriftEvalConfig(-1)
    with pytest.raises(ConfigError, match="gen_len=-1"):
        DriftEvalConfig(1, -1)


@pytest.mark.slow
def test_measuring_leaves_weights_and_random_state_alone(nano):
    before, state = nano.W_E.clone(), torch.get_rng_state()
    KLMeter(nano, [""], DriftEvalConfig(4, 5)).measure()
    assert_close(nano.W_E, before, atol=0, rtol=0)
    assert torch.equal(torch.get_rng_state(), state)
