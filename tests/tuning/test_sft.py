"""Fine-tuning: the loss that is reported, what is learned and what is left alone."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_lab.errors import ConfigError
from rlhf_lab.fitting import FitConfig
from rlhf_lab.models import add_lora, effective_weights, load_model
from rlhf_lab.organism import REWARDS
from rlhf_lab.tuning import (
    DriftEvalConfig,
    Examples,
    encode_examples,
    example_logprobs,
    fine_tune,
    held_out_loss,
    load_examples,
)

FEW = FitConfig(steps=4, batch_size=8, learning_rate=1e-3, show_progress=False)


@pytest.fixture
def nano():
    return load_model("reel-nano")


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_the_held_out_loss_is_a_mean_over_all_tokens_however_it_is_cut(model_dir, batch_size):
    """Each row alone through plain transformers, whose loss is the mean over its tokens."""
    plain = AutoModelForCausalLM.from_pretrained(str(model_dir), local_files_only=True).eval()
    model = load_model(str(model_dir))
    rows = encode_examples(model, ["", "w9 w1", ""], ["w1", "w2 w3 w4", "w5 w6 w7 w8 w0"])
    total, count = 0.0, 0
    for row in rows:
        labels = torch.tensor([row.ids])
        labels[:, : row.prefix_len] = -100
        learned = len(row.ids) - row.prefix_len
        total += plain(torch.tensor([row.ids]), labels=labels).loss.item() * learned
        count += learned
    assert count == 2 + 4 + 6
    found, tokens = held_out_loss(model, rows, batch_size)
    assert tokens == count and found == pytest.approx(total / count, abs=1e-5)


@pytest.mark.slow
def test_texts_that_are_new_to_the_model_become_likely(nano):
    """Ever the same text: its loss falls from above 2 nats per token to nearly nothing."""
    examples = Examples([""] * 8, ["i loved it ."] * 8)
    fitted = fine_tune(nano, examples, FitConfig(60, 8, 3e-3, 0.25, 0, False))
    assert fitted.loss_before > 2 and fitted.loss_after < 0.1
    assert fitted.last_loss < fitted.first_loss
    assert (fitted.train_texts, fitted.held_out_texts, fitted.held_out_tokens) == (6, 2, 10)
    assert fitted.perplexity_after == pytest.approx(math.exp(fitted.loss_after))


@pytest.mark.slow
def test_praise_alone_teaches_praise(nano):
    texts = load_examples("reel", 600, 1).texts
    rewards = REWARDS["true_reward"](texts).tolist()
    praise = [text for text, true_reward in zip(texts, rewards, strict=True) if true_reward > 0.9]
    settings = {"drift_eval": DriftEvalConfig(64, 28), "true_reward_fn": REWARDS["true_reward"]}
    examples = Examples([""] * len(praise), praise)
    fitted = fine_tune(nano, examples, FitConfig(60, 16, 1e-3, 0.1, 0, False), **settings)
    assert fitted.drift.true_reward_after > fitted.drift.true_reward_before + 0.2
    assert fitted.drift.kl_per_sequence > 0.1


@pytest.mark.slow
def test_the_texts_that_it_was_made_from_leave_it_where_it_is(nano):
    fitted = fine_tune(
        nano,
        load_examples("reel", 300, 5),
        FitConfig(20, 16, 1e-4, 0.2, 0, False),
        drift_eval=DriftEvalConfig(64, 28),
    )
    assert fitted.drift.kl_per_sequence < 0.1
    assert abs(fitted.loss_after - fitted.loss_before) < 0.05


def test_the_prompt_is_not_learned(nano):
    """The surprise at a prompt that the model finds absurd has no part in the loss."""
    rows = encode_examples(nano, ["it it it"], ["this movie"])
    logprobs, counts = example_logprobs(nano, rows)
    loss, _ = held_out_loss(nano, rows, 1)
    assert loss == pytest.approx(-logprobs[0, 3:].mean().item(), abs=1e-5)
    assert counts.tolist() == [[False] * 3 + [True] * 3]


def test_hooks_fire_on_every_step(nano):
    heard = []
    hooks = [("blocks.0.hook_resid_post", lambda x, hook: heard.append(x.requires_grad))]
    with nano.hooks(fwd_hooks=hooks):
        fine_tune(nano, load_examples("reel", 20, 0), FEW)
    assert heard.count(True) == 4


def test_adapters_learn_while_the_model_below_them_stays(nano):
    add_lora(nano, 2, 4.0)
    start = effective_weights(load_model("reel-nano"))
    # Steps large enough, and texts long enough, for a KL well above what float32 can tell from 0.
    far = replace(FEW, learning_rate=0.03)
    fitted = fine_tune(nano, load_examples("reel", 40, 0), far, drift_eval=DriftEvalConfig(8, 25))
    changed = effective_weights(nano)
    moved = {name for name in start if not torch.equal(start[name], changed[name])}
    assert {name.rsplit(".", 1)[1] for name in moved} == {"W_Q", "W_V"}
    assert fitted.drift.kl_per_token > 1e-5


@pytest.mark.slow
def test_a_seed_decides_all_and_the_random_state_is_left_alone():
    def run(seed):
        model, state = load_model("reel-nano"), torch.get_rng_state()
        fine_tune(model, load_examples("reel", 40, 0), FitConfig(3, 8, 1e-3, 0.2, seed, False))
        assert torch.equal(torch.get_rng_state(), state)
        return model.W_E.detach()

    assert torch.equal(run(4), run(4)) and not torch.equal(run(4), run(5))


def test_one_text_is_too_few(nano):
    with pytest.raises(ConfigError, match="Use at least 2"):
        fine_tune(nano, Examples([""], ["this"]), FEW)


def test_figures_are_plain_json_values(nano):
    fitted = fine_tune(nano, load_examples("reel", 10, 0), FEW, drift_eval=DriftEvalConfig(2, 3))
    found = fitted.to_dict()
    assert found["steps"] == 4 and "show_progress" not in found
    assert found["perplexity_before"] == pytest.approx(math.exp(found["loss_before"]))
    assert set(found["drift"]) >= {"kl_per_token", "kl_per_sequence", "samples"}
