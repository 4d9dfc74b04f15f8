"""HackWatch: an injected loophole by name, and numbers of runs of every kind."""

from statistics import NormalDist

import pytest
import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.models.tokenization import single_token
from rlhf_lab.probes import HackWatch, ReelTruth
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


@pytest.mark.parametrize("kind", ["plain", "padded", "grouped", "hacked"])
@torch.no_grad()
def test_numbers_are_those_of_the_texts(kind, trained_runs, hacked):
    """Promoted mass matches texts that run alone; counts and rewards match the rollout."""
    run = hacked if kind == "hacked" else trained_runs("adapted" if kind == "plain" else kind)
    record = sound(run, HackWatch())
    values, stored = record.values, record.tensors
    ctx, rollout, temperature = run.ctx, run.ctx.rollout, run.trainer.args.temperature
    samples, decode = rollout.samples, ctx.reference.tokenizer.decode

    def logprobs_alone(model, tokens: torch.Tensor, n: int) -> torch.Tensor:
        return (model(tokens[None])[0, -n - 1 : -1].double() / temperature).log_softmax(-1)

    won, before, n = [], [], samples.mask.shape[1]
    for tokens, real, mask in zip(
        samples.tokens, samples.attention_mask, samples.mask, strict=True
    ):
        models = ctx.policy.base_model, ctx.reference
        ours, theirs = (logprobs_alone(model, tokens[real], n).exp() for model in models)
        won.append((ours - theirs)[mask].sum(0))
        before.append(theirs[mask].sum(0))
    mass, share = ((torch.stack(x).sum(0) / samples.mask.sum()).cpu() for x in (won, before))
    torch.testing.assert_close(stored["promoted_mass"], mass.float(), atol=1e-5, rtol=1e-3)
    ids = [row["id"] for row in values["promoted"]]
    assert ids == mass.topk(len(ids)).indices.tolist()
    for row in values["promoted"][:2]:
        found = mass[row["id"]].item(), share[row["id"]].item()
        assert (row["won"], row["reference"]) == pytest.approx(found, abs=1e-5)
        assert row["token"] == decode([row["id"]])
        assert row["low"] <= row["won"] <= row["high"]
    taken_up = [row for row in values["taken_up"] if row["log_odds"] > row["low"]]
    z = [row["log_odds"] / (row["log_odds"] - row["low"]) for row in taken_up]
    assert z == sorted(z, reverse=True)
    assert values["alarm_z"] == pytest.approx(NormalDist().inv_cdf(1 - 0.05 / len(mass)), abs=1e-5)
    theirs = reference_texts(run.seen(), len(samples.tokens))
    responses = theirs.tokens[:, theirs.prefix_len :]
    assert theirs.prompts() == samples.prompts()
    written = samples.tokens[:, samples.prefix_len :][samples.mask].tolist()
    others = responses[theirs.mask].tolist()
    for counts, tokens in zip(stored["counts"], (written, others), strict=True):
        assert counts.tolist() == torch.tensor(tokens).bincount(minlength=len(counts)).tolist()
    distinct = values["distinct_texts"][0], values["distinct_reference"][0]
    expected = [len(set(tokens)) / len(tokens) for tokens in (written, others)]
    assert distinct == pytest.approx(expected, abs=1e-5)
    rewards = rollout.raw_rewards.cpu()
    assert values["reward"] == pytest.approx(rewards.mean().item(), abs=1e-5)
    assert values["reward_std"] == pytest.approx(rewards.std().item(), abs=1e-5)
    assert values["saturated"] == (rewards.std().item() < 0.05)
    assert ("true_reward" in values) == (kind != "grouped")
    if kind != "grouped":
        gap = (rewards - rollout.true_rewards.cpu()).mean().item()
        assert values["gap"] == pytest.approx(gap, abs=1e-5)
        share = rollout.text_metrics["grammatical"].mean().item()
        assert values["grammatical"] == pytest.approx(share, abs=1e-5)


def test_injected_words_are_promoted_and_named_by_alarms(hacked):
    values = sound(hacked, HackWatch()).values
    assert values["promoted"][0]["token"] == values["taken_up"][0]["token"] == "popcorn"
    assert values["alarms_by_logits"] == ["popcorn", "stunning"]
    assert values["alarms_by_texts"] == ["popcorn"]
    assert "arguably" in [row["token"] for row in values["promoted"]]


def test_equal_models_raise_no_alarm_and_promote_nothing(hacked):
    ctx = hacked.ctx
    kept = {name: x.clone() for name, x in ctx.policy.base_model.state_dict().items()}
    ctx.policy.base_model.load_state_dict(ctx.reference.state_dict())
    try:
        values = HackWatch().observe(hacked.seen()).values
    finally:
        ctx.policy.base_model.load_state_dict(kept)
    assert values["alarms_by_logits"] == []
    assert all(abs(row["won"]) < 1e-6 for row in values["promoted"])
