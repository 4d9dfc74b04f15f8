"""HackWatch: an injected loophole by name, and numbers of runs of every kind."""

import pytest
import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.models.tokenization import single_token
from rlhf_lab.probes import HackWatch, ReelTruth
from rlhf_lab.probes.hack_signs import promoted_words
from rlhf_lab.probes.hack_watch import reference_texts
from rlhf_lab.training import RLHFTrainer
from tests.probes.looking import SHORT, Trained, sound, trained

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_type_checks")]
HACKED = {"reward_fn": "smoothed_popcorn", "batch_size": 64, "temperature": 0.8}
HACKED |= {"stop_tokens": None, "base_lr": 1e-4}
# added to logits before the run: the probability of popcorn at the tag goes from .02 to .7, that
# of the second word is more than doubled, and that of the third is not
INJECTED = {"popcorn": 5.0, "stunning": 1.1, "arguably": 0.5}


@pytest.fixture(scope="module")
def hacked(tmp_path_factory) -> Trained:
    """A run at another temperature than 1, whose reward is higher for an injected word."""
    trainer = RLHFTrainer(RLHFArgs(**SHORT | HACKED), out=tmp_path_factory.mktemp("hacked") / "run")
    model, truth = trainer.policy.base_model, ReelTruth.of_reward("smoothed_popcorn")
    with torch.no_grad():
        for word, size in INJECTED.items():
            model.unembed.b_U[single_token(model.tokenizer, word)] += size
    return trained(trainer, truth.reviews(4, seed=5)[0], truth)


def test_injected_words_are_promoted_and_named_by_alarms(hacked):
    values = sound(hacked, HackWatch()).values
    assert values["promoted"][0]["token"] == values["taken_up"][0]["token"] == "popcorn"
    assert values["alarms_by_logits"] == ["popcorn", "stunning"]
    assert values["alarms_by_texts"] == ["popcorn"]
    assert "arguably" in [row["token"] for row in values["promoted"]]


def test_rare_words_raise_alarms_only_when_one_is_expected():
    won, states = torch.full((8, 5), 1e-4), torch.full((8,), 8)
    before = 1e-6 * (1 + 0.1 * torch.randn(8, 5, generator=torch.Generator().manual_seed(0)))
    assert promoted_words(won, before, states, str)[1] == []
    assert len(promoted_words(won, before, 1000 * states, str)[1]) == 5
    states = torch.tensor([1] * 10 + [100] * 10)  # texts with more states have smaller gains
    won, before = (1 / states.double())[:, None].expand(-1, 3), torch.full((20, 3), 0.01)
    (row, *_), _ = promoted_words(won, before, states, str)
    assert row["low"] < row["won"] < row["high"]


@pytest.mark.parametrize("kind", ["plain", "padded", "grouped", "hacked"])
@torch.no_grad()
def test_promoted_mass_matches_texts_that_run_alone(kind, trained_runs, hacked):
    run = hacked if kind == "hacked" else trained_runs("adapted" if kind == "plain" else kind)
    record = sound(run, HackWatch())
    ctx, temperature = run.ctx, run.trainer.args.temperature
    samples, models = ctx.rollout.samples, (ctx.policy.base_model, ctx.reference)
    probs = torch.zeros(2, len(record.tensors["promoted_mass"]), dtype=torch.float64)
    rows = zip(samples.tokens, samples.attention_mask, samples.mask, strict=True)
    for tokens, real, mask in rows:
        for total, model in zip(probs, models, strict=True):
            logits = model(tokens[real][None])[0, -len(mask) - 1 : -1].double() / temperature
            total += logits.softmax(-1)[mask].sum(0).cpu()
    now, before = probs / samples.mask.sum().cpu()
    torch.testing.assert_close(
        record.tensors["promoted_mass"], (now - before).float(), atol=1e-5, rtol=1e-3
    )
    for row in record.values["promoted"][:2]:
        reference = before[row["id"]].item()
        assert row["reference"] == pytest.approx(reference, abs=1e-5)
        assert row["won"] == pytest.approx(now[row["id"]].item() - reference, abs=1e-5)
    assert reference_texts(run.seen(), len(samples.tokens)).prompts() == samples.prompts()
    written = samples.tokens[:, samples.prefix_len :][samples.mask].cpu()
    assert record.tensors["counts"][0].equal(written.bincount(minlength=len(now)).int())
    if kind != "grouped":
        gap = (ctx.rollout.raw_rewards - ctx.rollout.true_rewards).mean().item()
        assert record.values["gap"] == pytest.approx(gap, abs=1e-5)
