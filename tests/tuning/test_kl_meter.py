"""KL of a model from its start on its own samples, and the true reward before and after."""

import pytest
import torch

from rlhf_lab.models import load_model
from rlhf_lab.tuning import DriftEvalConfig, render_examples
from rlhf_lab.tuning.kl_meter import KLMeter
from tests.tiny_models import tiny_chat


@pytest.fixture
def nano():
    return load_model("reel-nano")


def test_unchanged_model_has_kl_zero(nano, monkeypatch):
    before, state = nano.W_E.clone(), torch.get_rng_state()
    calls, sample = [], KLMeter.sample
    monkeypatch.setattr(KLMeter, "sample", lambda self: calls.append(self) or sample(self))
    drift = KLMeter(nano, ["", "this movie"], DriftEvalConfig(8, 5)).measure()
    assert len(calls) == 1  # the start is sampled for its true reward only
    assert (drift.samples, drift.kl_per_token, drift.kl_per_sequence) == (8, 0.0, 0.0)
    assert drift.true_reward_before is drift.true_reward_after is None
    assert torch.equal(nano.W_E, before) and torch.equal(torch.get_rng_state(), state)


def test_kl_matches_softmax_of_both_models(nano):
    """No text of 3 tokens ends early, so a sequence has three times the KL of a token."""
    start, meter = load_model("reel-nano"), KLMeter(nano, [""], DriftEvalConfig(6, 3), None, 2, 4)
    nano.unembed.b_U.data += 0.5 * torch.randn(72, generator=torch.Generator().manual_seed(0))
    drift = meter.measure()
    tokens = meter.sample().tokens
    now, before = (model(tokens).double().log_softmax(-1)[:, :-1] for model in (nano, start))
    expected = (now.exp() * (now - before)).sum(-1).mean().item()
    assert expected > 0.01 and drift.kl_per_token == pytest.approx(expected, rel=1e-4)
    assert drift.kl_per_sequence == pytest.approx(3 * expected, rel=1e-4)


def test_prompts_repeat_in_turn_without_those_that_leave_no_room(nano):
    """The context is 32; BOS and 31 words leave no room."""
    meter = KLMeter(nano, ["", "this movie"], DriftEvalConfig(3, 5))
    assert meter.prompts == [[0], [0, 2, 8], [0]]
    long = " ".join(["the"] * 31)
    assert KLMeter(nano, [long, "this movie"], DriftEvalConfig(4, 5)).measure().samples == 4
    assert KLMeter(nano, [long], DriftEvalConfig(4, 5)).measure() is None


def test_samples_of_rendered_prompts_end_with_the_turn(tmp_path):
    model = load_model(str(tiny_chat(tmp_path / "model")))
    turns = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
    prompts = render_examples(model.tokenizer, [turns]).prompts
    meter = KLMeter(model, prompts, DriftEvalConfig(samples=32, gen_len=16), rendered=True)
    expected = model.tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True)
    assert meter.prompts == [expected["input_ids"]] * 32
    samples = meter.sample()
    is_end = samples.tokens[:, samples.prefix_len :] == model.tokenizer.convert_tokens_to_ids(
        "<|im_end|>"
    )
    ended = is_end.any(1)
    assert ended.any()
    assert (samples.mask.sum(1)[ended] == is_end.int().argmax(1)[ended] + 1).all()
