"""KL of a model from its start on its own samples, and the true reward before and after."""

import pytest
import torch

from rlhf_lab.models import load_model, make_reference
from rlhf_lab.tuning import DriftEvalConfig, render_examples
from rlhf_lab.tuning.drift import measure_drift
from tests.tiny_models import CHAT_TEMPLATE, tiny_chat


@pytest.fixture
def nano():
    return load_model("reel-nano")


@pytest.fixture
def drawn(monkeypatch):
    """Prompts and samples of each call of the sampler."""
    calls = []

    def record(policy, prompts, *arguments, **options):
        calls.append((prompts, sample(policy, prompts, *arguments, **options)))
        return calls[-1][1]

    from rlhf_lab.tuning.drift import sample

    monkeypatch.setattr("rlhf_lab.tuning.drift.sample", record)
    return calls


def test_unchanged_model_has_kl_zero(nano, drawn):
    start, before, state = make_reference(nano), nano.W_E.clone(), torch.get_rng_state()
    drift = measure_drift(nano, start, ["", "this movie"], DriftEvalConfig(8, 5))
    assert len(drawn) == 1  # the start is sampled for its true reward only
    assert (drift.samples, drift.kl_per_token, drift.kl_per_sequence) == (8, 0.0, 0.0)
    assert drift.true_reward_before is drift.true_reward_after is None
    assert torch.equal(nano.W_E, before) and torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_kl_and_true_rewards_match_both_models(nano, drawn):
    """A review has 28 words with its end, so 3 of 31 tokens are padding."""
    start, reward_fn = load_model("reel-nano"), lambda texts: torch.tensor([*map(len, texts)]) * 1.0
    nano.unembed.b_U.data += 0.5 * torch.randn(72, generator=torch.Generator().manual_seed(0))
    few = DriftEvalConfig(6, 31)
    drift = measure_drift(nano, start, [""], few, reward_fn, 2, 4)
    after, before = (samples for _, samples in drawn)
    logprobs = (model(after.tokens).double().log_softmax(-1)[:, :-1] for model in (nano, start))
    now, then = logprobs
    per_token, mask = (now.exp() * (now - then)).sum(-1), after.mask
    assert not mask.all()
    expected = per_token[mask].mean().item()
    assert expected > 0.01 and drift.kl_per_token == pytest.approx(expected, rel=1e-4)
    per_sequence = (per_token * mask).sum(1).mean().item()
    assert drift.kl_per_sequence == pytest.approx(per_sequence, rel=1e-4)
    means = [reward_fn(samples.texts(nano.tokenizer)).mean() for samples in (before, after)]
    assert means[0] != means[1] and means == [drift.true_reward_before, drift.true_reward_after]
    measure_drift(start, start, [""], few, seed=2)
    assert torch.equal(drawn[-1][1].tokens, before.tokens)  # the same noise


def test_prompts_repeat_in_turn_without_those_that_leave_no_room(nano, drawn):
    """The context is 32; BOS and 31 words leave no room."""
    long, start = " ".join(["the"] * 31), make_reference(nano)
    measure_drift(nano, start, ["", "this movie"], DriftEvalConfig(3, 5))
    assert drawn[-1][0] == [[0], [0, 2, 8], [0]]
    assert measure_drift(nano, start, [long, "this movie"], DriftEvalConfig(4, 5)).samples == 4
    assert measure_drift(nano, start, [long], DriftEvalConfig(4, 5)) is None


def test_samples_of_rendered_prompts_end_with_the_turn(tmp_path, drawn):
    template = CHAT_TEMPLATE.removeprefix("{{ bos_token }} ")
    model = load_model(str(tiny_chat(tmp_path / "model", template)))
    turns = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
    prompts = render_examples(model.tokenizer, [turns]).prompts
    few = DriftEvalConfig(samples=32, gen_len=16)
    measure_drift(model, make_reference(model), prompts, few, rendered=True)
    expected = model.tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True)
    ((rows, samples),) = drawn
    assert rows == [expected["input_ids"]] * 32
    is_end = samples.tokens[:, samples.prefix_len :] == model.tokenizer.convert_tokens_to_ids(
        "<|im_end|>"
    )
    ended = is_end.any(1)
    assert ended.any()
    assert (samples.mask.sum(1)[ended] == is_end.int().argmax(1)[ended] + 1).all()
